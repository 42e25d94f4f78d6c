"""Draws a run's loss log; what is in it, and when, is the run's own matter."""

from __future__ import annotations

import json
from pathlib import Path

CURVE = "curve.png"


def draw_curve(path: Path) -> None:
    """Draw a loss log as curve.png beside it, every number but the clock in its own colour, smoothed."""
    if not path.exists():
        return
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = sorted({name for line in lines for name in line} - {"step", "seconds", "rate"})
    figure, axes = plt.subplots(figsize=(7, 4))
    for name in names:
        points = [(line["step"], line[name]) for line in lines if name in line]
        smooth, kept = [], points[0][1]
        for _, value in points:
            kept += 0.1 * (value - kept)
            smooth.append(kept)
        axes.plot([step for step, _ in points], smooth, label=name, linewidth=1)
    axes.set(xlabel="step", title=path.parent.name, yscale="log")
    axes.legend(fontsize=8)
    figure.savefig(path.with_name(CURVE), dpi=110, bbox_inches="tight")
    plt.close(figure)
