"""The VAE's convolutions in Seko's kernel beside cuDNN's, layer by layer, in milliseconds at full size.

Each line of output is a JSON object. The cases are the convolutions of a decoder's call, those with most operations
first. Order: candidates for tile sizes compile in processes of their own; each is compared with cuDNN's result and
timed alone, beside cuDNN; the fastest ones go through `kernel_admission` in processes of their own; then the
whole layer, with norm, SiLU, cache and residual, is compiled with torch's convolution and with the kernel. Where the
kernel's is faster, its tile sizes are written to the table, after each convolution, so that a run that is cut off
leaves what it has measured. With ``fp8`` the convolutions of residual blocks are also measured with e4m3, and
enter the table where they are faster than in bfloat16. Those behind an upsampling are also measured together with it,
and enter where that is faster than a kernel of their own. What the budget leaves out is named.

With ``TRITON_INTERPRET=1`` the script runs on a CPU without any GPU, at small sizes, to test the script; times then
mean nothing, and nothing is compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from scripts.bench.counting import chunk_times
from scripts.bench.graph_timing import captured_ms, emit, measured_here, relative
from scripts.bench.vae_layers import (
    DEVICE,
    DTYPE,
    INTERPRETED,
    Case,
    Groups,
    Inputs,
    Layer,
    grouped,
    kernel_inputs,
    kernels_of,
    tried,
)
from scripts.kernel_admission.conv import admit_conv
from seko_export.lowering.patches import outlined_kernels
from seko_export.lowering.patches.patch import applied
from seko_kernels import conv_reference
from seko_kernels.attention_parts import use_torchs_memory
from seko_kernels.causal_conv import DOUBLED_TAPS, conv_kernel_of, launch_causal_conv
from seko_kernels.tuned_conv import Convolution, ConvTiles, write_table

CLOSE = 0.01  # largest relative difference from torch's result: both round sums to bfloat16 once, or a tap at a time
ADMITTED = 3  # most candidates of a convolution that admission is asked about, fastest first
ADMITTING = 6  # processes that admit; each may take 15 GB of a GPU's memory
COMPILE_SHARE, ADMIT_SHARE = 0.35, 0.3  # of the budget, for the processes that compile and that admit


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    """Compile, time, admit, compare, print."""
    if not INTERPRETED and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: there is nothing to time (TRITON_INTERPRET=1 tests the script)")
    deadline = time.monotonic() + options.seconds
    groups = grouped(options)
    if options.child:
        child(json.loads(options.child), groups, options.tiles)
        return
    table = options.admit or options.work / "table.json"
    emit(
        kind="cases",
        gpu=place()["gpu"],
        operations=sum(c.operations * n for g in groups.values() for c, n in g.items()),
    )
    running = {(case, tiles) for case, tiles in kernels_of(groups, options.tiles)}
    if not INTERPRETED:
        processes = min(14, os.cpu_count() or 1)
        shares = [{"compile": share, "of": processes} for share in range(processes)]
        lines = children(shares, options.seconds * COMPILE_SHARE)
        ended = [line for line in lines if line["kind"] == "compiled"]
        compiled = {(json.dumps(line["case"]), ConvTiles(**line["tiles"])) for line in ended}
        failed = {pair for pair in running if (json.dumps(pair[0]), pair[1]) not in compiled}
        errors = Counter(line["error"] for line in lines if line["kind"] == "failed")
        emit(kind="not compiled", kernels=len(failed), of=len(running), errors=errors.most_common(5))
        if failed == running:
            raise SystemExit("no candidate compiled")
        running -= failed
    timed = time_candidates(groups, running, options.tiles, deadline)
    admissions, refused = admit_fastest(groups, timed, options.seconds * ADMIT_SHARE)
    if refused:
        write_table(table, [], [(place()["arch"], key) for key in refused])
    compare_layers(groups, admissions, table, deadline)


# -- processes -------------------------------------------------------------------------------------------------


def children(tasks: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """Run this script with each task as ``--child``, side by side; return the lines that they printed.

    A process that has not ended after `seconds` is killed: a wrong candidate may hang.
    """
    command = [sys.executable, "-m", "scripts.bench", "vae_kernels", *["--trial"] * INTERPRETED, "--child"]
    end = time.monotonic() + seconds
    running = [
        subprocess.Popen([*command, json.dumps(task)], stdout=subprocess.PIPE, text=True) for task in tasks
    ]
    lines = []
    for task, process in zip(tasks, running, strict=True):
        try:
            printed = process.communicate(timeout=max(0.1, end - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            printed = process.communicate()[0]
            emit(kind="not ended", task=task)
        lines += [
            json.loads(line) for line in printed.splitlines() if line.startswith("{") and line.endswith("}")
        ]
    return lines


def child(task: dict[str, Any], groups: Groups, most: int) -> None:
    """Run a share of the candidates, or admit tile sizes of some convolutions; print what was right."""
    if "compile" in task:
        for case, tiles in kernels_of(groups, most)[task["compile"] :: task["of"]]:
            try:
                run_kernel(case, tiles, kernel_inputs(case))
                torch.cuda.synchronize()
            except Exception as fault:  # whatever a compiler or a kernel raises is the result
                error = f"{type(fault).__name__}: {fault}"[:200]
                emit(kind="failed", case=case, tiles=asdict(tiles), error=error)
            else:
                emit(kind="compiled", case=case, tiles=asdict(tiles))
        return
    for number, order in task["admit"]:
        key, cases = list(groups.items())[number]
        largest = max(cases, key=lambda case: case.operations)
        full = (largest.frames, *largest.frame)
        for sizes in order:
            verdict = admit_conv(
                ConvTiles(**sizes), key.channels, key.filters, key.taps, DEVICE, full, fp8=key.fp8
            )
            refused = bool(verdict.refusal)
            emit(kind="refused" if refused else "admitted", number=number, tiles=sizes, **asdict(verdict))
            if not refused:
                break


# -- the kernel alone ------------------------------------------------------------------------------------------


def run_kernel(case: Case, tiles: ConvTiles, inputs: Inputs) -> Tensor:
    """Call the kernel, without the op around it."""
    out = inputs.bias.new_empty((1, case.frames, case.height, case.width, case.filters))
    processors = 4 if INTERPRETED else torch.cuda.get_device_properties(0).multi_processor_count
    use_torchs_memory()  # of the kernel's tensor descriptors, as the op does
    launch_causal_conv(
        *(
            conv_kernel_of(tiles),
            inputs.x,
            inputs.earlier,
            inputs.weight,
            inputs.scale,
            inputs.bias,
            inputs.residual,
        ),
        *(out, tiles, processors * tiles.resident, case.doubled),
    )
    return out


def run_cudnn(case: Case, inputs: Inputs) -> Callable[[], Tensor]:
    """Return a call of torch's convolution over joined channels-last frames, and the sum behind it; in place of a
    `doubled_conv` its reference, four convolutions of 2 x 2 taps."""
    if case.doubled:
        return lambda: conv_reference.doubled_conv(inputs.x, inputs.weight, inputs.bias).permute(
            0, 4, 1, 2, 3
        )
    x, earlier, weight = (None if part is None else part.to(DTYPE) for part in inputs[:3])
    assert x is not None
    assert weight is not None
    if earlier is None:
        earlier = x.new_zeros((1, case.taps[0] - 1, *x.shape[2:]))
    if inputs.scale is not None:
        weight = (weight * inputs.scale[:, None]).to(DTYPE)
    joined = torch.cat((earlier, x), 1).permute(0, 4, 1, 2, 3)
    weight = weight.permute(3, 4, 0, 1, 2).contiguous(memory_format=torch.channels_last_3d)
    residual = None if inputs.residual is None else inputs.residual.permute(0, 4, 1, 2, 3)

    def call() -> Tensor:
        y = F.conv3d(joined, weight, inputs.bias, padding=(0, case.taps[1] // 2, case.taps[2] // 2))
        return y if residual is None else y + residual

    return call


Timed = dict[Convolution, list[ConvTiles]]


def time_candidates(
    groups: Groups, running: set[tuple[Case, ConvTiles]], most: int, deadline: float
) -> Timed:
    """Time cuDNN and every candidate that runs; return each convolution's right candidates, fastest first."""
    timed: Timed = {}
    for key, cases in groups.items():
        if time.monotonic() > deadline:
            emit(kind="left out", convolution=key)
            continue
        right = [tiles for tiles in tried(key, most) if all((case, tiles) in running for case in cases)]
        times = dict.fromkeys(right, 0.0)
        cudnn_ms = 0.0
        for case, count in cases.items():
            inputs = kernel_inputs(case)
            by_cudnn = run_cudnn(case, inputs)
            expected = by_cudnn().permute(0, 2, 3, 4, 1)
            cudnn_ms += count * milliseconds(by_cudnn)
            for tiles in list(times):
                try:
                    if (difference := relative(run_kernel(case, tiles, inputs), expected)) > CLOSE:
                        raise ValueError(f"{difference} off cuDNN's result")
                    times[tiles] += count * milliseconds(
                        lambda tiles=tiles, case=case, inputs=inputs: run_kernel(case, tiles, inputs)  # type: ignore[misc]
                    )
                except Exception as fault:  # whatever a compiler or a kernel raises is the result
                    del times[tiles]
                    error = f"{type(fault).__name__}: {fault}"[:200]
                    emit(kind="failed", convolution=key, tiles=asdict(tiles), error=error)
        timed[key] = sorted(times, key=lambda tiles: times[tiles])
        work = sum(case.operations * count for case, count in cases.items())
        candidates = [{"ms": times[tiles], "tiles": asdict(tiles)} for tiles in timed[key]]
        emit(
            kind="alone",
            convolution=key,
            calls=sum(cases.values()),
            cudnn_ms=cudnn_ms,
            cudnn_tflops=1e3 * work / cudnn_ms,
            best_tflops=1e3 * work / candidates[0]["ms"] if candidates else None,  # type: ignore[operator]
            tiles=candidates,
        )
    return timed


