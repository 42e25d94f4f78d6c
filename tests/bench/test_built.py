"""Builds that a bench made for a later run of the same commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import built
from scripts.bench.rows import COMMIT


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the commit ``abc`` built of "one thing" in four seconds."""
    monkeypatch.setenv(COMMIT, "abc")
    file = tmp_path / "engine.pt2"
    file.write_bytes(b"code")
    built.mark(file, "one thing", seconds=4.0)
    return file


def test_a_build_of_the_same_commit_and_the_same_thing_is_known(engine: Path) -> None:
    assert built.known(engine, "one thing") == {"seconds": 4.0}
    assert built.known(engine, "another thing") is None
    assert built.known(engine.with_name("other.pt2"), "one thing") is None


@pytest.mark.parametrize("commit", ["abd", "abc+"])
def test_a_build_of_other_code_is_not_known(
    engine: Path, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMIT, commit)
    assert built.known(engine, "one thing") is None
    built.mark(engine, "one thing")
    assert (built.known(engine, "one thing") is None) == commit.endswith("+")


def test_what_is_gone_or_forgotten_is_not_known(engine: Path) -> None:
    built.forget(engine)
    assert built.known(engine, "one thing") is None
    built.mark(engine, "one thing")
    engine.unlink()
    assert built.known(engine, "one thing") is None
