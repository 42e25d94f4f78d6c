"""Write the table of measured figures into README.md, from docs/benchmarks: the page repeats rows, it holds none.

python scripts/bench/table.py docs/benchmarks/h200.jsonl README.md figures:h200
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def main() -> None:
    """Replace the block between ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    rows, page, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    page.write_text(with_table(page.read_text(encoding="utf-8"), name, rows), encoding="utf-8")


def with_table(text: str, name: str, rows: Path) -> str:
    """Return the page with the newest row of each figure and shape.

    Raises
    ------
    ValueError
        If the page has no such block.
    """
    block = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)", re.DOTALL)
    if not block.search(text):
        raise ValueError(f"the page has no block between <!-- {name} --> and <!-- /{name} -->")
    return block.sub(lambda found: f"{found[1]}\n{table(rows)}\n{found[2]}", text)


def table(rows: Path) -> str:
    """Return the rows as Markdown."""
    newest: dict[tuple[str, str], dict] = {}
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        newest[row["figure"], row["shape"]] = row
    lines = ["| figure | measured on | value | bar |", "|---|---|---|---|"]
    for row in newest.values():
        bar = "" if row["bar"] is None else f"{row['bar']:g}"
        lines.append(f"| `{row['figure']}` | {row['shape']} | {row['value']:.4g} {row['unit']} | {bar} |")
    one = next(iter(newest.values()))
    versions = ", ".join(f"{name} {version}" for name, version in sorted(one["versions"].items()))
    return "\n".join([*lines, "", f"{one['gpu']}; {versions}.", ""])


if __name__ == "__main__":
    main()
