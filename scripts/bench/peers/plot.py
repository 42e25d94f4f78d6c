"""One picture of the comparison: a chunk's time and the cache's bytes, peers and engines, with the floors drawn in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.peers.shapes import BF16_FLOPS, FP8_FLOPS, SHAPES

_OURS, _THEIRS, _WRONG = "#1b7f4d", "#8a8f98", "#c0392b"


def floors_ms(shape: str, passes: int) -> dict[str, float]:
    """Return the milliseconds that a chunk's arithmetic takes at the rate of a large matmul."""
    flops = passes * SHAPES[shape].step_flops()
    return {"bf16": 1e3 * flops / BF16_FLOPS, "fp8": 1e3 * flops / FP8_FLOPS}


def draw(results: Mapping[str, Mapping[str, Any]], passes: int, path: Path) -> None:
    """Draw a row of two bar charts for every shape.

    Raises
    ------
    ImportError
        If there is no matplotlib.
    ValueError
        If nothing was measured.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    measured = {
        shape: {name: result for name, result in by_engine.items() if "kv_bytes" in result}
        for shape, by_engine in results.items()
    }
    measured = {shape: by_engine for shape, by_engine in measured.items() if by_engine}
    if not measured:
        raise ValueError("nothing was measured, so there is nothing to draw")
    figure, rows = pyplot.subplots(len(measured), 2, figsize=(11, 3.4 * len(measured)), squeeze=False)
    for axes, (shape, by_engine) in zip(rows, measured.items(), strict=True):
        names = sorted(by_engine, key=lambda name: (name[0] != "B", name))
        colours = [
            _WRONG if not by_engine[name]["verdict"]["ok"] else _THEIRS if name[0] == "B" else _OURS
            for name in names
        ]
        axes[0].bar(names, [by_engine[name]["chunk_ms"]["median"] for name in names], color=colours)
        for (name, floor), style in zip(floors_ms(shape, passes).items(), ("--", ":"), strict=True):
            axes[0].axhline(floor, color="black", linestyle=style, label=f"{name} floor, {floor:.0f} ms")
        axes[0].set_title(f"{SHAPES[shape].text}: ms a chunk", fontsize=9)
        axes[0].legend(fontsize=7)
        axes[1].bar(names, [by_engine[name]["kv_bytes"] / 1e9 for name in names], color=colours)
        axes[1].set_title("KV cache, GB", fontsize=9)
        for axis in axes:
            axis.tick_params(labelsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
