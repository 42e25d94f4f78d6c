"""Compare what ranks measured with what one GPU measured: times, kernels, the ranks' ends of a chunk, latents."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scripts.bench.rows import append_row


def compared(
    single: Sequence[Mapping[str, Any]], several: Sequence[Mapping[str, Any]], ranks: int
) -> dict[str, Any]:
    """Return the times of a step on one GPU and on rank 0, and by kind of kernel what exceeds a rank's share."""
    both = {"one": single[0], "several": several[0]}
    passes = single[0]["passes"]
    ms = {
        name: {how: round(statistics.median(times) / passes, 3) for how, times in report["ms"].items()}
        for name, report in both.items()
    }
    return {
        "ms": ms,
        "ratios": {how: round(ms["one"][how] / ms["several"][how], 3) for how in ms["one"]},
        "peak_bytes": [report["peak_bytes"] for report in (*single, *several)],
        "ready_s": [report["ready_s"] for report in (*single, *several)],
    } | kernels_compared(both, passes, ranks)


def kernels_compared(both: Mapping[str, Mapping[str, Any]], passes: int, ranks: int) -> dict[str, Any]:
    """Return the milliseconds of a step by kind of kernel, of those that take most, and of an idle device; nothing
    where no GPU was profiled."""
    if "profile" not in both["one"]:
        return {}
    kinds = {
        name: {kind: row["time_ns"] / 1e6 / passes for kind, row in report["profile"]["buckets"].items()}
        for name, report in both.items()
    }
    kernels = {
        kind: [
            round(number, 3)
            for number in (took, kinds["several"][kind], kinds["several"][kind] - took / ranks)
        ]
        for kind, took in kinds["one"].items()
        if took or kinds["several"][kind]
    }
    idle = {name: round(report["profile"]["idle_ns"] / 1e6 / passes, 3) for name, report in both.items()}
    top = {
        name: [
            [row["name"][:80], row["calls"], round(row["time_ns"] / 1e6 / passes, 3)]
            for row in report["profile"]["top"]
        ]
        for name, report in both.items()
    }
    return {
        "kernels_ms": {"one, rank 0, more than its share": kernels},
        "idle_ms": idle,
        "top_ms": top,
    }


def append_skew(rows: Path, figure: str, shape: str, several: Sequence[Mapping[str, Any]]) -> None:
    """Append how far apart the ranks end a chunk."""
    ends = np.array([report["ends_ns"] for report in several]) / 1e6  # [ranks, chunks]
    spread = ends.max(axis=0) - ends.min(axis=0)
    median, most = float(np.median(spread)), float(spread.max())
    append_row(
        rows,
        figure,
        shape,
        median,
        "ms between the ranks' ends of a chunk",
        0.5,
        max=most,
        chunks=len(spread),
    )


def append_equal(
    rows: Path, shape: str, single: Sequence[NDArray[np.float32]], several: Sequence[NDArray[np.float32]]
) -> None:
    """Append how far the latents of two runs lie apart."""
    pairs = [*zip(single, several, strict=True)]
    errors = [float(np.linalg.norm(b - a) / np.linalg.norm(a)) for a, b in pairs]
    append_row(
        rows,
        "sp_equal",
        shape,
        max(errors),
        "largest relative difference of a chunk",
        None,
        equal_bytes=all(np.array_equal(a, b) for a, b in pairs),
        by_chunk=[float(f"{error:.3g}") for error in errors],
    )