def admit_fastest(
    groups: Groups, timed: Timed, seconds: float
) -> tuple[dict[Convolution, dict[str, Any]], list[Convolution]]:
    """Check the fastest candidates of each convolution in other processes; return those that were admitted, and the
    convolutions of which every checked candidate was refused."""
    keys = list(groups)
    orders = [
        (keys.index(key), [asdict(tiles) for tiles in order[:ADMITTED]])
        for key, order in timed.items()
        if order
    ]
    if not INTERPRETED:
        torch.cuda.empty_cache()
    admitted, refusals = dict[Convolution, dict[str, Any]](), Counter[int]()

    def check(tasks: list[dict[str, Any]], limit: float) -> None:
        for line in children(tasks, limit):
            emit(**{**line, "convolution": keys[line["number"]]})
            if line["kind"] == "admitted":
                admitted[keys[line["number"]]] = line
            refusals[line["number"]] += line["kind"] == "refused"

    check([{"admit": share} for n in range(ADMITTING) if (share := orders[n::ADMITTING])], seconds)
    for number, order in orders:
        if keys[number] not in admitted and refusals[number] < len(order):
            # Alone, as its process ended without a verdict: several that check at a time may fill the GPU.
            refusals[number] = 0
            check([{"admit": [(number, order)]}], seconds / len(orders))
    return admitted, [keys[number] for number, order in orders if refusals[number] == len(order)]


