"""The kernels of a step of speech beside torch's ops, in microseconds a call, at the public model's shapes.

    python scripts/bench/voxcpm2_kernels.py --seconds 240

Each line of output is a JSON object; the last one has the fastest tiles of each matrix. A call is timed inside a
captured graph of many, over weights that no L2 cache holds, so that it costs what it costs in a step. Candidates
compile first, in processes of their own. ``--parts`` picks some of: layers, attention, sweep, admit.

    python scripts/bench/voxcpm2_kernels.py --parts admit --seconds 170 --admit kernels/seko_kernels/tuned_rows.json

times both kernels of few rows, in bf16 and e4m3, at each linear layer of steps of 1, 8 and 64 rows. What was faster
than what runs without the table, and right on this GPU, is printed as rows of the table and merged into the file.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn

from seko_export.families.voxcpm2.config import NetConfig
from seko_export.families.voxcpm2.fused_layers import FusedLocalLayer, FusedStepLayer
from seko_export.families.voxcpm2.layers import CachedLayer, LocalLayer, Positions, local_rotary, rope_tables
from seko_export.families.voxcpm2.presets import FULL, PRESETS
from seko_export.lowering import patches
from seko_export.lowering.patches.patch import applied
from seko_kernels import few_rows_reference as reference
from seko_kernels.admission_rows import admit_rows
from seko_kernels.few_rows import FEW_ROWS, TICKETS, kernel_of, launch_few_rows
from seko_kernels.few_tokens import (
    decode_parts,
    launch_decode_attention,
    launch_local_attention,
)
from seko_kernels.matmul import quantise_weight
from seko_kernels.triton.few_tokens import decode_attention_kernel, local_attention_kernel
from seko_kernels.tuned_rows import ADDED, GATED, NORM, Product, RowTiles, write_table

CONFIG = PRESETS[FULL]
BF16 = torch.bfloat16
EPS = 1e-5
COLD_BYTES = 200e6  # of weights that a graph cycles through: four times an L2 cache
COMPILED = (
    "decoder 1",
    "base 1",
    "decoder 64",
    "base 64",
)  # layers that torch.compile is timed on: each takes 15 s
SHARED_MEMORY = 225_000
LENGTH, HELD = 1024, 600  # places that a row has, and how many it holds


@dataclass(frozen=True)
class Matrix:
    """A linear layer at a number of rows."""

    net: str
    name: str
    rows: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Output channels (of gate and up one), and products of a sum."""
        net: NetConfig = getattr(CONFIG, self.net)
        return {
            "qkv": (net.attention_width + 2 * net.kv_width, net.dim),
            "o": (net.dim, net.attention_width),
            "gate_up": (net.ffn_dim, net.dim),
            "down": (net.dim, net.ffn_dim),
        }[self.name]

    @property
    def gated(self) -> bool:
        return self.name == "gate_up"

    @property
    def normed(self) -> bool:
        return self.name in ("qkv", "gate_up")

    def product(self, *, fp8: bool) -> Product:
        """The table's key."""
        outer, inner = self.sizes
        form = GATED if self.gated else NORM if self.normed else ADDED
        return Product.of(self.rows, outer, inner, form, fp8=fp8)

    def __str__(self) -> str:
        return f"{self.net} {self.name} {self.rows}"


NAMES = ("qkv", "o", "gate_up", "down")
SWEPT = [Matrix(net, name, rows) for net, rows in (("decoder", 22), ("base", 1)) for name in NAMES]
COMPARED = [Matrix("decoder", name, 44) for name in NAMES] + [Matrix("base", name, 16) for name in NAMES]

# Rows of steps of 1, 8 and 64 sessions; a class of the table that ends at 8 has one row and eight. What is left out
# runs in torch's matmuls: the local nets of more sessions have more rows than the table.
ADMITTED = [
    Matrix(net, name, rows)
    for net, rows in (("decoder", 22), ("base", 1), ("encoder", 5), ("base", 64), ("encoder", 40))
    for name in NAMES
]


