"""Whatever writes whole files and folders, killed or failing at any change of the file system; and that it is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.crash_test import Scenario, crash
from scripts.failing_os import run_failing
from seko_runtime.format.whole_files import whole_file
from tests.runtime import toy_whole
from tests.runtime.eager_backend import write_whole

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FEWEST_CALLS = {"build, replacing": 50, "pack": 30, "unpack": 50, "snapshot": 5, "sign": 5, "compile": 10}


def test_the_old_one_or_the_new_one_is_there_and_whole_wherever_a_process_is_killed(tmp_path):
    """Killed at every call; a full disk or a fault of it at every ninth. A small process of its own forks fast."""
    artifact = write_whole(tmp_path / "whole", toy_whole.whole_manifest(golden=toy_whole.GOLDEN))
    command = [sys.executable, "-m", "scripts.crash_test", "--step", "9", "--artifact", artifact]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["told"] == []
    assert (report["violations"], done.returncode) == (0, 0)
    assert all(report["calls"][name] >= fewest for name, fewest in FEWEST_CALLS.items()), report["calls"]
    assert report["points"] > sum(report["calls"].values())


def write_old(place: Path) -> None:
    (place / "goal").write_text("the old one")


def write_in_place(place: Path) -> None:
    with (place / "goal").open("wb") as file:
        file.write(b"the new one")


def write_beside(place: Path) -> None:
    """Whole, but what is left of a killed process nobody takes away."""
    beside = place / f".goal.writing-{os.urandom(5).hex()}"
    beside.write_bytes(b"the new one")
    beside.replace(place / "goal")


def write_by_two_names(place: Path) -> None:
    """No name is there for a moment."""
    with whole_file(place / "new", replace=True) as file:
        file.write(b"the new one")
    (place / "goal").unlink(missing_ok=True)
    (place / "new").rename(place / "goal")


def stumble(place: Path) -> None:
    """What follows a fault is another one, of the program's own."""
    try:
        (place / "goal").write_text("the new one")
    except OSError:
        raise RuntimeError("a path nobody took before") from None


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (write_in_place, "and the goal is b'the n'"),
        (write_beside, "the next use leaves"),
        (write_beside, "write failed, and"),
        (write_by_two_names, "and the goal is None"),
        (stumble, "broken: RuntimeError: a path nobody took before"),
    ],
)
def test_what_is_not_whole_is_seen(tmp_path, work, words):
    report = crash(Scenario(write_old, work, work), tmp_path / "place")
    assert any(words in wrong for wrong in report.violations), report.violations


def test_what_is_whole_is_not_blamed(tmp_path):
    def write_whole(place: Path) -> None:
        with whole_file(place / "goal", replace=True) as file:
            file.write(b"the new one")

    report = crash(Scenario(write_old, write_whole, write_whole), tmp_path / "place")
    assert report.violations == []
    assert report.runs == 3 * (report.calls + 1)


@pytest.mark.parametrize(
    ("at", "kind", "how", "struck", "content"),
    [
        (1, "kill", "killed", "", None),
        (1, "ENOSPC", "raised", "open", None),
        (2, "kill", "killed", "", b"hal"),
        (2, "EIO", "raised", "write", b"hal"),
        (3, "kill", "killed", "", b"halves"),
        (3, "EIO", "raised", "close", b"halves"),
        (4, "EIO", "done", "", b"halves"),
    ],
)
def test_each_call_is_a_place_to_fail(tmp_path, at, kind, how, struck, content):
    """A write has then written half, and a file whose closing fails is closed."""

    def write() -> None:
        with (tmp_path / "file").open("wb") as file:
            file.write(b"halves")

    ending = run_failing(write, at, kind)
    assert (ending.how, ending.struck) == (how, struck)
    path = tmp_path / "file"
    assert (path.read_bytes() if path.exists() else None) == content
