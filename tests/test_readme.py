"""Pages are true: figures are rows, paths are there, options, presets and backends are named. Links are mkdocs'."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.docs_site import with_options
from seko_export.backends import BACKENDS
from seko_export.cli import main as export_command
from seko_export.families.registry import families, presets
from seko_runtime.cli.commands import main as runtime_command
from tests.support.loaded import load_script

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
COMMANDS = with_options((ROOT / "docs" / "cli.md").read_text(encoding="utf-8"))
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TABLE = load_script(ROOT / "scripts" / "bench" / "table.py")
rows, missed = TABLE.newest_rows, TABLE.missed


@pytest.mark.parametrize("page", TABLE.pages(), ids=lambda page: page.name)
def test_the_figures_are_the_rows_of_the_benchmark(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TABLE.with_tables(text) == text


def test_the_figures_in_plain_words_are_rows() -> None:
    assert TABLE.figure_lines() in README
    assert TABLE.absolute_lines() in README


def test_the_first_table_of_the_performance_page_is_rows() -> None:
    lines = TABLE.dated_lines()
    assert lines in PERFORMANCE.split("## Words")[0]


def test_what_is_called_missed_is_missed() -> None:
    newest = rows()
    assert [source for _, _, (source,) in TABLE.MISSED if not missed(newest[source])] == []
    assert TABLE.missed_lines() in PERFORMANCE


def test_every_missed_goal_is_named() -> None:
    """A row beyond its goal is told by name in docs/performance.md, to which README links, and in its table."""
    assert "docs/performance.md#goals-that-are-missed-and-why" in README
    names = {figure for (_, figure, _), row in rows().items() if missed(row)}
    section = PERFORMANCE.split("## Goals that are missed, and why")[1].split("\n## ")[0]
    assert sorted(name for name in names if f"`{name}`" not in section) == []
    assert {source for source, row in rows().items() if missed(row)} == {
        source for _, _, (source,) in TABLE.MISSED
    }


def test_pages_name_every_family_preset_and_backend() -> None:
    models = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in (*families(), "sample", *presets()) if f"`{name}`" not in models] == []
    (matrix,) = re.findall(r"^\| family .*\n(?:\|.*\n)+", INDEX, re.MULTILINE)
    assert re.findall(r"`([\w-]+)`", matrix.splitlines()[0]) == [*families(), *BACKENDS.names()]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name != "adr"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_paths_in_the_text_exist(page: Path) -> None:
    """A path that is written in the text as code is there; one in a code block may be one that a reader makes."""
    text = without_blocks(page.read_text(encoding="utf-8"))
    tops = {path.split("/")[0] for path in tracked_files() if "/" in path}
    paths = [path for path in re.findall(r"`([\w.-]+/[\w./-]*)`", text) if path.split("/")[0] in tops]
    assert [path for path in paths if not (ROOT / path).exists() and "NAME" not in path] == []


def test_every_command_and_option_of_seko_export_is_named() -> None:
    missing = [name for name in export_command.commands if f"`seko-export {name}" not in COMMANDS]
    for command in export_command.commands.values():
        spelled = [option for param in command.params for option in (*param.opts, *param.secondary_opts)]
        missing += [option for option in spelled if option.startswith("-") and not named(option)]
    assert missing == []


@pytest.mark.parametrize("command", ["run", "verify", "info", "unpack"])
def test_every_option_of_seko_run_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runtime_command([command, "--help"])
    spelled = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", capsys.readouterr().out))
    assert "--json" in spelled
    assert f"`seko-run {command}" in COMMANDS
    assert sorted(option for option in spelled if not named(option)) == []


def named(option: str) -> bool:
    """Whether docs/cli.md names an option on the site, as a whole word."""
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", COMMANDS) is not None


def without_blocks(text: str) -> str:
    """A page without its blocks of code, fenced or indented."""
    return "\n".join(_outside(text.splitlines(), lambda line: line.startswith("```")))


def _outside(lines: list[str], fences: Callable[[str], bool]) -> Iterator[str]:
    inside = False
    for line in lines:
        if fences(line):
            inside = not inside
        elif not inside and not line.startswith("    "):
            yield line


def tracked_files() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()