# -- whole layers ----------------------------------------------------------------------------------------------


def compare_layers(
    groups: Groups, admitted: dict[Convolution, dict[str, Any]], table: Path | None, deadline: float
) -> None:
    """Time each layer with torch's convolution and with the kernel. Write the tile sizes where the kernel won, and
    remove those of an earlier run where it lost."""
    here = place()
    torchs: dict[Convolution, float] = {}  # of the same convolution in bfloat16
    fastest: dict[Convolution, float] = {}  # of torch's and of the kernel's forms before, in bfloat16
    for key, cases in groups.items():
        if key not in admitted or time.monotonic() > deadline:
            emit(kind="left out" if key in admitted else "not admitted", convolution=key)
            continue
        tiles = ConvTiles(**admitted[key]["tiles"])
        plain = key._replace(fp8=False, taps=(1, 3, 3) if key.taps == DOUBLED_TAPS else key.taps)
        try:
            if plain not in torchs:
                torchs[plain] = fastest[plain] = total_milliseconds(cases, None)
            ms = total_milliseconds(cases, tiles)
        except Exception as fault:  # whatever a compiler or a kernel raises is the result
            emit(kind="failed", convolution=key, error=f"{type(fault).__name__}: {fault}"[:300])
            continue
        emit(kind="layers", convolution=key, calls=sum(cases.values()), torch_ms=torchs[plain], ms=ms)
        if ms < fastest[plain] and table is not None:
            figures = {name: admitted[key][name] for name in ("error", "bound")}
            row = {
                **key._asdict(),
                **figures,
                "ms": ms,
                "torch_ms": torchs[plain],
                "tiles": asdict(tiles),
                **here,
            }
            write_table(table, [row])
        elif table is not None:
            write_table(table, [], [(here["arch"], key)])
        fastest[plain] = min(fastest[plain], ms)
    emit(kind="summary", **here)


def place() -> dict[str, str]:
    """Return what a row of the table says of the GPU and the day."""
    return measured_here(interpreted=INTERPRETED) | {"torch": torch.__version__}


def total_milliseconds(cases: Counter[Case], tiles: ConvTiles | None) -> float:
    """Return the time of all calls of a convolution's layers."""
    return sum(count * layer_milliseconds(case, tiles) for case, count in cases.items())


def layer_milliseconds(case: Case, tiles: ConvTiles | None) -> float:
    """Time a layer that is compiled, with these tile sizes or by torch's convolution."""
    layer = Layer(case).to(DEVICE, DTYPE).eval().requires_grad_(False)
    for name, parameter in layer.named_parameters():
        scale = parameter[0].numel() ** -0.5 if parameter.dim() > 3 and "gamma" not in name else 0.1
        parameter.copy_(torch.randn_like(parameter) * scale + ("gamma" in name))
    inputs = kernel_inputs(case._replace(fp8=False))  # the layer quantises
    x = inputs.x[:, :, ::2, ::2].contiguous() if layer.enlarges and not case.doubled else inputs.x
    residual = None if inputs.residual is None else inputs.residual.permute(0, 4, 1, 2, 3)
    arguments = (x.permute(0, 4, 1, 2, 3), inputs.earlier, residual)
    if tiles is not None:
        layer.use_kernel(tiles)
    graph = torch.export.export(layer, arguments, strict=False).module()
    if INTERPRETED:
        return milliseconds(lambda: graph(*arguments))
    with applied(outlined_kernels.PATCH):  # or a kernel's outline, which computes nothing, would be timed
        call = torch._inductor.compile(graph, list(arguments))
        return milliseconds(lambda: call(*arguments))


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median of a call's time: on a GPU of captured calls, replayed."""
    if INTERPRETED:
        return chunk_times(call, 1)[0]
    return round(captured_ms(call), 4)
