"""README's commands as they are written, as far as that goes without a checkpoint of full size: the last one makes a
video of a sentence."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from seko_export.cli import main as export_command
from seko_runtime.cli.commands import main as seko_run
from seko_runtime.opening.artifact import read_manifest
from tests.serve.artifacts import make_single
from tests.support.shared import made_once
from tests.support.uncompiled import leave_uncompiled

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(heading: str) -> list[list[list[str]]]:
    """The words of each line, of each block of code below a heading of README."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [
        [shlex.split(line) for line in re.sub(r" && ", "\n", block).splitlines() if line.strip()]
        for block in re.findall(r"(?:^ {4}.*\n)+", section, re.MULTILINE)
    ]


def test_the_artifact_that_is_built_makes_video_of_sentences_where_it_goes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins: a tiny artifact of the same parts for the one that is built and copied, and no pip."""
    here, there = blocks("Build here, run there")
    build = next(line for line in here if line[:2] == ["seko-export", "build"])
    built = export_command.commands["build"].make_context("build", build[2:]).params
    assert built["vae"] is not None
    assert built["text_encoder"] is not None
    copied = next(line for line in here if line[0] == "rsync")
    assert {str(built["output"]), "runtime"} <= {*copied}
    film = made_once(tmp_path_factory, "serve-single", make_single)
    shutil.copytree(film / "artifact", tmp_path / built["output"].name)
    manifest, _ = read_manifest(film / "artifact")
    assert manifest.workload.video is not None
    monkeypatch.chdir(tmp_path)
    leave_uncompiled(monkeypatch)
    for words in there:
        if words[0] == "seko-run":
            assert seko_run(words[1:]) == 0, words
    (video,) = [file for file in tmp_path.iterdir() if file.is_file()]
    assert video.suffix == ".mp4"
    assert b"ftyp" in video.read_bytes()[:16]


def test_what_the_machine_that_runs_installs_suffices_for_what_it_runs() -> None:
    """The extras of the runtime: a sentence needs ``text``, an mp4 ``video``."""
    _, there = blocks("Build here, run there")
    installed = re.findall(r"\./runtime\[([\w,]+)\]", " ".join(word for line in there for word in line))
    extras = tomllib.loads((ROOT / "runtime/pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"aoti", "text", "video"} <= set(installed[0].split(",")) <= set(extras)


def test_the_scripts_of_the_quick_start_are_there() -> None:
    lines = [line for block in blocks("Try it") for line in block]
    assert lines == [["bash", "scripts/quickstart.sh"], ["bash", "scripts/test.sh"]]
    assert all((ROOT / line[1]).is_file() for line in lines)


def test_pages_download_with_the_hub_s_client_of_today() -> None:
    """`hf` comes with what the exporter installs; the program before it is gone."""
    lines = [
        line
        for page in PAGES
        for line in re.findall(r"^(?: {4})?((?:hf|huggingface\S*) .*)$", page.read_text(), re.M)
    ]
    assert lines
    program = Path(sysconfig.get_path("scripts"), "hf")
    if not program.exists():
        found = shutil.which("hf")
        if found is None:
            pytest.skip("needs hf, of huggingface_hub")
        program = Path(found)
    shown = subprocess.run([program, "download", "--help"], capture_output=True, text=True, check=True).stdout
    for line in lines:
        assert line.startswith("hf download ")
        assert [word for word in shlex.split(line) if word.startswith("--") and word not in shown] == []
