"""README is true as docs are: figures are rows, links and paths lead somewhere, options are named."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seko_export.backends import BACKENDS
from seko_export.cli import main as export_command
from seko_export.families.registry import VIDEO, presets
from seko_export.options.declaration import options_table
from seko_runtime.cli.commands import main as runtime_command
from tests.loaded import load_script

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TABLE = load_script(ROOT / "scripts" / "bench" / "table.py")
rows, missed = TABLE.newest_rows, TABLE.missed


def test_readme_says_first_what_it_is() -> None:
    begin = "\n".join(README.splitlines()[:24])
    for word in ("artifact", "For whom", "torch.compile"):
        assert word in begin


def test_readme_knows_no_code_names_of_shapes_and_peers() -> None:
    assert re.findall(r"\b[SB][0-7]\b|\bbars?\b", README) == []


@pytest.mark.parametrize("page", TABLE.pages(), ids=lambda page: page.name)
def test_the_figures_are_the_rows_of_the_benchmark(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TABLE.with_tables(text) == text


def test_the_figures_in_plain_words_are_rows() -> None:
    assert len(TABLE.FIGURES) == 6
    assert TABLE.figure_lines() in README
    assert TABLE.absolute_lines() in README


def test_the_first_table_of_the_performance_page_is_rows() -> None:
    lines = TABLE.dated_lines()
    assert len(lines.splitlines()) == 2 + 8
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
    assert names == {figure for _, _, ((_, figure, _),) in TABLE.MISSED}


def test_the_step_in_the_first_lines_is_that_of_the_figures() -> None:
    newest = rows()
    values = [newest[TABLE.FIGURES[number][2][0]]["value"] for number in (0, 2)]
    begin = "\n".join(README.splitlines()[:24])
    assert "takes {:.2f} to {:.2f} of the time".format(*values) in begin


def test_readme_names_every_family_preset_and_backend() -> None:
    models = README + (ROOT / "docs" / "real-models.md").read_text(encoding="utf-8")
    assert [name for name in (*VIDEO, "sample", *presets()) if f"`{name}`" not in models] == []
    (matrix,) = re.findall(r"^\| family .*\n(?:\|.*\n)+", INDEX, re.MULTILINE)
    assert re.findall(r"`([\w-]+)`", matrix.splitlines()[0]) == [*VIDEO, *BACKENDS.names()]


def test_the_folders_of_the_index_are_those_of_the_repository() -> None:
    listed = re.findall(r"^    (\w+)/ +\S", INDEX, re.MULTILINE)
    folders = {path.split("/")[0] for path in tracked_files() if "/" in path and not path.startswith(".")}
    assert listed == sorted(folders)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = without_code(page.read_text(encoding="utf-8"))
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        goal = (page.parent / path).resolve() if path else page
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("name", ["README.md", "docs/README.md", "docs/architecture.md", "docs/cli.md"])
def test_paths_in_the_text_exist(name: str) -> None:
    """A path that is written in the text as code is there; one in a code block may be one that a reader makes."""
    text = without_blocks((ROOT / name).read_text(encoding="utf-8"))
    tops = {path.split("/")[0] for path in tracked_files() if "/" in path}
    paths = [path for path in re.findall(r"`([\w.-]+/[\w./-]*)`", text) if path.split("/")[0] in tops]
    assert [path for path in paths if not (ROOT / path).exists() and "NAME" not in path] == []


def test_modules_that_pages_name_exist() -> None:
    """By the last part of their name; decisions keep the names of their day."""
    modules = {path.split("/")[-1] for path in tracked_files()}
    pages = [page for page in PAGES if page.parent.name != "adr"]
    named = {
        (page.name, module)
        for page in pages
        for module in re.findall(r"(?<![\w*])[a-z]\w*\.py\b", page.read_text(encoding="utf-8"))
    }
    assert named
    assert {name for name in named if name[1] not in modules and "NAME" not in name[1]} == {
        ("deploy.md", "numpy.py")
    }  # a planted one


def test_every_page_and_decision_is_in_the_index() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", INDEX))
    assert [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name not in linked | {"README.md"}
    ] == []
    assert "adr/" in linked
    decisions = (ROOT / "docs" / "adr").glob("*.md")
    assert [page.name for page in decisions if f"adr/{page.name}" not in linked] == []


def test_the_options_of_build_are_the_generated_table() -> None:
    assert options_table() in COMMANDS


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
    """Whether docs/cli.md names an option, as a whole word."""
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", COMMANDS) is not None


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def without_blocks(text: str) -> str:
    """A page without its blocks of code, fenced or indented."""
    return "\n".join(_outside(text.splitlines(), lambda line: line.startswith("```")))


def without_code(text: str) -> str:
    """A page without code in it, inline or in blocks."""
    return re.sub(r"`[^`\n]*`", "", without_blocks(text))


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
