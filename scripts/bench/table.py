"""Write measured figures into pages, from docs/benchmarks: a page repeats rows, it holds none.

    python scripts/bench/table.py

A block between ``<!-- figures:NAME PATTERN ... -->`` and ``<!-- /figures -->`` gets the newest row of each figure and
shape of docs/benchmarks/NAME.jsonl whose figure fits one of the patterns (``*`` stands for anything). Each line says
when its row was measured, at which commit, and whether the measured code has changed since (`measured`).
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
BLOCK = re.compile(
    r"(?P<head><!-- figures:(?P<name>[\w-]+) (?P<patterns>[^>]+) -->\n).*?(?P<foot><!-- /figures -->)",
    re.DOTALL,
)

# Commits of rows that were measured before the code was sorted into rooms (f2caa1f). So were all rows without a commit.
BEFORE_ROOMS = frozenset(
    {"3c0bf845912f", "e3047caa28c9", "9d2897d0559a", "529d26d9f81d", "57bbf6d805dd", "6648ca7ddd03"}
)
# Figures whose measured code has changed more than that: patterns of figures, one of shapes, the last day of such rows,
# and what they came before. A newer row loses the mark by its date.
OLDER: tuple[tuple[str, str, str, str], ...] = (
    (
        "build_s engine_mb first_chunk_s launches_per_chunk busy_host_p99 step_vs_eager",
        "*",
        "2026-11-20",
        "before fused layers",
    ),
    ("fused_vs_plain", "*", "2026-11-20", "before attention in whole waves"),
    (
        "batch_scaling busy_pool_p99 soak_mismatches layer_streaming first_frame_s overlap_vs_none real_time_factor",
        "*",
        "2026-11-21",
        "before the Hopper attention kernels",
    ),
    ("batch4_s1", "*", "2026-11-21", "before the faster row kernels"),
    ("e2e_s1_vs_b3", "*, fp4_fp8", "2026-11-21", "before the faster row kernels"),
    (
        "s1_exact_vs_b3 s5_* e2e_s1_vs_b3 fill_linearity",
        "*",
        "2026-11-21",
        "before the last attention kernels",
    ),
    ("import_ms", "*", "2026-11-20", "before imports waited for the first open"),
)


def main() -> None:
    """Rewrite the blocks of each page that has some."""
    for page in pages():
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


def pages() -> list[Path]:
    """Return README and the pages of docs that have a block."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in every if BLOCK.search(page.read_text(encoding="utf-8"))]


def with_tables(text: str, benchmarks: Path = BENCHMARKS) -> str:
    """Return a page with its blocks written anew.

    Raises
    ------
    ValueError
        If a block's patterns fit no row.
    """

    def written(block: re.Match[str]) -> str:
        lines = (benchmarks / f"{block['name']}.jsonl").read_text(encoding="utf-8").splitlines()
        return f"{block['head']}\n{table(map(json.loads, lines), block['patterns'].split())}\n{block['foot']}"

    return BLOCK.sub(written, text)


def table(rows: Any, patterns: list[str]) -> str:
    """Return the newest rows of the figures that fit as Markdown, in the order in which they first came."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if any(fnmatchcase(row["figure"], pattern) for pattern in patterns):
            newest[row["figure"], row["shape"]] = row
    if not newest:
        raise ValueError(f"no row's figure fits {' '.join(patterns)}")
    lines = ["| figure | measured on | value | goal | when |", "|---|---|---|---|---|"]
    for row in newest.values():
        goal = "" if row["bar"] is None else f"{row['bar']:g}"
        lines.append(
            f"| `{row['figure']}` | {row['shape']} | {row['value']:.4g} {row['unit']} | {goal} | {measured(row)} |"
        )
    one = list(newest.values())[-1]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(one["versions"].items()))
    return "\n".join([*lines, "", f"{one['gpu']}; {versions}.", ""])


def measured(row: dict[str, Any]) -> str:
    """Return a row's date and commit, and what the measured code has had since, such as `before rooms`."""
    commit = row.get("commit") or ""
    told = f"{row['date']} {commit}".strip()
    for figures, shapes, last, words in OLDER:
        named = any(fnmatchcase(row["figure"], one) for one in figures.split())
        if named and fnmatchcase(row["shape"], shapes) and row["date"] <= last:
            return f"{told}, {words}"
    return f"{told}, before rooms" if not commit or commit.removesuffix("+") in BEFORE_ROOMS else told


if __name__ == "__main__":
    main()
