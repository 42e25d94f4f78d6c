"""Write measured figures into pages, from docs/benchmarks: a page repeats rows, it holds none.

    python scripts/bench/table.py

A block between ``<!-- figures:NAME PATTERN ... -->`` and ``<!-- /figures -->`` gets the newest row of each figure and
shape of docs/benchmarks/NAME.jsonl whose figure fits one of the patterns (``*`` stands for anything; ``FIGURE@SHAPE``
also chooses shapes, with ``*`` for blanks). Each line says when its row was measured, at which commit, and whether the
measured code has changed since (`measured`).

A block between ``<!-- plain:NAME -->`` and ``<!-- /plain -->`` gets one of the tables in plain words (`PLAIN`), of the
lines in `table_lines.py`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a file, its folder stands there

from scripts.bench.table_lines import ABSOLUTE, FIGURES, MISSED, MORE, MORE_IS_BETTER

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "docs" / "benchmarks"
# Begins a row's `reference` if Seko's own modules stood in for a package that was missing.
OWN_MODULES = "own modules"
BLOCK = re.compile(
    r"(?P<head><!-- figures:(?P<name>[\w-]+) (?P<patterns>[^>]+) -->\n).*?(?P<foot><!-- /figures -->)",
    re.DOTALL,
)

_NAMED = re.compile(r"^(S\d): .*?, ring \d+")  # a shape that docs/performance.md names
PLAIN_BLOCK = re.compile(r"(?P<head><!-- plain:(?P<name>\w+) -->\n).*?(?P<foot><!-- /plain -->)", re.DOTALL)


def main() -> None:
    """Rewrite the blocks of each page that has some."""
    for page in pages():
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


def pages() -> list[Path]:
    """Return README and the pages of docs that have a block."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in every}
    return [page for page in every if BLOCK.search(texts[page]) or PLAIN_BLOCK.search(texts[page])]


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

    def in_words(block: re.Match[str]) -> str:
        return f"{block['head']}\n{PLAIN[block['name']]()}\n{block['foot']}"

    return PLAIN_BLOCK.sub(in_words, BLOCK.sub(written, text))


def table(rows: Any, patterns: list[str]) -> str:
    """Return the newest rows of the figures that fit as Markdown, in the order in which they first came."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        shape = measured_on(row)
        for figures, _, shapes in (pattern.partition("@") for pattern in patterns):
            if fnmatchcase(row["figure"], figures) and fnmatchcase(shape, shapes or "*"):
                newest[row["figure"], shape] = row
    if not newest:
        raise ValueError(f"no row's figure fits {' '.join(patterns)}")
    return _markdown(newest)


def _markdown(newest: Mapping[tuple[str, str], dict[str, Any]]) -> str:
    """Return rows as a table. What all have in common stands in its head, or below it."""
    columns: dict[str, list[str]] = {name: [] for name in ("figure", "measured on", "value", "goal", "when")}
    units = {row["unit"] for row in newest.values()}
    for (figure, shape), row in newest.items():
        goal = goal_of(row)
        value = f"{row['value']:.4g}" if len(units) == 1 else f"{row['value']:.4g} {row['unit']}"
        cells = (
            f"`{figure}`",
            _NAMED.sub(r"\1", shape),
            value,
            "" if goal is None else f"{goal:g}",
            measured(row),
        )
        for column, cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
    names = {name: name for name in columns}
    whens = set(columns["when"])
    if len(units) == 1:
        names["value"] += f", {units.pop()}"
    if len(set(columns["figure"])) == 1:
        names["value"] = names["value"].replace("value", columns.pop("figure")[0])
    if not any(columns["goal"]):
        del columns["goal"]
    if len(whens) == 1:
        del columns["when"]
    head = [f"| {' | '.join(names[name] for name in columns)} |", "|---" * len(columns) + "|"]
    lines = [f"| {' | '.join(cells)} |" for cells in zip(*columns.values(), strict=True)]
    example = list(newest.values())[-1]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(example["versions"].items()))
    when = f", {whens.pop()}," if len(whens) == 1 else ""
    return "\n".join([*head, *lines, "", f"Measured on {example['gpu']}{when} with {versions}.", ""])


def measured(row: dict[str, Any]) -> str:
    """Return a row's date and commit, and what the measured code has had since, such as `before rooms`.

    That is said in ``dated.json`` beside the rows: by patterns of figures and shapes until a day, else by commits (an
    empty one is of rows that have none). A newer row loses the mark by its date.
    """
    marks = json.loads((BENCHMARKS / "dated.json").read_text(encoding="utf-8"))
    commit = row.get("commit") or ""
    shown = commit[:12] + "+" * commit.endswith("+")
    when = f"{row['date']} {shown}".strip()
    for mark in marks["by_figure"]:
        named = any(fnmatchcase(row["figure"], pattern) for pattern in mark["figures"])
        if named and fnmatchcase(row["shape"], mark["shapes"]) and row["date"] <= mark["until"]:
            return f"{when}, {mark['words']}"
    for mark in marks["by_commit"]:
        if commit.removesuffix("+") in mark["commits"]:
            return f"{when}, {mark['words']}"
    return when


def newest_rows() -> dict[tuple[str, str, str], dict[str, Any]]:
    """The newest row of each file, figure and shape."""
    return {
        (page.stem, row["figure"], measured_on(row)): row
        for page in sorted(BENCHMARKS.glob("*.jsonl"))
        for row in map(json.loads, page.read_text(encoding="utf-8").splitlines())
    }


def measured_on(row: dict[str, Any]) -> str:
    """Return a row's shape, with a note if Seko's own modules stood in for a missing package."""
    return f"{row['shape']}, beside {OWN_MODULES}" if OWN_MODULES in _judge(row) else row["shape"]


def _judge(row: dict[str, Any]) -> str:
    """Return what a row of a decoder was measured against; empty: it is none of a decoder."""
    return str(row.get("reference") or row.get("decoder") or "")


def goal_of(row: dict[str, Any]) -> float | None:
    """Return a row's goal, or None if the row has none, as a ratio to a stand-in."""
    return None if OWN_MODULES in _judge(row) else row["bar"]


