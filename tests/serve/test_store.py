"""The store of snapshots: whole files, written once, private; and that nobody else's file is ever removed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from seko_runtime.format.own_folders import MARKER
from seko_serve.live.device import Device
from seko_serve.store.base import ExistsError, Store, StoreError
from seko_serve.store.folder import FolderStore
from seko_serve.store.own_folder import OwnFolder
from seko_serve.store.threads import StoreThreads
from seko_serve.video import jobs as jobs_module
from seko_serve.video.jobs import Video, VideoJobs
from seko_serve.video.opening import Opening

from .bounded import comes

SESSION, OTHER = "0123456789abcdef", "f" * 16
NAME = f"{SESSION}.record0"
LONG_AGO = (0, 0)
OWN = re.compile("own-file")  # names of the files of an `OwnFolder`
OF_SOMEBODY = (  # names of files of a user, some of them much like the store's own
    "thesis.tex",
    ".bashrc",
    ".owner-1",
    "video_2024-01-01_12-30.mp4",
    ".writing-abcdefgh",
    f"{SESSION}.record0.bak",
    f"{SESSION}.record2",
    f"{SESSION}.owner-",
    f"{SESSION.upper()}.record0",
    f"{SESSION}.snapshot-notes",
    f".writing-{SESSION}-",
)


class Payload:
    """Something that a job holds, in place of a whole row."""

    def size(self) -> int:
        return 1


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, also of other processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "snapshots")


def check_files(store: Store) -> None:
    """Check that a store's file is written once, read and removed; of writers at once one wins."""
    assert store.get(NAME) is None
    store.put(NAME, [b"con", memoryview(b"tent")])
    with pytest.raises(ExistsError):
        store.put(NAME, [b"other"])
    assert bytes(store.get(NAME) or b"") == b"content"
    store.delete(NAME)
    store.delete(NAME)
    assert store.get(NAME) is None

    def write(number: int) -> bool:
        try:
            store.put(NAME, [str(number).encode()] * 10_000)
        except ExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        won = [*threads.map(write, range(8))]
    assert won.count(True) == 1
    assert bytes(store.get(NAME) or b"") == str(won.index(True)).encode() * 10_000


def test_a_file_is_written_once_read_and_removed_and_of_writers_at_once_one_wins(store: FolderStore) -> None:
    check_files(store)


def test_files_and_folder_are_private_and_nothing_else_is_left(store: FolderStore, tmp_path: Path) -> None:
    store.put(NAME, [b"x"])
    with pytest.raises(ExistsError):
        store.put(NAME, [b"y"])
    (file,) = (tmp_path / "snapshots").iterdir()
    assert (file.name, file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (
        NAME,
        0o600,
        0o700,
    )


@pytest.mark.parametrize("name", ["", "..", f"../{NAME}", f"{NAME}/", f"{NAME}\0", "x" * 200, *OF_SOMEBODY])
def test_a_name_that_is_not_the_stores_own_is_not_touched(store: FolderStore, name: str) -> None:
    calls: list[Callable[[], object]] = [
        partial(store.put, name, []),
        partial(store.get, name),
        partial(store.delete, name),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="is no name of a file of a saved session"):
            call()


def test_a_folder_that_others_may_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StoreError, match="mode 0700"):
        FolderStore(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        FolderStore(tmp_path / "file")


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, partial(os.symlink, "/etc/hostname")],
    ids=["pipe", "folder", "link"],
)
def test_what_is_no_regular_file_is_not_read_and_blocks_nobody(
    make: Callable[[Path], object], store: FolderStore, tmp_path: Path
) -> None:
    make(tmp_path / "snapshots" / NAME)
    raised: list[StoreError] = []

    def read() -> None:
        try:
            store.get(NAME)
        except StoreError as error:
            raised.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(20)
    assert len(raised) == 1


def test_a_file_that_a_killed_process_was_writing_is_known_and_removed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from seko_serve.store.folder import FolderStore;"
        "pieces = (os.kill(os.getpid(), signal.SIGKILL) for _ in range(1));"
        "FolderStore(Path(sys.argv[1])).put(sys.argv[2], pieces)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "store"), NAME], check=False)
    (left,) = (tmp_path / "store").iterdir()
    os.utime(left, LONG_AGO)
    FolderStore(tmp_path / "store").remove_older(60.0, {SESSION})
    assert list((tmp_path / "store").iterdir()) == []


def test_only_old_files_of_the_store_are_removed_and_nothing_keeps_them(
    store: FolderStore, tmp_path: Path
) -> None:
    folder = tmp_path / "snapshots"
    own = {
        f"{session}.{kind}" for session in (SESSION, OTHER) for kind in ("record0", "record1-12", "owner-3")
    }
    own |= {f"{session}.snapshot-01234567" for session in (SESSION, OTHER)}
    for name in sorted(own):
        store.put(name, [b"old"])
    unfinished = f".writing-{OTHER}-abcdefg0"
    for name in (unfinished, *OF_SOMEBODY):
        (folder / name).write_bytes(b"x")
    for name in ("lost+found", f"{'a' * 16}.record0"):
        (folder / name).mkdir()
    os.mkfifo(folder / f"{'b' * 16}.record0")
    for path in folder.iterdir():
        os.utime(path, LONG_AGO)
    store.put(f"{OTHER}.record1", [b"young"])
    before = {path.name for path in folder.iterdir()}
    store.remove_older(60.0, {SESSION})
    removed = {name for name in own if name.startswith(OTHER)} | {unfinished}
    assert {path.name for path in folder.iterdir()} == before - removed
    kept = {path.name for path in folder.iterdir() if path.stat().st_mtime > 1e6}
    assert kept == {name for name in own if name.startswith(SESSION)} | {f"{OTHER}.record1"}


