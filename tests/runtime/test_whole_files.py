"""Folders and files that are whole under their names, or not there; the words for a disk that refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from seko_export.artifact.writer import write_weights
from seko_export.host.workshop import workshop
from seko_runtime.errors import DiskError, UsageError
from seko_runtime.format import whole_files
from seko_runtime.format.disk_faults import disk_faults
from seko_runtime.format.own_folders import MARKER
from seko_runtime.format.whole_files import check_folder_place, whole_file, whole_folder
from tests.runtime.whole_files_cases import (
    StoppedError,
    build,
    fill,
    names,
)

SMALL_DISK = 2**20  # bytes
# Names beside an output that look unfinished and are the user's, with words that any program might use, ours too.
NEIGHBOURS = [
    *(".goal.backup-20261127", ".goal.old-1", ".goal.copy-2", ".goal.draft-7", ".goal.v-3", ".goal.tar-0"),
    *(".goal.building-5", ".goal.writing-0123456789", ".goal.replaced-0123456789", ".goal.seko-0123456789"),
    *(".goal.seko-1", ".seko-0123456789", "seko-test-workshop-0123456789"),
]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "none", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_the_folder_gets_its_name_when_it_is_whole(tmp_path):
    goal = tmp_path / "new" / "parents" / "artifact"
    with whole_folder(goal, replace=False) as folder:
        fill(folder)
        assert not goal.exists()
        assert names(goal.parent) == [folder.parent.name]
    assert names(goal) == ["engines", "manifest.json"]
    assert names(goal.parent) == ["artifact"]


@pytest.mark.parametrize("ending", [StoppedError, KeyboardInterrupt, SystemExit])
def test_an_ending_half_way_leaves_nothing(tmp_path, ending):
    """Not even the parents that were made for it."""
    with pytest.raises(ending):
        build(tmp_path / "a" / "b" / "artifact", ending=ending)
    assert names(tmp_path) == []


def test_parents_that_were_there_stay(tmp_path):
    (tmp_path / "kept").mkdir()
    with pytest.raises(StoppedError), whole_folder(tmp_path / "kept/artifact", replace=False):
        raise StoppedError
    assert names(tmp_path) == ["kept"]


def test_a_file_gets_its_parents_as_a_folder_does(tmp_path):
    goal = tmp_path / "a" / "b" / "file"
    with pytest.raises(StoppedError), whole_file(goal, replace=False):
        raise StoppedError
    assert names(tmp_path) == []
    with whole_file(goal, replace=False) as file:
        file.write(b"x")
    assert goal.read_bytes() == b"x"


def test_replacing_is_whole_or_not_at_all(tmp_path):
    goal = tmp_path / "artifact"
    build(goal, "first")
    with pytest.raises(StoppedError):
        build(goal, "second", replace=True, ending=StoppedError)
    assert (goal / "manifest.json").read_text() == "first"
    build(goal, "third", replace=True)
    assert (goal / "manifest.json").read_text() == "third"
    assert names(tmp_path) == ["artifact"]


@pytest.mark.parametrize("replace", [False, True])
def test_what_is_no_artifact_is_never_replaced(tmp_path, replace):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "artifact").mkdir()
    fill(tmp_path / "artifact")
    (tmp_path / "link").symlink_to("artifact")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("folder", "file", "link", "dangling"):
        with pytest.raises(UsageError, match="is no artifact; choose another place"):
            check_folder_place(tmp_path / name, replace=replace)
    assert (tmp_path / "folder/thesis.txt").read_text() == "years of work"
    (tmp_path / "folder/manifest.json").write_text('{"manifest_version": 3}')  # of a browser's extension
    with pytest.raises(UsageError, match="is no artifact"):
        build(tmp_path / "folder", replace=True)
    (tmp_path / "folder/engines").write_text("a file")
    with pytest.raises(UsageError, match="is no artifact"):
        build(tmp_path / "folder", replace=True)


@pytest.mark.parametrize("parent", ["/proc/nowhere", "/proc", "FILE", "FILE/deeper", "/dev/null"])
def test_a_place_that_takes_no_folder(tmp_path, parent):
    """Root may write almost everywhere; not below a file, and not in /proc."""
    (tmp_path / "file").write_text("x")
    goal = Path(parent.replace("FILE", str(tmp_path / "file")), "artifact")
    with (
        pytest.raises(DiskError, match=r"cannot be written \(.+\): choose another place"),
        whole_folder(goal, replace=False),
    ):
        raise StoppedError
    assert names(tmp_path) == ["file"]


def test_a_full_disk(small_disk):
    """The engine's writer and the weights' each have their own error; both become one sentence."""
    goal = small_disk / "artifact"
    too_much = torch.zeros(SMALL_DISK, dtype=torch.uint8)
    with (
        pytest.raises(DiskError, match="no space left for"),
        whole_folder(goal, replace=False) as f,
    ):
        write_weights(f, [("weight", too_much)])
    assert names(small_disk) == []
    with (
        pytest.raises(DiskError, match="no space left for"),
        whole_folder(goal, replace=False) as f,
    ):
        (f / "engine").write_bytes(bytes(2 * SMALL_DISK))
    assert names(small_disk) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no space left"),
        (errno.EDQUOT, "no space left"),
        (errno.EROFS, "cannot be written"),
        (errno.EACCES, "cannot be written"),
    ],
)
def test_words_for_what_the_system_says(number, words):
    with pytest.raises(DiskError, match=words) as caught, disk_faults(Path("goal")):
        raise OSError(number, os.strerror(number))
    assert "goal" in str(caught.value)
    assert " -o" not in str(caught.value)  # not every output has this option


def test_a_fault_that_is_none_of_the_disks_stays_what_it_is():
    with pytest.raises(FileNotFoundError), disk_faults(Path("goal")):
        raise FileNotFoundError(errno.ENOENT, "gone")


def test_readers_get_what_the_umask_gives(tmp_path):
    """safetensors writes for the owner alone; an artifact is copied and served by others."""
    for umask, folders, files in ((0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)):
        goal = tmp_path / f"{umask:o}"
        before = os.umask(umask)
        try:
            with whole_folder(goal, replace=False) as folder:
                fill(folder)
                write_weights(folder, [("weight", torch.zeros(1))])
        finally:
            os.umask(before)
        assert stat.S_IMODE(goal.stat().st_mode) == folders
        for path in goal.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (folders if path.is_dir() else files), path


def test_a_full_disk_is_told_in_numbers(small_disk):
    goal = small_disk / "artifact"

    def overfill() -> None:
        with whole_folder(goal, replace=False) as folder:
            (folder / "engine").write_bytes(bytes(SMALL_DISK // 2))
            (folder / "weights").write_bytes(bytes(SMALL_DISK))

    with pytest.raises(DiskError, match=r"after (\d+) bytes \((\d+) bytes free\)") as caught:
        overfill()
    written, free = map(int, re.findall(r"(\d+) bytes", str(caught.value)))
    assert SMALL_DISK // 2 <= written <= SMALL_DISK
    assert free < SMALL_DISK // 2
    assert caught.value.exit_code == 5


def test_a_limit_on_the_size_of_files_is_told_with_the_limit(tmp_path):
    script = (
        "import resource, sys\nfrom pathlib import Path\nfrom seko_runtime.format.whole_files import whole_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "with whole_file(Path(sys.argv[1]), replace=False) as file:\n"
        "    for _ in range(3): file.write(bytes(4096))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "goal"], capture_output=True, text=True, check=False
    )
    assert "DiskError" in done.stderr
    assert "after 5000 bytes: this process may write files of at most 5000 bytes" in done.stderr
    assert names(tmp_path) == []


def test_a_file_is_whole_or_not_there(tmp_path):
    goal = tmp_path / "a.tar"

    def stop() -> None:
        with whole_file(goal, replace=False) as file:
            file.write(b"half")
            raise StoppedError

    with pytest.raises(StoppedError):
        stop()
    assert names(tmp_path) == []
    with whole_file(goal, replace=False) as file:
        file.write(b"whole")
        assert not goal.exists()
    with pytest.raises(UsageError, match="exists already"), whole_file(goal, replace=False):
        pass
    with whole_file(goal, replace=True) as file:
        file.write(b"another")
    assert goal.read_bytes() == b"another"
    assert names(tmp_path) == ["a.tar"]


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_no_regular_file_is_never_replaced_by_one(tmp_path, kind):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    with (
        pytest.raises(UsageError, match="is no regular file"),
        whole_file(tmp_path / kind, replace=True),
    ):
        pass


def test_a_file_may_be_its_owners_alone(tmp_path):
    goal = tmp_path / "snapshot"
    goal.write_text("an older one, for all to read")
    goal.chmod(0o644)
    with whole_file(goal, replace=True, mode=0o600) as file:
        (hidden,) = (path for path in tmp_path.iterdir() if path != goal)
        assert stat.S_IMODE(hidden.stat().st_mode) == 0o700
        assert stat.S_IMODE((hidden / "new").stat().st_mode) == 0o600
        file.write(b"secret")
    assert stat.S_IMODE(goal.stat().st_mode) == 0o600
    assert goal.read_bytes() == b"secret"


def test_hidden_names_cannot_be_foretold(tmp_path):
    seen = set()
    for _ in range(5):
        with whole_file(tmp_path / "goal", replace=True):
            seen |= {path.name for path in tmp_path.iterdir()} - {"goal"}
    assert len(seen) == 5
    assert not any(name.endswith(f"-{os.getpid()}") for name in seen)


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_old_one_goes(tmp_path, monkeypatch):
    """What a crash of the machine may show: the order of fsync, exchange, fsync, removal."""
    goal, calls = tmp_path / "artifact", []
    build(goal, "first")

    def recorded(word: str, work: Callable[..., object]) -> Callable[..., object]:
        def run(what: object, *more: object, **options: object) -> object:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            calls.append(
                (word, re.sub(r"\.artifact\.seko-[0-9a-f]+/new", "NEW", path.removeprefix(f"{tmp_path}/")))
            )
            return work(what, *more, **options)

        return run

    monkeypatch.setattr(os, "fsync", recorded("fsync", os.fsync))
    monkeypatch.setattr(shutil, "rmtree", recorded("remove", shutil.rmtree))
    monkeypatch.setattr(whole_files, "exchange", recorded("exchange", whole_files.exchange))
    build(goal, "second", replace=True)
    assert sorted(calls[:4]) == [
        ("fsync", "NEW"),
        ("fsync", "NEW/engines"),
        ("fsync", "NEW/engines/block.pt2"),
        ("fsync", "NEW/manifest.json"),
    ]
    assert calls[4:] == [("exchange", "NEW"), ("fsync", str(tmp_path)), ("remove", "NEW")]


def test_the_lock_is_held_while_the_folder_is_filled(tmp_path):
    with whole_folder(tmp_path / "artifact", replace=False) as folder:
        fill(folder)
        descriptor = os.open(folder.with_name(MARKER), os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)


@pytest.mark.parametrize("kind", ["file", "empty file", "folder", "empty folder", "artifact", "link"])
@pytest.mark.parametrize("writer", ["file", "folder", "workshop"])
def test_what_seko_did_not_write_stays_whatever_its_name(tmp_path, monkeypatch, capsys, writer, kind):
    """Only a folder with the marker of a process that is gone is ever removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in NEIGHBOURS:
        path = tmp_path / name
        if kind == "link":
            path.symlink_to(tmp_path)
        elif kind.endswith("file"):
            path.write_text("" if kind == "empty file" else "years of work")
        else:
            path.mkdir()
        if kind == "folder":
            (path / "thesis.txt").write_text("years of work")
        elif kind == "artifact":
            fill(path)
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    if writer == "file":
        with whole_file(tmp_path / "goal", replace=True) as file:
            file.write(b"new")
    elif writer == "folder":
        build(tmp_path / "goal")
    else:
        with workshop("seko-test-"):
            pass
    assert {path for path in before if not os.path.lexists(path)} == set()
    assert all(os.path.samestat(path.lstat(), status) for path, status in before.items())
    assert capsys.readouterr().err == ""
