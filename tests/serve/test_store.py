"""The store of snapshots: whole files, written once, private."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seko_serve.store.base import ExistsError, StoreError
from seko_serve.store.folder import FolderStore


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "snapshots")


def test_a_file_is_written_once_read_and_removed(store: FolderStore) -> None:
    assert store.get("a") is None
    store.put("a", [b"content"])
    with pytest.raises(ExistsError):
        store.put("a", [b"other"])
    assert store.get("a") == b"content"
    store.delete("a")
    store.delete("a")
    assert store.get("a") is None
    store.put("a", [b"again"])


def test_files_and_folder_are_private_and_nothing_else_is_left(store: FolderStore, tmp_path: Path) -> None:
    store.put("a", [b"x"])
    with pytest.raises(ExistsError):
        store.put("a", [b"y"])
    (file,) = (tmp_path / "snapshots").iterdir()
    assert (file.name, file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == ("a", 0o600, 0o700)


def test_of_writers_at_once_one_wins(store: FolderStore) -> None:
    def write(number: int) -> bool:
        try:
            store.put("a", [str(number).encode()] * 10_000)
        except ExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        won = [*threads.map(write, range(8))]
    assert won.count(True) == 1
    assert store.get("a") == str(won.index(True)).encode() * 10_000


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/passwd", "a\0b", ".hidden", "x" * 200, "a..b"])
def test_a_name_cannot_lead_elsewhere(store: FolderStore, name: str) -> None:
    for call in (lambda: store.put(name, []), lambda: store.get(name), lambda: store.delete(name)):
        with pytest.raises(ValueError, match="letters, digits, dots and hyphens"):
            call()


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="mode 0700"):
        FolderStore(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        FolderStore(tmp_path / "file")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "a")
    (tmp_path / "a").chmod(0o500)
    with pytest.raises(StoreError, match="cannot be written"):
        store.put("x", [])