@pytest.mark.parametrize("name", OF_SOMEBODY)
def test_a_folder_that_holds_somebodys_files_is_refused_and_keeps_them(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    (folder / name).write_bytes(b"x")
    for option, opened in (
        ("", lambda: FolderStore(folder)),
        ("--folder ", lambda: OwnFolder(folder, "own-", "--folder", re.compile("own-file")).claim()),
    ):
        with pytest.raises(
            StoreError, match=rf"^{option}\S*/home holds '{re.escape(name)}'.* such as \S*/home/seko-serve"
        ):
            opened()
    assert [path.name for path in folder.iterdir()] == [name]
    FolderStore(folder / "seko-serve")  # what the sentence says


def test_a_folder_with_what_its_file_system_needs_is_taken(tmp_path: Path) -> None:
    for name in ("lost+found", ".nfs000000000a1b2c3d00000001"):
        (tmp_path / "store" / name).mkdir(parents=True)
    (tmp_path / "store").chmod(0o700)
    FolderStore(tmp_path / "store").put(NAME, [b"x"])
    FolderStore(tmp_path / "store")  # also with files of its own


async def test_a_video_folder_loses_only_videos_of_an_earlier_server(tmp_path: Path) -> None:
    async def begin_and_end() -> None:
        jobs = VideoJobs(Device(nullcontext), 1, tmp_path)  # type: ignore[arg-type]
        await jobs.start()
        await jobs.stop()

    of_a_user = "video_2024-01-01_12-30.mp4"
    left = {f"{dot}seko-serve-video_{'a-_Z' * 4}.mp4{end}" for dot, end in (("", ""), (".", ".writing"))}
    for name in left:
        (tmp_path / name).write_bytes(b"x")
    await begin_and_end()
    assert list(tmp_path.iterdir()) == []
    for name in (*left, of_a_user):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(StoreError, match=f"--video-folder .* holds '{of_a_user}'"):
        await begin_and_end()
    assert {path.name for path in tmp_path.iterdir()} == {*left, of_a_user}


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "a")
    (tmp_path / "a").chmod(0o500)
    with pytest.raises(StoreError, match="cannot be written"):
        store.put(NAME, [])


def test_a_temporary_folder_is_made_when_it_is_needed_and_removed_with_its_files(own: Path) -> None:
    folder = OwnFolder(None, "own-", "--folder", OWN)
    assert folder.claim() is None
    assert list(own.iterdir()) == []
    (folder.path() / "own-file").write_bytes(b"a")
    assert sorted(path.name for path in folder.path().iterdir()) == ["own-file", MARKER]
    shutil.rmtree(folder.path())
    assert [path.name for path in folder.path().iterdir()] == [MARKER]  # it is there again
    folder.close()
    assert list(own.iterdir()) == []
    (folder.path() / "own-file").write_bytes(b"a")
    (folder.path() / "thesis.tex").write_bytes(b"a")
    folder.close()
    assert [file.name for file in own.glob("own-*/*") if file.name != MARKER] == ["thesis.tex"]


def test_what_killed_processes_have_left_is_removed_and_nothing_else(own: Path) -> None:
    code = (
        "import os, re, signal; from seko_serve.store.own_folder import OwnFolder;"
        "path = OwnFolder(None, 'own-', '', re.compile('')).path(); (path / 'own-file').write_bytes(b'a');"
        "print(path, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    left, used = Path(killed.stdout.strip()), OwnFolder(None, "own-", "--folder", OWN)
    others, file, young, named = own / "other-folder", own / "own-file", own / "own-young", own / "own-2026"
    for folder in (others, named):  # the last of a user who chose such a name
        folder.mkdir()
    (named / "thesis.tex").touch()
    file.touch()
    for path in (left, used.path(), others, file, named):
        os.utime(path, LONG_AGO)
    young.mkdir()
    assert left.is_dir()
    OwnFolder(None, "own-", "--folder", OWN).remove_left()
    assert set(own.iterdir()) == {used.path(), others, file, young, named}


def test_a_chosen_folder_has_one_process_and_loses_the_files_of_the_last(tmp_path: Path) -> None:
    first, second = (OwnFolder(tmp_path / "a" / "b", "own-", "--folder", OWN) for _ in range(2))
    assert first.claim() == tmp_path / "a" / "b"
    (first.path() / "own-file").touch()
    with pytest.raises(StoreError, match=r"--folder .* is used by another process"):
        second.claim()
    first.close()
    assert (tmp_path / "a" / "b" / "own-file").exists()
    assert second.claim() == tmp_path / "a" / "b"
    assert list(second.path().iterdir()) == []


@pytest.mark.limit_s(10)
async def test_an_idle_thread_keeps_nothing_of_its_last_work() -> None:
    threads = StoreThreads(1)
    payload = Payload()
    left = weakref.ref(payload)
    assert await threads.run(payload.size) == 1
    del payload
    await comes(lambda: left() is None)
    assert await threads.stop(5.0)


@pytest.mark.limit_s(10)
async def test_a_video_that_has_expired_is_not_kept_until_the_next_one_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "REAP_S", 0.02)
    jobs = VideoJobs(Device(nullcontext), 1, tmp_path)  # type: ignore[arg-type]
    await jobs.start()
    video = Video("video_a", "", Opening(None, 0, 1.0), 1, 0.0, "completed", ended=0.0)
    jobs._videos[video.id] = video
    left = weakref.ref(video)
    del video
    await comes(lambda: not jobs.count)
    await comes(lambda: left() is None)
    await jobs.stop()