def missed(row: dict[str, Any]) -> bool:
    """Whether a row's value is on the wrong side of its goal."""
    if (goal := goal_of(row)) is None:
        return False
    return bool(row["value"] < goal if row["figure"] in MORE_IS_BETTER else row["value"] > goal)


def figure_lines() -> str:
    """The table of README's figures."""
    newest = newest_rows()
    lines = [
        f"| {text} | {form.format(*(newest[source]['value'] for source in sources))} |"
        for text, form, sources in FIGURES
    ]
    return "\n".join(["| what | figure |", "|---|---|", *lines]) + "\n"


def absolute_lines() -> str:
    """The table of README's absolute figures."""
    newest = newest_rows()
    lines = [f"| {text} | {show(newest[source])} |" for text, show, source in ABSOLUTE]
    return "\n".join(["| what | figure |", "|---|---|", *lines]) + "\n"


def dated_lines() -> str:
    """The first table of docs/performance.md: README's figures and more, and when each was measured."""
    newest = newest_rows()
    lines = []
    for text, form, sources in (*FIGURES, *MORE):
        rows = [newest[source] for source in sources]
        figures = ", ".join(dict.fromkeys(f"`{row['figure']}`" for row in rows))
        dates = "; ".join(dict.fromkeys(measured(row) for row in rows))
        lines.append(f"| {text} | {form.format(*(row['value'] for row in rows))} | {figures} | {dates} |")
    return "\n".join(["| what | figure | row | date, commit |", "|---|---|---|---|", *lines]) + "\n"


def _side(figure: str) -> str:
    return "at least" if figure in MORE_IS_BETTER else "at most"


def missed_lines() -> str:
    """The table of what docs/performance.md says first was missed."""
    newest = newest_rows()
    lines = [
        f"| {text} | {form.format(newest[source]['value'])} | {_side(source[1])} {newest[source]['bar']:g} "
        f"| `{source[1]}` |"
        for text, form, (source,) in MISSED
    ]
    return "\n".join(["| what | figure | goal | row |", "|---|---|---|---|", *lines]) + "\n"


PLAIN: dict[str, Callable[[], str]] = {
    "absolute": absolute_lines,
    "figures": figure_lines,
    "dated": dated_lines,
    "missed": missed_lines,
}


if __name__ == "__main__":
    main()
