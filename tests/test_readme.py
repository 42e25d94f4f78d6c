"""README says what is true: its figures are the benchmark's rows, its tree is the repository's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.loaded import load_script

ROOT = Path(__file__).parents[1]
UNLISTED = {
    ".gitignore",
    "py.typed",
    "__init__.py",
}  # say nothing of their own; a package's face may still be listed


TABLE = load_script(ROOT / "scripts" / "bench" / "table.py")


@pytest.mark.parametrize("page", TABLE.pages(), ids=lambda page: page.name)
def test_the_figures_are_the_rows_of_the_benchmark(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TABLE.with_tables(text) == text


def test_the_file_tree_names_every_file_and_nothing_else() -> None:
    listed = files_in_tree()
    missing = sorted(path for path in listed if not (ROOT / path).exists())
    assert missing == []
    folders = tuple(path for path in listed if path.endswith("/"))
    unnamed = [
        path
        for path in tracked_files()
        if path not in listed and not path.startswith(folders) and Path(path).name not in UNLISTED
    ]
    assert unnamed == []


def files_in_tree() -> list[str]:
    """Paths of the tree in README; a folder with a line of its own stands for all that is in it."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- tree -->\n(.*?)<!-- /tree -->", page, re.DOTALL)
    assert block is not None
    paths: list[str] = []
    folders: list[str] = []
    for line in block[1].splitlines():
        entry = re.fullmatch(r"( *)(\S+)( +\S.*)?", line)
        if not line.strip():
            continue
        assert entry is not None, line
        depth = len(entry[1]) // 4 - 1
        folders = folders[:depth]
        path = "".join(folders) + entry[2]
        if entry[2].endswith("/") and entry[3] is None:
            folders.append(entry[2])
        else:
            paths.append(path)
    return paths


def tracked_files() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return done.stdout.splitlines()
