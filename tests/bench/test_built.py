"""Builds that a bench made for a later run of the same commit."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from scripts.bench import built
from scripts.bench.rows import COMMIT


class Compiler:
    """Builds a file; counts how often."""

    def __init__(self, file: Path) -> None:
        self.file, self.builds = file, 0

    def build(self, inputs: str = "one thing", seconds: float = 4.0) -> object:
        """Build the file once."""

        def write() -> dict[str, float]:
            self.builds += 1
            self.file.write_bytes(b"code")
            return {"seconds": seconds}

        return built.build_once(self.file, inputs, write)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """A compiler of which the commit ``abc`` has a file of "one thing", built in four seconds."""
    monkeypatch.setenv(COMMIT, "abc")
    compiler = Compiler(tmp_path / "work" / "engine.pt2")
    assert compiler.build() == {"seconds": 4.0}
    return compiler


def test_a_build_of_the_same_commit_and_the_same_thing_is_used(compiler: Compiler) -> None:
    assert compiler.build(seconds=5.0) == {"seconds": 4.0}
    assert compiler.builds == 1
    assert compiler.build("another thing", seconds=5.0) == {"seconds": 5.0}
    assert built.known(compiler.file, "one thing") is None
    assert built.known(compiler.file, "another thing") == {"seconds": 5.0}
    assert built.known(compiler.file.with_name("other.pt2"), "another thing") is None


@pytest.mark.parametrize("commit", ["abd", "abc+"])
def test_a_build_of_other_code_is_made_anew(
    compiler: Compiler, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMMIT, commit)
    compiler.build()
    assert compiler.builds == 2
    compiler.build()
    assert compiler.builds == 2 + commit.endswith("+")


def test_what_is_gone_or_failed_is_built_again(compiler: Compiler) -> None:
    compiler.file.unlink()
    compiler.build()
    assert compiler.builds == 2
    assert built.build_once(compiler.file, "another thing", lambda: None) is None
    assert built.known(compiler.file, "one thing") is None  # a build that failed may have left half a file
    compiler.build("another thing")
    assert compiler.builds == 3


def test_builds_of_one_file_at_the_same_time_are_one(compiler: Compiler) -> None:
    compiler.file.unlink()
    threads = [threading.Thread(target=compiler.build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiler.builds == 2
