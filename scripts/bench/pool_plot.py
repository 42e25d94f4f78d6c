"""The pool's figures as one picture, from the newest rows of docs/benchmarks/h200.jsonl; nothing is measured.

python scripts/bench/pool_plot.py --picture docs/images/pool.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parents[2] / "docs" / "benchmarks" / "h200.jsonl"
FITS = {
    "1.3B, bf16": "sessions_fit_1p3b_bf16",
    "1.3B, FP4": "sessions_fit_1p3b_fp4",
    "14B, FP4": "sessions_fit_14b_fp4",
}
LATENCIES = ("open", "text", "pause", "resume", "close")


def main() -> None:
    """Read the rows and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--picture", type=Path, required=True)
    options = parser.parse_args()
    draw(options.picture, map(json.loads, options.rows.read_text(encoding="utf-8").splitlines()))


def draw(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Draw sessions that fit, calls of several against calls of one, and what moving a session takes.

    Raises
    ------
    ValueError
        If a figure has no row.
    """
    newest: dict[str, dict[str, Any]] = {}
    scaling: dict[str, dict[int, float]] = {}  # by pool: the size of a call to its share
    for row in rows:
        newest[row["figure"]] = row
        if row["figure"] == "batch_scaling":
            pool, _, size = row["shape"].rpartition(", calls of ")
            scaling.setdefault(pool, {})[int(size)] = row["value"]
    wanted = [*FITS.values(), *(f"pool_{name}_ms" for name in LATENCIES), "offload_bandwidth_share"]
    missing = [name for name in wanted if name not in newest] + ["batch_scaling"] * (not scaling)
    if missing:
        raise ValueError(f"no row of {', '.join(missing)}")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (fit, batch, moves) = plt.subplots(1, 3, figsize=(11, 3))
    fit.bar(list(FITS), [newest[name]["value"] for name in FITS.values()], color="tab:blue")
    fit.set(title="sessions that fit, 4 caches of 34,320 tokens", ylabel="sessions")
    pool, shares = list(scaling.items())[-1]
    batch.plot(list(shares), list(shares.values()), marker="o")
    batch.set(
        title=f"a call of n{pool.partition(',')[2].rpartition(',')[0]}", xlabel="n, rows at different chunks"
    )
    batch.set(ylabel="of n calls of one", ylim=(0.8, 1.02), xticks=list(shares))
    moves.bar(LATENCIES, [newest[f"pool_{name}_ms"]["value"] for name in LATENCIES], color="tab:orange")
    moves.set(
        title=f"a session of {newest['offload_bandwidth_share']['session_bytes'] / 1e9:.1f} GB", ylabel="ms"
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
