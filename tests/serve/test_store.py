"""The store of snapshots: whole files, written once, private."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from seko_serve.store.base import ExistsError, StoreError
from seko_serve.store.folder import FolderStore
from seko_serve.store.own_folder import OwnFolder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, also of other processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


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


def test_a_temporary_folder_is_made_when_it_is_needed_and_removed_with_its_files(own: Path) -> None:
    folder = OwnFolder(None, "own-", "--folder")
    assert folder.claim() is None
    assert list(own.iterdir()) == []
    (folder.path() / "file").write_bytes(b"a")
    assert [path.name for path in folder.path().iterdir()] == ["file"]
    shutil.rmtree(folder.path())
    assert list(folder.path().iterdir()) == []  # it is there again
    folder.close()
    assert list(own.iterdir()) == []


def test_what_killed_processes_have_left_is_removed_and_nothing_else(own: Path) -> None:
    code = (
        "import os, signal; from seko_serve.store.own_folder import OwnFolder;"
        "path = OwnFolder(None, 'own-', '').path(); (path / 'a').write_bytes(b'a'); print(path, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    left, used = Path(killed.stdout.strip()), OwnFolder(None, "own-", "--folder")
    others, file, young = own / "other-folder", own / "own-file", own / "own-young"
    others.mkdir()
    file.touch()
    for path in (left, used.path(), others, file):
        os.utime(path, (0, 0))
    young.mkdir()
    assert left.is_dir()
    OwnFolder(None, "own-", "--folder").remove_left()
    assert set(own.iterdir()) == {used.path(), others, file, young}


def test_a_chosen_folder_has_one_process_and_keeps_its_files(tmp_path: Path) -> None:
    first, second = (OwnFolder(tmp_path / "a" / "b", "own-", "--folder") for _ in range(2))
    assert first.claim() == tmp_path / "a" / "b"
    (first.path() / "file").touch()
    with pytest.raises(StoreError, match=r"--folder .* is used by another process"):
        second.claim()
    first.close()
    assert second.claim() == tmp_path / "a" / "b"
    assert (second.path() / "file").exists()
