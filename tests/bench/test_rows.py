"""Rows of docs/benchmarks say what was measured: figure, versions, and which code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts.bench import rows


def git(home: Path, *words: str) -> None:
    known = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *known, *words], cwd=home, check=True, capture_output=True)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script's file in a repository of its own, not yet committed."""
    monkeypatch.delenv(rows.COMMIT, raising=False)
    git(tmp_path, "init")
    file = tmp_path / "rows.py"
    file.touch()
    monkeypatch.setattr(rows, "__file__", str(file))
    return file


def test_a_row_names_the_commit_that_it_is_of(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows.measured_commit() is None  # there is none yet
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "tag", "-a", "v1", "-m", "a tag is no commit")
    (name,) = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.split()
    assert rows.measured_commit() == name[:12]
    measured = tmp_path / "docs" / "benchmarks" / "cpu.jsonl"
    measured.parent.mkdir(parents=True)
    measured.touch()
    git(tmp_path, "add", ".")
    assert rows.measured_commit() == name[:12]  # rows of the run itself
    script.write_text("changed")
    assert rows.measured_commit() == name[:12] + "+"
    monkeypatch.setenv(rows.COMMIT, "told")
    goal = tmp_path / "docs" / "rows.jsonl"
    rows.append_row(goal, "a", "b", 1 / 3, "ms", 0.5, why="so")
    row = json.loads(goal.read_text())
    assert (row["commit"], row["value"], row["bar"], row["why"]) == ("told", 0.333333, 0.5, "so")
    assert row["versions"]["torch"]


def test_without_git_nobody_knows(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del script
    monkeypatch.setenv("PATH", "")
    assert rows.measured_commit() is None
