"""The kernels of few rows beside torch's ops, in microseconds a call, at the matrices of the public speech model.

Each line of output is a JSON object. A call is timed inside a captured graph of many, over weights that no L2 cache
holds, so that it costs what it costs in a step. Candidates compile first, in processes of their own. Both kernels are
timed in bf16 and e4m3 at each linear layer of steps of 1, 8 and 64 rows. What was faster than what runs without the
table, and right on this GPU, is printed as rows of the table and merged into `tuned_rows.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from scripts.bench.graph_timing import BF16, COLD_BYTES, captured_ms, emit, measured_here, normal, relative
from scripts.kernel_admission.rows import admit_rows
from seko_export.families.voxcpm2.config import NetConfig
from seko_export.families.voxcpm2.presets import FULL, PRESETS
from seko_kernels import few_rows_reference as reference
from seko_kernels.few_rows import FEW_ROWS, TICKETS, kernel_of, launch_few_rows
from seko_kernels.matmul import quantise_weight
from seko_kernels.tuned_rows import ADDED, GATED, NORM, Product, RowTiles, write_table

CONFIG = PRESETS[FULL]
EPS = 1e-5
SHARED_MEMORY = 225_000


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

# Rows of steps of 1, 8 and 64 sessions; a class of the table that ends at 8 has one row and eight. What is left out
# runs in torch's matmuls: the local nets of more sessions have more rows than the table.
ADMITTED = [
    Matrix(net, name, rows)
    for net, rows in (("decoder", 22), ("base", 1), ("encoder", 5), ("base", 64), ("encoder", 40))
    for name in NAMES
]


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


@torch.no_grad()
def run(options: argparse.Namespace) -> None:
    """Compile, time, print; merge what won into the table."""
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: there is nothing to time")
    deadline = time.monotonic() + options.seconds
    if options.child:
        share, of = map(int, options.child.split("/"))
        work = [
            (matrix, fp8, tiles)
            for matrix in ADMITTED
            for fp8 in (False, True)
            for tiles in admissible(matrix, fp8=fp8)
        ]
        for matrix, fp8, tiles in work[share::of]:
            with contextlib.suppress(Exception):  # it fails again where it is timed, and is told there
                run_tiles(matrix, tiles, *matrix_inputs(matrix, 1, zeros=True, fp8=fp8))
        return
    command = [sys.executable, "-m", "scripts.bench", options.case, "--child"]
    processes = min(14, os.cpu_count() or 1)
    compilers = [subprocess.Popen([*command, f"{share}/{processes}"]) for share in range(processes)]
    for compiler in compilers:
        compiler.wait()
    write_table(options.admit, admit(deadline))


def admit(deadline: float) -> list[dict[str, Any]]:
    """Time what the table may take at every matrix; return the table's rows of what was faster and right."""
    here, rows = measured_here(), []
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
    return microseconds(lambda: run_tiles(matrix, tiles, *inputs), len(weights))


def torch_microseconds(matrix: Matrix, *inputs: Any) -> float:
    """Time torch's ops, uncompiled and captured."""
    x, norm, weights, scales, hidden = inputs
    pairs = list(zip(weights, scales, strict=True))
    return microseconds(lambda: [by_torch(matrix, x, norm, *pair, hidden) for pair in pairs], len(pairs))


def microseconds(calls: Callable[[], object], count: int) -> float:
    """Return the microseconds of one of ``count`` calls that are made together."""
    return round(1e3 * captured_ms(calls, max(1, 24 // count)) / count, 3)


def by_torch(
    matrix: Matrix, x: Tensor, norm: Tensor, weight: Tensor, scale: Tensor | None, hidden: Tensor
) -> Tensor:
    """The reference, on the GPU."""
    y = reference.linear(reference.rms_norm(x, norm, EPS) if matrix.normed else x, weight, scale)
    if matrix.normed:
        return reference.gated(y) if matrix.gated else y
    return reference.added(hidden, y, 1.0)
