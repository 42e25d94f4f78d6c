"""The scripts that a stranger begins with: which torch they install, and what they run for which arguments."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from seko_export.cli import main as export_command
from seko_runtime.cli.parser import SUMMARIES, parse
from seko_serve.cli import parser as serve_parser

ROOT = Path(__file__).parents[1]
PIN = next(line for line in (ROOT / "scripts/constraints.txt").read_text().splitlines() if "torch==" in line)
CUDA = json.dumps({"install": [{"metadata": {"requires_dist": ["nvidia-cudnn-cu13==9.20.0.48"]}}]})
CPU = json.dumps({"install": [{"metadata": {"requires_dist": ["filelock"]}}]})
COPIED = (
    *(
        f"scripts/{name}"
        for name in ("quickstart.sh", "venv.sh", "constraints.txt", "container/Dockerfile.cpu")
    ),
    *(f"{name}pyproject.toml" for name in ("", "runtime/", "kernels/", "serve/")),
)
# Stands for the Python of .venv: notes each command, and answers as an index would.
PYTHON = """#!/bin/bash
echo "$*" >>"$NOTES"
case "$*" in
*"config list"*) echo "$CONFIG" ;;
*--dry-run*) echo "$REPORT" ;;
*--index-url*) exit "$REFUSES" ;;
*"import av"*) exit 0 ;;
*"requires("*) exit "$OWN_TRITON" ;;
esac
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def ran(folder: Path, command: str, *, gpu: bool = False, **answers: str) -> tuple[list[str], str]:
    """Run a line of bash where `.venv` is already made; what its Python was told, and what was said."""
    for name in COPIED:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    program(folder / ".venv/bin/python", PYTHON)
    program(folder / "bin/nvidia-smi", f"#!/bin/bash\nexit {int(not gpu)}\n")
    notes = folder / "notes"
    notes.touch()
    answered = {"CONFIG": "", "REPORT": CUDA, "REFUSES": "0", "OWN_TRITON": "0"} | answers
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NOTES": str(notes), **answered}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return notes.read_text().splitlines(), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("answers", "gpu", "by_index", "plainly", "words"),
    [
        ({}, False, True, False, "for CPUs: no NVIDIA GPU is seen"),
        ({"REFUSES": "1"}, False, True, True, "torch for CUDA comes instead, with 2.7 GB"),
        ({"REPORT": CPU}, False, False, True, f"installing {PIN}"),
        ({"CONFIG": "global.index-url='x'"}, False, False, True, f"installing {PIN}"),
        ({"CONFIG": ":env:.find-links='x'"}, False, False, True, f"installing {PIN}"),
        ({}, True, False, True, f"installing {PIN}"),
    ],
)
def test_without_a_gpu_torch_comes_for_cpus_unless_an_index_was_chosen(
    tmp_path: Path, answers: dict[str, str], gpu: bool, by_index: bool, plainly: bool, words: str
) -> None:
    notes, said = ran(tmp_path, "source scripts/venv.sh && seko_make_venv", gpu=gpu, **answers)
    installed = [line for line in notes if line.endswith(PIN) and "--dry-run" not in line]
    assert ["--index-url" in line for line in installed] == [True] * by_index + [False] * plainly
    index = re.search(r"--index-url (\S+)", (ROOT / "scripts/container/Dockerfile.cpu").read_text())
    assert index is not None
    assert all(f"--index-url {index[1]} " in line for line in installed[:by_index])
    assert words in said


def test_an_environment_of_uv_is_used_as_it_is(tmp_path: Path) -> None:
    """It has no pip."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.13.9\n")
    line = 'source scripts/venv.sh && seko_make_venv && seko_add_serve "" && echo "$PYTHON"'
    notes, said = ran(tmp_path, line)
    assert (notes, said.strip()) == ([], str(tmp_path / ".venv/bin/python"))


@pytest.mark.parametrize(("own", "pinned"), [("0", True), ("1", False)])
def test_torch_that_requires_its_own_triton_is_not_asked_for_another(
    tmp_path: Path, own: str, pinned: bool
) -> None:
    """Constraints of pip hold for what a requirement requires, too: torch for CUDA and another Triton cannot be had."""
    notes, _ = ran(tmp_path, "source scripts/venv.sh && seko_make_venv", OWN_TRITON=own)
    assert ("triton==" in (tmp_path / ".venv/constraints.txt").read_text()) is pinned
    assert all("--constraint .venv/constraints.txt" in line for line in notes if " install " in line)


@pytest.mark.parametrize(
    ("arguments", "made", "run"),
    [
        ("", "artifacts/quickstart", "run artifacts/quickstart --seed 0 -o out/quickstart.mp4 --prompt"),
        ("'a ring'", "artifacts/quickstart", "out/quickstart.mp4 --prompt a ring --chunks 12"),
        ("--world", "artifacts/quickstart-world", "run artifacts/quickstart-world --seed 0 -o out/world.mp4"),
        ("--world w-3", "artifacts/quickstart-world", "--keys w-3"),
        ("--serve", "artifacts/quickstart", "seko_serve artifacts/quickstart"),
        ("--serve --port 1", "artifacts/quickstart", "seko_serve artifacts/quickstart --port 1"),
        ("--world --serve", "artifacts/quickstart-world", "seko_serve artifacts/quickstart-world"),
        ("--world --serve --port 1", "artifacts/quickstart-world", "artifacts/quickstart-world --port 1"),
    ],
)
def test_the_quick_start_builds_and_runs_or_serves_either_model(
    tmp_path: Path, arguments: str, made: str, run: str
) -> None:
    """And every command that it gives is one that the programs understand."""
    notes, _ = ran(tmp_path, f"bash scripts/quickstart.sh {arguments}")
    (build,) = [line.split() for line in notes if line.startswith("-m seko_export")]
    assert build[build.index("-o") + 1] == made
    assert ("artifacts/world-sample" in build) is ("world" in made)
    export_command.commands["build"].make_context("build", build[3:])
    assert run in notes[-1]
    words = notes[-1].split()
    if words[1] == "seko_serve":
        assert str(serve_parser().parse_args(words[2:]).artifact) == made
    else:
        assert parse([*words[2:4], "-o", "x.npy"], dict.fromkeys(SUMMARIES, print)).command is print