def candidates(matrix: Matrix) -> Iterator[RowTiles]:
    """Tiles worth a try, the default first."""
    outer, inner = matrix.sizes
    default = RowTiles.of(matrix.rows, outer, inner, gated=matrix.gated, shared=not matrix.normed)
    yield default
    splits = (1,) if matrix.normed else (1, 2, 4)
    for channels, products, warps, stages, split in itertools.product(
        (16, 32), (256, 512), (4, 8), (3, 4), splits
    ):
        tiles = RowTiles(default.rows, channels, products, split, warps, stages)
        turn = 2 * products * (tiles.rows + channels * (1 + matrix.gated))
        programs = -(-outer // channels) * split
        if turn * stages < SHARED_MEMORY and inner >= products * split and 60 <= programs <= 800:
            yield tiles


def admissible(matrix: Matrix, *, fp8: bool) -> Iterator[RowTiles]:
    """Tiles that the table may take, those that run without it first if the matrix has so few rows."""
    outer, inner = matrix.sizes
    usual = RowTiles.of(matrix.rows, outer, inner, gated=matrix.gated, shared=not matrix.normed)
    if matrix.rows <= FEW_ROWS:
        yield usual
    block = max(16, triton.next_power_of_2(matrix.rows))
    of_weight, size = outer * (1 + matrix.gated), 1 if fp8 else 2
    for channels, products, warps in ((64, 128, 4), (64, 256, 4), (64, 256, 8), (128, 128, 8), (64, 128, 8)):
        programs = -(-of_weight // channels)
        whole = [split for split in (2, 4, 8) if inner % (split * products) == 0]
        splits = [1] if matrix.normed or not whole else [min(whole, key=lambda s: abs(programs * s - 132))]
        for split in splits:
            turn = products * (size * channels + 2 * block)
            stages = min(8, inner // split // products + 1, SHARED_MEMORY // turn - 1)
            if stages >= 2:
                yield RowTiles(block, channels, products, split, warps, stages, warpgroup=True)


def main() -> None:
    """Compile, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="budget; the sweep ends with it")
    parser.add_argument("--parts", default="layers,attention,sweep")
    parser.add_argument("--admit", type=Path, help="table of tiles to which the part admit adds its rows")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1), help="that compile")
    parser.add_argument("--compile-share", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: there is nothing to time")
    torch.set_grad_enabled(False)
    deadline = time.monotonic() + options.seconds
    if options.compile_share:
        share, of = map(int, options.compile_share.split("/"))
        for matrix, fp8, tiles in compiled_work(options.parts.split(","))[share::of]:
            with contextlib.suppress(Exception):  # it fails again where it is timed, and is told there
                run_tiles(matrix, tiles, *matrix_inputs(matrix, 1, zeros=True, fp8=fp8))
        return
    parts = options.parts.split(",")
    children = []
    if compiled_work(parts):
        command = [sys.executable, __file__, "--parts", options.parts, "--compile-share"]
        children = [
            subprocess.Popen([*command, f"{share}/{options.processes}"]) for share in range(options.processes)
        ]
    if "layers" in parts and not children:
        layers()
    if "attention" in parts:
        attention()
    for child in children:
        child.wait()
    if "admit" in parts:
        rows = admit(deadline)
        if options.admit is not None:
            write_table(options.admit, rows)
    if "sweep" in parts:
        sweep(deadline)
        if "layers" in parts:  # not while others compile: capture and compilation share the host
            layers()


def compiled_work(parts: list[str]) -> list[tuple[Matrix, bool, RowTiles]]:
    """Kernels that the parts time, with whether their weights are e4m3; processes compile them before."""
    work = []
    if "admit" in parts:
        work += [
            (matrix, fp8, tiles)
            for matrix in ADMITTED
            for fp8 in (False, True)
            for tiles in admissible(matrix, fp8=fp8)
        ]
    if "sweep" in parts:
        work += [(matrix, False, tiles) for matrix in SWEPT for tiles in candidates(matrix)]
    return work


def admit(deadline: float) -> list[dict[str, Any]]:
    """Time what the table may take at every matrix; return the table's rows of what was faster and right."""
    major, minor = torch.cuda.get_device_capability()
    here = {
        "arch": f"sm_{major}{minor}",
        "gpu": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    rows = []
    for matrix, fp8 in itertools.product(ADMITTED, (False, True)):
        if time.monotonic() > deadline:
            emit(kind="left out", matrix=str(matrix), fp8=fp8)
            continue
        inputs = matrix_inputs(matrix, copies(matrix), fp8=fp8)
        times: dict[RowTiles, float] = {}
        for tiles in admissible(matrix, fp8=fp8):
            try:
                times[tiles] = tile_microseconds(matrix, tiles, *inputs)
            except Exception as fault:  # whatever a compiler or a kernel raises: it is the finding
                error = f"{type(fault).__name__}: {fault}"[:200]
                emit(kind="failed", matrix=str(matrix), fp8=fp8, tiles=tiles, error=error)
        few = matrix.rows <= FEW_ROWS
        usual = next(admissible(matrix, fp8=fp8))
        usual_us = times.get(usual, math.inf) if few else torch_microseconds(matrix, *inputs)
        product = matrix.product(fp8=fp8)
        order = sorted(times, key=lambda tiles: times[tiles])
        timed = [{**tiles._asdict(), "us": times[tiles]} for tiles in order]
        emit(kind="admit", matrix=str(matrix), fp8=fp8, usual_us=usual_us, tiles=timed)
        for tiles in order:
            if not times[tiles] < usual_us < math.inf:
                break
            verdict = admit_rows(tiles, product, matrix.rows)
            if verdict.refusal:
                emit(kind="refused", matrix=str(matrix), fp8=fp8, tiles=tiles, reason=verdict.refusal)
                continue
            figures = {
                "us": times[tiles],
                "usual_us": usual_us,
                "error": verdict.error,
                "bound": verdict.bound,
            }
            rows.append({**product._asdict(), **figures, "tiles": tiles._asdict(), **here})
            break
    emit(kind="table", rows=rows)
    return rows


def layers() -> None:
    """Whole layers: fused, plain and compiled, at several batches."""
    for batch in (1, 2, 4, 8, 64):
        for net, tokens, rows in (("decoder", 11, 2 * batch), ("encoder", 5, batch)):
            dims: NetConfig = getattr(CONFIG, net)
            hidden = normal(rows, tokens, dims.dim)
            tables = [table.cuda() for table in local_rotary(CONFIG.rope, tokens)]
            compare_layers(f"{net} {batch}", dims, FusedLocalLayer, LocalLayer, (hidden, *tables))
        dims = CONFIG.base
        places = batch * LENGTH + 1
        caches = [normal(places, dims.kv_heads, dims.head_dim) for _ in range(2)]
        starts, first, count = (torch.full((batch,), value, device="cuda") for value in (0, HELD, 1))
        starts = torch.arange(batch, device="cuda") * LENGTH
        positions = Positions(1, LENGTH, places, CONFIG.rope.amplitude)
        rope = [table.cuda() for table in rope_tables(CONFIG.rope)]
        write, read, mask, cos, sin = positions(starts, first, count, *rope)
        hidden = normal(batch, 1, dims.dim)
        plain = (hidden, *caches, write, read, mask, cos, sin)
        fused = (hidden, *caches, starts, first, write, cos, sin)
        compare_layers(f"base {batch}", dims, FusedStepLayer, CachedLayer, plain, fused)


def compare_layers(
    name: str,
    dims: NetConfig,
    fused: type[nn.Module],
    plain: type[nn.Module],
    plain_inputs: tuple[Tensor, ...],
    fused_inputs: tuple[Tensor, ...] = (),
) -> None:
    """Time layers of random weights, and compare what they return."""
    fused_inputs = fused_inputs or plain_inputs
    size = sum(p.numel() * 2 for p in meta_layer(plain, dims).parameters())
    count = max(2, int(COLD_BYTES / size))
    layers = {kind: [random_layer(kind, dims, seed) for seed in range(count)] for kind in (fused, plain)}
    ours, theirs = layers[fused][0](*fused_inputs), layers[plain][0](*plain_inputs)
    figures: dict[str, Any] = {"difference": relative(ours, theirs), "floor_us": size / 4.8e6}
    figures["fused_us"] = microseconds([lambda m=m: m(*fused_inputs) for m in layers[fused]])  # type: ignore[misc]
    figures["plain_us"] = microseconds([lambda m=m: m(*plain_inputs) for m in layers[plain]])  # type: ignore[misc]
    if name in COMPILED:
        compiled = torch.compile(functional(plain, dims), dynamic=False)
        weights = [dict(m.named_parameters()) for m in layers[plain]]
        figures["compiled_us"] = microseconds([partial(compiled, w, plain_inputs) for w in weights])
        with tempfile.TemporaryDirectory() as folder:
            engine = engine_of(fused, dims, fused_inputs, Path(folder))
        lists = [[*layer.parameters(), *fused_inputs] for layer in layers[fused]]
        figures["engine_us"] = microseconds(
            [lambda tensors=tensors: engine(list(tensors)) for tensors in lists]
        )  # type: ignore[misc]
        figures["engine_difference"] = relative(engine(list(lists[0]))[0], ours)
    emit(kind="layer", name=name, **figures)


def engine_of(
    kind: type[nn.Module], dims: NetConfig, inputs: tuple[Tensor, ...], folder: Path
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return the layer as an artifact's engine, which takes its weights and inputs."""
    layer = meta_layer(kind, dims)
    names = [name for name, _ in layer.named_parameters()]

    class Flat(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            weights = dict(zip(names, tensors, strict=False))
            return torch.func.functional_call(layer, weights, tensors[len(names) :])  # type: ignore[no-any-return]

    example = (*random_layer(kind, dims, 0).parameters(), *inputs)
    package = str(folder / "engine.pt2")
    torch._inductor.config.cpp.vec_isa_ok = False  # finding out takes half a minute
    with warnings.catch_warnings(), applied(*patches.AOTI):
        warnings.simplefilter("ignore")
        program = torch.export.export(Flat(), example)
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    return torch._C._aoti.AOTIModelPackageLoader(package, "model", True, 1, -1).boxed_run  # type: ignore[no-any-return]


def functional(kind: type[nn.Module], dims: NetConfig) -> Callable[..., Tensor]:
    """Return the layer as a function of its weights, so that one compiled graph serves all."""
    layer = meta_layer(kind, dims)

    def run(weights: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        return torch.func.functional_call(layer, weights, inputs)  # type: ignore[no-any-return]

    return run


def attention() -> None:
    """Both attention kernels, at several numbers of warps and parts."""
    net = CONFIG.decoder
    heads = (net.heads, net.kv_heads)
    width = net.attention_width + 2 * net.kv_width
    for batch, tokens in ((2, 11), (1, 5), (16, 11), (128, 11)):
        inputs = normal(batch, tokens, width), *(t.cuda() for t in local_rotary(CONFIG.rope, tokens)), *heads
        expected = reference.local_attention(*inputs)
        figures: dict[str, Any] = {"torch_us": microseconds([partial(reference.local_attention, *inputs)])}
        for warps in (1, 2, 4, 8):
            run = partial(launch_local_attention, local_attention_kernel, *inputs, warps)
            figures["difference"] = relative(run(), expected)
            figures[f"warps_{warps}_us"] = microseconds([run])
        emit(kind="local attention", rows=batch, tokens=tokens, **figures)
    for batch, cached in ((1, HELD), (8, HELD), (64, HELD), (64, 60), (1, 8000)):
        decode(batch, cached, width, net)


def decode(batch: int, cached: int, width: int, net: NetConfig) -> None:
    """Attention of a token over each row's positions."""
    length = max(LENGTH, cached + 8)
    caches = [normal(batch * length, net.kv_heads, net.head_dim) for _ in range(2)]
    starts = torch.arange(batch, device="cuda") * length
    positions = torch.full((batch,), cached, device="cuda")
    half = [normal(batch, net.head_dim // 2).float() for _ in range(2)]
    tables = [torch.cat((table, table), -1) for table in half]
    inputs = (normal(batch, width), *tables, *caches, starts, positions, starts + positions)
    tickets = torch.zeros(TICKETS, dtype=torch.int32, device="cuda")
    default = decode_parts(batch, net.kv_heads)
    expected = reference.decode_attention(*inputs) if batch * length < 2e4 else None
    times, differences = {}, set()
    for parts, turn, warps in itertools.product((1, 2, 4, 8, 16, 32), (32, 64, 128), (2, 4)):
        if not 64 <= batch * net.kv_heads * parts <= 1100 and parts != default:
            continue
        run = partial(launch_decode_attention, decode_attention_kernel, *inputs, tickets, parts, turn, warps)
        if expected is not None:
            differences.add(relative(run(), expected))
        times[f"{parts} parts, {turn} a turn, {warps} warps"] = microseconds([run])
    best = min(times, key=lambda name: times[name])
    figures = {"best": best, "default_parts": default, "difference": max(differences, default=None)}
    emit(kind="decode attention", rows=batch, held=cached, **figures, **times)


def sweep(deadline: float) -> None:
    """Every candidate of each matrix, then the default beside torch's matmul for more rows and for fp8."""
    best: dict[str, Any] = {}
    for matrix in SWEPT:
        inputs = matrix_inputs(matrix, copies(matrix))
        torch_us = torch_microseconds(matrix, *inputs)
        times: dict[RowTiles, float] = {}
        left_out = 0
        for tiles in candidates(matrix):
            if time.monotonic() > deadline - 40:
                left_out += 1
                continue
            try:
                times[tiles] = tile_microseconds(matrix, tiles, *inputs)
            except Exception as fault:  # whatever a compiler or a kernel raises: it is the finding
                emit(
                    kind="failed",
                    matrix=str(matrix),
                    tiles=tiles,
                    error=f"{type(fault).__name__}: {fault}"[:200],
                )
        order = sorted(times, key=lambda tiles: times[tiles])
        top = [{"tiles": tiles._asdict(), "us": times[tiles]} for tiles in order[:6]]
        default = next(candidates(matrix))
        outer, inner = matrix.sizes
        size = 2 * outer * (1 + matrix.gated) * inner
        figures = {
            "left_out": left_out,
            "torch_us": torch_us,
            "default_us": times.get(default),
            "default": default._asdict(),
        }
        emit(kind="matrix", matrix=str(matrix), floor_us=size / 4.8e6, top=top, **figures)
        best[str(matrix)] = top[0] if top else None
    for matrix in COMPARED:
        if time.monotonic() > deadline - 25:
            emit(kind="left out", matrix=str(matrix))
            continue
        inputs = matrix_inputs(matrix, copies(matrix))
        tiles = next(candidates(matrix))
        us = tile_microseconds(matrix, tiles, *inputs)
        halved = tiles._replace(rows=tiles.rows // 2) if tiles.rows > 16 else tiles
        halved_us = tile_microseconds(matrix, halved, *inputs)
        torch_us = torch_microseconds(matrix, *inputs)
        emit(kind="rows", matrix=str(matrix), us=us, halved_us=halved_us, torch_us=torch_us)
    for matrix in SWEPT:
        inputs = matrix_inputs(matrix, copies(matrix), fp8=True)
        us = tile_microseconds(matrix, next(candidates(matrix)), *inputs)
        emit(kind="fp8", matrix=str(matrix), us=us)
    emit(kind="summary", gpu=torch.cuda.get_device_name(), torch=torch.__version__, best=best)


def copies(matrix: Matrix) -> int:
    """How many weights are more than a cache holds."""
    outer, inner = matrix.sizes
    return max(2, int(COLD_BYTES / (2 * outer * (1 + matrix.gated) * inner)))


Inputs = tuple[Tensor, Tensor, list[Tensor], list[Tensor | None], Tensor]


def matrix_inputs(matrix: Matrix, count: int, *, zeros: bool = False, fp8: bool = False) -> Inputs:
    """Return rows, the norm's weight, weights and their scales, and the residual."""
    outer, inner = matrix.sizes
    shape = (outer * (1 + matrix.gated), inner)
    weights = [
        torch.zeros(shape, dtype=BF16, device="cuda") if zeros else 0.03 * normal(*shape)
        for _ in range(count)
    ]
    scales: list[Tensor | None] = [None] * count
    if fp8:
        pairs = [quantise_weight(weight) for weight in weights]
        weights, scales = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return normal(matrix.rows, inner), normal(inner), weights, scales, normal(matrix.rows, outer)


def run_tiles(
    matrix: Matrix,
    tiles: RowTiles,
    x: Tensor,
    norm: Tensor,
    weights: list[Tensor],
    scales: list[Tensor | None],
    hidden: Tensor,
) -> list[Tensor]:
    """Call the kernel with every weight."""
    tickets = torch.zeros(TICKETS, dtype=torch.int32, device="cuda")
    outs = []
    for weight, scale in zip(weights, scales, strict=True):
        out = torch.empty_like(hidden)
        launch_few_rows(
            kernel_of(tiles),
            *(
                x,
                norm if matrix.normed else None,
                weight,
                scale,
                None if matrix.normed else hidden,
                out,
                tickets,
            ),
            *(EPS, 1.0, matrix.gated, matrix.name == "qkv", tiles),
        )
        outs.append(out)
    return outs


def tile_microseconds(matrix: Matrix, tiles: RowTiles, *inputs: Any) -> float:
    """Time the kernel, once its first result was compared with torch's; the result is refused if it is far off."""
    x, norm, weights, scales, hidden = inputs
    first = run_tiles(matrix, tiles, x, norm, weights[:1], scales[:1], hidden)[0]
    if (difference := relative(first, by_torch(matrix, x, norm, weights[0], scales[0], hidden))) > 0.02:
        raise ValueError(f"{difference} off torch's result")
    return microseconds([lambda: run_tiles(matrix, tiles, *inputs)]) / len(weights)


def torch_microseconds(matrix: Matrix, *inputs: Any) -> float:
    """Time torch's ops, uncompiled and captured."""
    x, norm, weights, scales, hidden = inputs
    return microseconds(
        [
            lambda w=w, s=s: by_torch(matrix, x, norm, w, s, hidden)
            for w, s in zip(weights, scales, strict=True)
        ]  # type: ignore[misc]
    )


def by_torch(
    matrix: Matrix, x: Tensor, norm: Tensor, weight: Tensor, scale: Tensor | None, hidden: Tensor
) -> Tensor:
    """The reference, on the GPU."""
    y = reference.linear(reference.rms_norm(x, norm, EPS) if matrix.normed else x, weight, scale)
    if matrix.normed:
        return reference.gated(y) if matrix.gated else y
    return reference.added(hidden, y, 1.0)


def meta_layer(kind: type[nn.Module], dims: NetConfig) -> nn.Module:
    with torch.device("meta"):
        return kind(dims, BF16).eval().requires_grad_(False)


def random_layer(kind: type[nn.Module], dims: NetConfig, seed: int) -> nn.Module:
    """Return a layer whose weights are the same for the same seed."""
    with torch.device("cuda"):
        layer = kind(dims, BF16).eval().requires_grad_(False)
    generator = torch.Generator("cuda").manual_seed(seed)
    for name, parameter in layer.named_parameters():
        scale, mean = (0.1, 1.0) if "norm" in name else (parameter.shape[-1] ** -0.5, 0.0)
        parameter.copy_(mean + scale * torch.randn(parameter.shape, generator=generator, device="cuda"))
    return layer


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def relative(ours: Tensor, expected: Tensor) -> float:
    return round(float((ours.float() - expected.float()).norm() / expected.float().norm()), 6)


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Median of a call's time, of graphs that hold every call several times."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    repeats = max(1, 24 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / repeats / len(calls))
    return round(statistics.median(times[2:]), 3)


def emit(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
