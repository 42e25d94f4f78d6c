"""Attention in Seko's kernels and every candidate for its tiles on one GPU, beside cuDNN, within a budget of seconds.

Each line of output is a JSON object, the last one the summary. Order: candidates compile in processes of their own (a
compiler or a kernel that crashes or hangs takes one candidate with it); attention, each candidate after
`kernel_admission`, never before; cuDNN's; the expansion of the cache; the 16-bit attention. What the budget leaves out
is named in the summary. The fastest admitted tiles of each shape class are written to `tuned_attention.json`, and where
the 16-bit attention is faster than torch's to `tuned_attention_bf16.json`.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton.testing
from torch import Tensor

from scripts.bench.graph_timing import emit, measured_here
from scripts.bench.kernel_shapes import (
    SHAPES,
    Shape,
    Timed,
    cudnn_attention,
    exact_window,
    expansion,
    torchs_attention,
)
from scripts.bench.rows import append_row
from scripts.kernel_admission.attention import admit, admit_bf16
from seko_kernels import tuned_bf16
from seko_kernels.attention import OwnTokens, attention_fp8, v_columns
from seko_kernels.attention_bf16 import attention_bf16
from seko_kernels.fused_reference import e4m3_cast, int8_tiles, largest_of_tiles
from seko_kernels.tuned import (
    SPECIALISED,
    TABLE,
    AttentionTiles,
    safe_tiles,
    shape_class,
    write_table,
)

BARS = {"S1": ("attn_h12_vs_cudnn", 0.72), "S5": ("attn_h40_vs_cudnn", 0.72)}  # ratios, expansion included
COMPILE_SECONDS = 120  # of one candidate for all shapes; more is a hang
SMALL_SIZE = (200, 1000)  # queries and keys; no multiples of 16, so no more code than S1 and S5 take
GRACE_SECONDS = 90  # beyond the budget, for what was begun within it


def candidates() -> list[AttentionTiles]:
    """Tiles worth a try, the likeliest first.

    Without Triton's own warp specialisation, polynomials for exponentials and 256 keys a tile: refused, wrong or no
    faster wherever they were tried (docs/adr/0012).
    """
    return (
        [SPECIALISED]
        + [AttentionTiles(64, 128, own_n, stages, 4, resident=2) for own_n in (64, 32) for stages in (3, 2)]
        + [
            AttentionTiles(64, 64, 64, 4, 4, resident=2),
            AttentionTiles(128, 128, 64, 3, 8),
            AttentionTiles(128, 128, 128, 2, 8),
            AttentionTiles(128, 64, 64, 4, 8),
        ]
    )


def run(options: argparse.Namespace) -> None:
    """Compile, time, admit; print the lines."""
    shapes = [SHAPES[name] for name in options.shapes]
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: there is nothing to time")
    if options.child:
        tiles = json.loads(options.child)
        compile_one(AttentionTiles(**tiles) if tiles else None, shapes)
        return
    faulthandler.dump_traceback_later(
        options.seconds + GRACE_SECONDS, exit=True
    )  # if a kernel hangs after all
    bench = Bench(time.monotonic() + options.seconds)
    with torch.no_grad():
        tiles = bench.compiled(options)
        for shape in shapes:
            bench.attention(shape, tiles)
            bench.expansion(shape)
        for shape in shapes:
            bench.attention_bf16(shape)
    bench.summary(options.rows, shapes)


def compile_one(tiles: AttentionTiles | None, shapes: Iterable[Shape]) -> None:
    """Compile a candidate for each shape by running it on zeros, and admit it on small cases; refused: exit with why.

    Without tiles it is the 16-bit attention.

    Here and not in the timing process, because a wrong candidate may hang. What was compiled stays in Triton's cache.
    """
    seen = set()
    for shape in shapes:
        small = (shape.heads, *SMALL_SIZE)
        if tiles is not None:
            attention_fp8(*attention_inputs(shape, zeros=True), tiles)
        if shape.heads not in seen:
            seen.add(shape.heads)
            verdict = (
                admit_bf16("cuda", small) if tiles is None else admit(tiles, shape.head_dim, "cuda", small)
            )
            if verdict.refusal:
                raise SystemExit(f"{shape.heads} heads: {verdict.refusal}")
    torch.cuda.synchronize()


AttentionInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, OwnTokens]


def attention_inputs(shape: Shape, *, zeros: bool = False) -> AttentionInputs:
    """Arguments of `attention_fp8` over a full cache."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        draw = torch.zeros if zeros else partial(torch.randn, generator=generator)
        return draw(size, device="cuda")

    s = shape
    past = s.cache_tokens - s.tokens
    q = normal(1, s.tokens, s.heads, s.head_dim).bfloat16()
    keys = normal(1, past, s.heads, s.head_dim)
    codes, k_scale = int8_tiles(keys, largest_of_tiles(keys))
    del keys
    v = e4m3_cast(normal(1, s.heads, s.head_dim, v_columns(past)))
    ones, valid = torch.ones(s.heads, device="cuda"), torch.tensor([s.cache_tokens], device="cuda")
    projected = normal(1, s.tokens, 3 * s.width).bfloat16()
    own = OwnTokens(normal(*q.shape).bfloat16(), projected.chunk(3, dim=-1)[2])
    return q, codes, k_scale, v, ones, valid, own


