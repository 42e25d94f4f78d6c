"""README is short, and true as docs are: figures are rows, links and paths lead somewhere, options are named."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seko_export.backends import BACKENDS
from seko_export.cli import main as export_command
from seko_export.families.registry import FAMILIES, presets
from seko_export.options.declaration import options_table
from seko_runtime.cli.commands import main as runtime_command
from tests.loaded import load_script

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_BYTES = 10_240
TABLE = load_script(ROOT / "scripts" / "bench" / "table.py")

LARGE = "S1: self-forcing-1.3b, 480x832, chunk 3, ring 21"
HUGE = "S5: wan-14b, 480x832, chunk 3, ring 21"
SMALL = "S3: self-forcing-1.3b, 320x576, chunk 3, ring 12"
FIT = "self-forcing-1.3b, --chunk-frames 3 --sink-frames 1 --ring-frames 21 --pass-caches"
# What README says of rows: text, format of the values, and (file, figure, shape) of each.
Said = tuple[str, str, tuple[tuple[str, str, str], ...]]
FIGURES: tuple[Said, ...] = (
    (
        "time of a pass of the 1.3B model, exact cache; by hand = 1",
        "{:.2f}",
        (("h200", "s1_exact_vs_b3", f"{LARGE}, exact"),),
    ),
    (
        "the same over an FP4 cache",
        "{:.2f}",
        (("h200", "s1_fp4_vs_b3", f"{LARGE}, fp4"),),
    ),
    (
        "the same with fp8 matmuls and the past kept in 8 bits (`--fp8 --resident-window`)",
        "{:.2f}",
        (("h200", "s1_fp4_fp8_vs_b3", f"{LARGE}, fp4_fp8_resident"),),
    ),
    (
        "the last line for the 14B model",
        "{:.2f}",
        (("h200", "s5_fp4_fp8_vs_b3", f"{HUGE}, fp4_fp8_resident"),),
    ),
    (
        "time of a chunk with its video frames by Wan's VAE, 1.3B, same options; by hand with an eager VAE = 1",
        "{:.2f}",
        (("h200", "e2e_s1_vs_b3", f"{LARGE}, 12 video frames, fp4_fp8_resident"),),
    ),
    (
        "sessions of the 1.3B model that fit on the GPU, a cache for each of four passes: FP4, and bf16",
        "{:.0f} and {:.0f}",
        (
            ("h200", "sessions_fit_1p3b_fp4", f"{FIT}, fp4"),
            ("h200", "sessions_fit_1p3b_bf16", f"{FIT}, bf16"),
        ),
    ),
)
# What docs/performance.md says in its first table besides.
MORE: tuple[Said, ...] = (
    (
        "seconds until the first chunk of the 1.3B model over an FP4 cache, after torch was imported",
        "{:.1f}",
        (("h200", "first_chunk_s", "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, fp4"),),
    ),
    (
        "seconds of video in a second, the 1.3B model over an FP4 cache with Wan's VAE",
        "{:.1f}",
        (("h200", "real_time_factor", "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, fp4, Wan VAE"),),
    ),
)
# What was aimed at and missed, the same way; the goal follows from the rows.
MISSED: tuple[Said, ...] = (
    (
        "small videos (1.3B, 320x576, window 12): time of a pass, eager PyTorch = 1, at best",
        "{:.2f}",
        (("h200", "s3_vs_eager", f"{SMALL}, fp4_fp8"),),
    ),
    (
        "four rows of these in one call; four calls = 1",
        "{:.3f}",
        (("h200", "batch4_s3", f"{SMALL}, B=4, fp4_fp8_resident"),),
    ),
    (
        "the chunk with its video frames from above, without `--resident-window`",
        "{:.2f}",
        (("h200", "e2e_s1_vs_b3", f"{LARGE}, 12 video frames, fp4_fp8"),),
    ),
    (
        "PSNR that the sample loses by fp8 matmuls, dB",
        "{:.1f}",
        (("kv-quality", "fused_psnr_loss", "sample, fp4, 8-bit attention and fp8 matmuls, after 7 chunks"),),
    ),
    (
        "prompts that the sample follows less with an FP4 cache, at a stream's start, points of 100",
        "{:.0f}",
        (("kv-quality", "kv_following_loss", "sample, fp4-before-rope, start of the stream"),),
    ),
    (
        "CPU time to import what opens an artifact, ms",
        "{:.0f}",
        (("cpu", "import_ms", "from seko_runtime import open_artifact"),),
    ),
    (
        "engines of the 1.3B model with an exact cache, MB",
        "{:.1f}",
        (("h200", "engine_mb", "S1: 1.3B, 480x832, chunk 3, ring 21, B=1, bf16"),),
    ),
)
MORE_IS_BETTER = {"prompts_followed", "kv_psnr", "real_time_factor"}


def rows() -> dict[tuple[str, str, str], dict[str, Any]]:
    """The newest row of each file, figure and shape."""
    return {
        (page.stem, row["figure"], row["shape"]): row
        for page in sorted((ROOT / "docs" / "benchmarks").glob("*.jsonl"))
        for row in map(json.loads, page.read_text(encoding="utf-8").splitlines())
    }


def missed(row: dict[str, Any]) -> bool:
    """Whether a row's value is on the wrong side of its goal."""
    if row["bar"] is None:
        return False
    return bool(row["value"] < row["bar"] if row["figure"] in MORE_IS_BETTER else row["value"] > row["bar"])


