"""Write measured figures into pages, from docs/benchmarks: a page repeats rows, it holds none.

    python scripts/bench/table.py

A block between ``<!-- figures:NAME PATTERN ... -->`` and ``<!-- /figures -->`` gets the newest row of each figure and
shape of docs/benchmarks/NAME.jsonl whose figure fits one of the patterns (``*`` stands for anything).
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
    lines = ["| figure | measured on | value | bar |", "|---|---|---|---|"]
    for row in newest.values():
        bar = "" if row["bar"] is None else f"{row['bar']:g}"
        lines.append(f"| `{row['figure']}` | {row['shape']} | {row['value']:.4g} {row['unit']} | {bar} |")
    one = list(newest.values())[-1]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(one["versions"].items()))
    return "\n".join([*lines, "", f"{one['gpu']}; {versions}.", ""])


if __name__ == "__main__":
    main()
