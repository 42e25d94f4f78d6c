"""Rows of the tests beside the quick start: seconds and a ratio; none of a failure."""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from scripts.bench import suite_time

VENV = "seko_make_venv() { true; }\nseko_add_serve() { true; }\nseko_try_extra() { true; }\n"


def git(home: Path, *words: str) -> None:
    known = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *known, *words], cwd=home, check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed repository of three scripts: the tests take some time, and fail where a file says so."""
    scripts = tmp_path / "tree" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "venv.sh").write_text(VENV)
    (scripts / "quickstart.sh").write_text("mkdir -p artifacts\n")
    (scripts / "test.sh").write_text('[ -d artifacts ] && [ -z "$FAIL" ] || exit 3\nsleep 0.3\n')
    git(tmp_path / "tree", "init")
    git(tmp_path / "tree", "add", ".")
    git(tmp_path / "tree", "commit", "-m", "one")
    monkeypatch.setattr(suite_time, "ROOT", tmp_path / "tree")
    return tmp_path / "tree"


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_both_tiers_make_their_rows_from_one_clone(tree: Path, tmp_path: Path) -> None:
    suite_time.run(Namespace(tiers=("fast", "all"), rows=tmp_path / "rows.jsonl"))
    quickstart, *tiers = rows(tmp_path / "rows.jsonl")
    assert quickstart["figure"] == "quickstart_s"
    assert "twelve_chunks_s" in quickstart
    assert [row["figure"] for row in tiers] == ["test_s", "test_per_quickstart"] * 2
    assert [row["bar"] for row in tiers] == [None, 6.5, None, 11.0]
    for seconds, ratio in (tiers[:2], tiers[2:]):
        assert ratio["value"] == pytest.approx(
            float(str(seconds["value"])) / float(str(quickstart["value"])), 1e-3
        )
    assert not (tree / "artifacts").exists()  # the tree itself is as it was


def test_tests_that_fail_have_no_row(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del tree
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(SystemExit, match=r"scripts/test\.sh ended with 3"):
        suite_time.run(Namespace(tiers=("fast",), rows=tmp_path / "rows.jsonl"))
    assert [row["figure"] for row in rows(tmp_path / "rows.jsonl")] == ["quickstart_s"]


def test_what_is_not_committed_is_not_measured(tree: Path, tmp_path: Path) -> None:
    (tree / "scripts" / "test.sh").write_text("true\n")
    with pytest.raises(SystemExit, match="1 files differ"):
        suite_time.run(Namespace(tiers=("fast",), rows=tmp_path / "rows.jsonl"))
    assert rows(tmp_path / "rows.jsonl") == []