def figure_lines() -> str:
    """The table of README's figures."""
    newest = rows()
    lines = [
        f"| {text} | {form.format(*(newest[one]['value'] for one in sources))} |"
        for text, form, sources in FIGURES
    ]
    return "\n".join(["| what | figure |", "|---|---|", *lines]) + "\n"


def dated_lines() -> str:
    """The first table of docs/performance.md: README's figures and two more, and when each was measured."""
    newest = rows()
    lines = []
    for text, form, sources in (*FIGURES, *MORE):
        found = [newest[one] for one in sources]
        told = ", ".join(dict.fromkeys(f"`{row['figure']}`" for row in found))
        made = "; ".join(dict.fromkeys(TABLE.measured(row) for row in found))
        lines.append(f"| {text} | {form.format(*(row['value'] for row in found))} | {told} | {made} |")
    return "\n".join(["| what | figure | row | date, commit |", "|---|---|---|---|", *lines]) + "\n"


def missed_lines() -> str:
    """The table of what README says was missed."""
    newest = rows()
    lines = [
        f"| {text} | {form.format(newest[source]['value'])} | {newest[source]['bar']:g} |"
        for text, form, (source,) in MISSED
    ]
    return "\n".join(["| what | figure | goal, at most |", "|---|---|---|", *lines]) + "\n"


def test_readme_is_short() -> None:
    assert len(README.encode()) <= MAX_BYTES


def test_readme_says_first_what_it_is() -> None:
    begin = "\n".join(README.splitlines()[:15])
    for word in ("artifact", "For whom", "torch.compile"):
        assert word in begin


def test_readme_knows_no_code_names_of_shapes_and_peers() -> None:
    assert re.findall(r"\b[SB][0-7]\b|\bbars?\b", README) == []


@pytest.mark.parametrize("page", TABLE.pages(), ids=lambda page: page.name)
def test_the_figures_are_the_rows_of_the_benchmark(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TABLE.with_tables(text) == text


def test_the_figures_in_plain_words_are_rows() -> None:
    assert len(FIGURES) == 6
    assert figure_lines() in README


def test_the_first_table_of_the_performance_page_is_rows() -> None:
    lines = dated_lines()
    assert len(lines.splitlines()) == 2 + 8
    assert lines in PERFORMANCE.split("## Words")[0]


def test_what_readme_calls_missed_is_missed() -> None:
    newest = rows()
    assert [source for _, _, (source,) in MISSED if not missed(newest[source])] == []
    assert missed_lines() in README


def test_every_missed_goal_is_named() -> None:
    """A row beyond its goal is told by name in docs/performance.md, and of each such figure one in README."""
    names = {figure for (_, figure, _), row in rows().items() if missed(row)}
    section = PERFORMANCE.split("## Goals that are missed, and why")[1].split("\n## ")[0]
    assert sorted(name for name in names if f"`{name}`" not in section) == []
    assert names == {figure for _, _, ((_, figure, _),) in MISSED}


def test_the_step_in_the_first_lines_is_that_of_the_figures() -> None:
    newest = rows()
    values = [newest[FIGURES[number][2][0]]["value"] for number in (0, 2)]
    begin = "\n".join(README.splitlines()[:15])
    assert "takes {:.2f} to {:.2f} of the time".format(*values) in begin


def test_readme_names_every_family_preset_and_backend() -> None:
    assert [name for name in (*FAMILIES, "sample", *presets()) if f"`{name}`" not in README] == []
    (matrix,) = re.findall(r"^\| family .*\n(?:\|.*\n)+", README, re.MULTILINE)
    assert re.findall(r"`(\w+)`", matrix.splitlines()[0]) == [*FAMILIES, *BACKENDS]


def test_the_folders_of_readme_are_those_of_the_repository() -> None:
    listed = re.findall(r"^    (\w+)/ +\S", README, re.MULTILINE)
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


def test_every_page_and_decision_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)#\s]+)", index))
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
        spelled = [one for param in command.params for one in (*param.opts, *param.secondary_opts)]
        missing += [one for one in spelled if one.startswith("-") and not named(one)]
    assert missing == []


@pytest.mark.parametrize("command", ["run", "verify", "info", "unpack"])
def test_every_option_of_seko_run_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runtime_command([command, "--help"])
    spelled = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", capsys.readouterr().out))
    assert "--json" in spelled
    assert f"`seko-run {command}" in COMMANDS
    assert sorted(one for one in spelled if not named(one)) == []


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