class Bench:
    """The measurements so far, and the time that is left.

    Parameters
    ----------
    deadline : float
        Time at which measuring ends, in seconds of the monotonic clock.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.left_out: list[str] = []
        self.times: dict[tuple[str, str], float] = {}  # (shape, name) to ms
        self.no_16_bits = ""  # why the 16-bit attention is not tried
        self.exact: dict[str, dict[str, Any]] = {}  # shape class to its row of the 16-bit attention
        self.admitted: dict[str, list[dict[str, Any]]] = {}  # shape to its admitted candidates

    def compiled(self, options: argparse.Namespace) -> list[AttentionTiles]:
        """Compile all candidates side by side and return those that did not fail, the safe one among them."""

        def child(tiles: AttentionTiles | None) -> str:
            command = [sys.executable, "-m", "scripts.bench", options.case, "--child"]
            limit = min(COMPILE_SECONDS, max(1.0, self.deadline - time.monotonic()))
            try:
                done = subprocess.run(
                    [*command, json.dumps(tiles and asdict(tiles))],
                    capture_output=True,
                    text=True,
                    timeout=limit,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"not compiled after {limit:.0f} s"
            lines = (done.stderr.strip().splitlines() or ["no message"]) if done.returncode else []
            return f"ended with {done.returncode}: {lines[-1][:200]}" if lines else ""

        started = time.monotonic()
        wanted = list(dict.fromkeys([safe_tiles(measured_here()["arch"]), *candidates()]))
        with ThreadPoolExecutor(min(12, os.cpu_count() or 1)) as pool:
            self.no_16_bits, *failures = pool.map(child, [None, *wanted])
        emit(kind="compiled", seconds=time.monotonic() - started, candidates=len(wanted))
        for tiles, failure in zip(wanted, failures, strict=True):
            if failure:
                emit(kind="attention", tiles=asdict(tiles), refusal=failure)
        return [tiles for tiles, failure in zip(wanted, failures, strict=True) if not failure]

    def attention(self, shape: Shape, wanted: list[AttentionTiles]) -> None:
        """Time cuDNN's attention, then admit and time each candidate."""
        self.time(shape, cudnn_attention(shape, "cuda"))
        q, k, k_scale, v, v_scale, valid, own = attention_inputs(shape)
        rows = self.admitted.setdefault(shape.name, [])
        for tiles in wanted:
            if not self.has_time(f"{shape.name} attention {tiles}"):
                continue
            verdict = admit(tiles, shape.head_dim, "cuda", (shape.heads, shape.tokens, shape.cache_tokens))
            line = {"tiles": asdict(tiles), "error": verdict.error, "bound": verdict.bound}
            if verdict.refusal:
                emit(kind="attention", shape=shape.name, **line, refusal=verdict.refusal)
                continue
            ms, half_ms = (
                milliseconds(partial(attention_fp8, q, k, k_scale, v, v_scale, seen, own, tiles))
                for seen in (valid, valid // 2)
            )
            row = {**line, "ms": ms, "tflops": shape.attention_flops / ms / 1e9, "half_full_ms": half_ms}
            emit(kind="attention", shape=shape.name, **row)
            rows.append({**row, "key": tiles})

    def expansion(self, shape: Shape) -> None:
        """Time what 8-bit attention takes beside itself: a figure is of both."""
        if self.has_time(f"{shape.name} fp8_expand"):
            self.time(shape, expansion(shape, "cuda"))

    def attention_bf16(self, shape: Shape) -> None:
        """Admit the 16-bit attention, then time it beside torch's as an engine has it."""
        if self.no_16_bits:
            emit(kind="attention, 16 bits", shape=shape.name, refusal=self.no_16_bits)
            return
        self.time(shape, torchs_attention(shape, "cuda"))
        torch_ms = self.times.get((shape.name, "sdpa_bf16, whole waves"))
        if torch_ms is None or not self.has_time(f"{shape.name} 16-bit attention"):
            return
        verdict = admit_bf16("cuda", (shape.heads, shape.tokens, shape.cache_tokens - shape.tokens))
        if verdict.refusal:
            emit(kind="attention, 16 bits", shape=shape.name, refusal=verdict.refusal)
            return
        q, k, v, valid = exact_window(shape, "cuda")
        ms, half_ms = (milliseconds(partial(attention_bf16, q, k, v, seen)) for seen in (valid, valid // 2))
        place = shape_class(1, shape.heads, shape.tokens)
        figures = {"error": verdict.error, "bound": verdict.bound, "ms": ms, "torch_ms": torch_ms}
        rates = {"tflops": shape.attention_flops / ms / 1e9, "half_full_ms": half_ms}
        emit(kind="attention, 16 bits", shape=shape.name, **figures, **rates)
        self.exact.setdefault(place, {
            "head_dim": shape.head_dim, "shape_class": place, **figures,
            "measured_on": shape.name, **measured_here(),
        })  # fmt: skip

    def time(self, shape: Shape, timed: Timed) -> None:
        """Time one call; a failure is a line of its own, and the rest goes on."""
        if not self.has_time(f"{shape.name} {timed.name}"):
            return
        try:
            ms = milliseconds(timed.run)
        except Exception as fault:  # whatever a compiler or a kernel raises: it is the finding
            emit(
                kind="failed",
                shape=shape.name,
                name=timed.name,
                error=f"{type(fault).__name__}: {fault}"[:300],
            )
            return
        self.times[shape.name, timed.name] = ms
        scale = 1e6 if timed.unit == "GB/s" else 1e9
        rate = {timed.unit: timed.amount / ms / scale}
        emit(kind="kernel", shape=shape.name, name=timed.name, ms=ms, **rate)

    def has_time(self, what: str) -> bool:
        """Tell whether the budget is not spent; note what is left out if it is."""
        if time.monotonic() < self.deadline:
            return True
        self.left_out.append(what)
        return False

    def summary(self, rows_file: Path, shapes: list[Shape]) -> None:
        """Write tables and rows, and print the last line."""
        best: dict[str, dict[str, Any]] = {}
        table: dict[str, dict[str, Any]] = {}
        for shape in shapes:
            rows = sorted(self.admitted.get(shape.name, []), key=lambda row: row["ms"])
            cudnn = self.times.get((shape.name, "sdpa_cudnn_bf16"))
            expand = self.times.get((shape.name, "fp8_expand"))
            if not rows or cudnn is None:
                continue
            top = rows[0]
            entry = {
                "tiles": asdict(top["key"]),
                "ms": top["ms"],
                "cudnn_ms": cudnn,
                "ratio": top["ms"] / cudnn,
            }
            best[shape.name] = entry
            place = shape_class(1, shape.heads, shape.tokens)
            row = {
                "head_dim": shape.head_dim,
                "shape_class": place,
                "tiles": asdict(top["key"]),
            }
            row |= {"error": top["error"], "bound": top["bound"], "ms": top["ms"], "measured_on": shape.name}
            table.setdefault(place, row | measured_here())
            if expand is not None:
                entry["ratio_with_expand"] = (top["ms"] + expand) / cudnn
                if shape.name in BARS:
                    figure, bar = BARS[shape.name]
                    sizes = (
                        f"{shape.name}: {shape.heads} x {shape.tokens} x {shape.cache_tokens}, head_dim 128"
                    )
                    append_row(
                        *(rows_file, figure, sizes, entry["ratio_with_expand"]),
                        *("(expand from FP4 + attention, the past in 8 bits) / cuDNN bf16", bar),
                        attention_ms=top["ms"], expand_ms=expand, cudnn_ms=cudnn, tiles=entry["tiles"],
                    )  # fmt: skip
        if table:
            write_table(TABLE, list(table.values()))
        if self.exact:
            faster = [row for row in self.exact.values() if row["ms"] < row["torch_ms"]]
            tuned_bf16.write_table(tuned_bf16.TABLE, faster)
        emit(kind="summary", best=best, left_out=self.left_out, gpu=torch.cuda.get_device_name())


def milliseconds(run: Any) -> float:
    """Median time of one call inside a captured graph: without the host, as in an engine."""
    torch.cuda.synchronize()  # it is called on another stream
    return float(triton.testing.do_bench_cudagraph(run, rep=20, return_mode="median"))
