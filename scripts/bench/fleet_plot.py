"""Simulated fleets under growing load as one picture, from the rows of docs/benchmarks/cpu.jsonl; nothing is measured.

python scripts/bench/fleet_plot.py --picture docs/images/fleet-size.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parents[2] / "docs" / "benchmarks" / "cpu.jsonl"
FIGURE = "fleet_size"


def main() -> None:
    """Read the rows and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args()
    draw(options.picture, map(json.loads, options.rows.read_text(encoding="utf-8").splitlines()))


def draw(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Draw chunks in time, the first chunk's time, and what was refused and used, by load.

    Raises
    ------
    ValueError
        If there is no row of ``fleet_size``.
    """
    newest = {row["shape"]: row for row in rows if row["figure"] == FIGURE}
    if not newest:
        raise ValueError(f"no row of {FIGURE}")
    by_buffer: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(newest.values(), key=lambda row: row["load"]):
        by_buffer.setdefault(row["buffer"], []).append(row)
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "seko", "font.size": 9}
    from matplotlib import pyplot as plt

    figure, (in_time, first, used) = plt.subplots(1, 3, figsize=(10, 2.8))
    for buffer, own in sorted(by_buffer.items()):
        loads, collected = [row["load"] for row in own], f"{buffer} chunk{'s' * (buffer > 1)} collected"
        in_time.plot(loads, [100 * row["cpr"] for row in own], marker="o", label=collected)
        first.plot(loads, [row["ttfc_ms_p50"] for row in own], marker="o", label=f"median, {collected}")
        first.plot(
            loads, [row["ttfc_ms_p99"] for row in own], marker=".", linestyle="--", label=f"p99, {collected}"
        )
    own = by_buffer[max(by_buffer)]
    loads = [row["load"] for row in own]
    used.plot(loads, [100 * row["gpu_use"] for row in own], marker="o", color="tab:green", label="GPU use")
    refused = [100 * sum(row["refused"].values()) / row["sessions"] for row in own]
    used.plot(loads, refused, marker="o", color="tab:red", label="refused")
    in_time.set(title="chunks in time, %", ylim=(80, 101))
    first.set(title="first chunk, ms", ylim=(0, None))
    used.set(title="%", ylim=(0, 101))
    for axes in (in_time, first, used):
        axes.set_xlabel("viewers that come / that fit")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
