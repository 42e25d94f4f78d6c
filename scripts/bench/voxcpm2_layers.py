"""The fused layers and the attention kernels of a step of speech beside torch's, in microseconds a call, at the public
model's shapes.

    python scripts/bench/voxcpm2_layers.py --parts layers,attention

Each line of output is a JSON object. A call is timed inside a captured graph of many, over weights that no L2 cache
holds, so that it costs what it costs in a step. `voxcpm2_kernels.py` times the matrices of these layers.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from graph_timing import BF16, COLD_BYTES, emit, microseconds, normal, relative
from torch import Tensor, nn

from seko_export.families.voxcpm2.config import NetConfig
from seko_export.families.voxcpm2.fused_layers import FusedLocalLayer, FusedStepLayer
from seko_export.families.voxcpm2.layers import CachedLayer, LocalLayer, Positions, local_rotary, rope_tables
from seko_export.families.voxcpm2.presets import FULL, PRESETS
from seko_export.lowering import patches
from seko_export.lowering.patches.patch import applied
from seko_kernels import few_rows_reference as reference
from seko_kernels.few_rows import TICKETS
from seko_kernels.few_tokens import decode_parts, launch_decode_attention, launch_local_attention
from seko_kernels.triton.few_tokens import decode_attention_kernel, local_attention_kernel

CONFIG = PRESETS[FULL]
COMPILED = (
    "decoder 1",
    "base 1",
    "decoder 64",
    "base 64",
)  # layers that torch.compile is timed on: each takes 15 s
LENGTH, CACHED_POSITIONS = 1024, 600  # of a row: room in the cache, and positions that the cache has
PARTS = ("layers", "attention")


@torch.no_grad()
def main() -> None:
    """Time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parts = parser.parse_args().parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(
            f"--parts has the unknown {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}"
        )
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: there is nothing to time")
    if "layers" in parts:
        layers()
    if "attention" in parts:
        attention()


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
        first, count = (torch.full((batch,), value, device="cuda") for value in (CACHED_POSITIONS, 1))
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
    for batch, cached in (
        (1, CACHED_POSITIONS),
        (8, CACHED_POSITIONS),
        (64, CACHED_POSITIONS),
        (64, 60),
        (1, 8000),
    ):
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


if __name__ == "__main__":
    main()
