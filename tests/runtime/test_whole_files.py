"""Folders and files that are whole under their names, or not there; the words for a disk that refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from seko_export.artifact.writer import write_weights
from seko_runtime.errors import DiskError, UsageError
from seko_runtime.format import leftovers, renames, whole_files
from seko_runtime.format.leftovers import remove_leftovers
from seko_runtime.format.whole_files import check_goal, disk_faults, whole_file, whole_folder

SMALL_DISK = 2**20  # bytes


class StoppedError(Exception):
    """Whatever ends a build half-way."""


def fill(folder: Path, content: str = "{}") -> None:
    """Write the least that is an artifact."""
    (folder / "engines").mkdir()
    (folder / "engines/block.pt2").write_text("code")
    (folder / "manifest.json").write_text(content)


def build(
    goal: Path,
    content: str = "{}",
    *,
    replace: bool = False,
    ending: type[BaseException] | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Fill and name an artifact; raise ``ending`` half-way, or let something happen ``meanwhile``."""
    with whole_folder(goal, "building", replace=replace) as folder:
        fill(folder, content)
        meanwhile()
        if ending is not None:
            raise ending


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    with whole_folder(goal, "building", replace=False) as folder:
        fill(folder)
        assert not goal.exists()
        assert folder.parent == goal.parent
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
    with pytest.raises(StoppedError), whole_folder(tmp_path / "kept/artifact", "building", replace=False):
        raise StoppedError
    assert names(tmp_path) == ["kept"]


def test_replacing_is_whole_or_not_at_all(tmp_path):
    goal = tmp_path / "artifact"
    build(goal, "first")
    with pytest.raises(StoppedError):
        build(goal, "second", replace=True, ending=StoppedError)
    assert (goal / "manifest.json").read_text() == "first"
    build(goal, "third", replace=True)
    assert (goal / "manifest.json").read_text() == "third"
    assert names(tmp_path) == ["artifact"]


def no_exchange(monkeypatch: pytest.MonkeyPatch, number: int = errno.EINVAL) -> None:
    """A file system or kernel that does not know `renameat2`."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(renames, "renameat2", refuse)


def killed(work: Callable[[], object]) -> int:
    """Run something in a child process; return its signal, or 0."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_here(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_old_artifact_comes_back_if_the_new_one_cannot_take_its_name(tmp_path, monkeypatch):
    goal = tmp_path / "artifact"
    build(goal, "first")
    no_exchange(monkeypatch)
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if ".building-" in source.name:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(DiskError, match="Input/output"):
        build(goal, "second", replace=True)
    assert (goal / "manifest.json").read_text() == "first"
    assert names(tmp_path) == ["artifact"]


@pytest.mark.parametrize("number", [0, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_process_killed_between_two_renames_leaves_an_artifact(tmp_path, monkeypatch, capsys, number):
    """In one step where that is known; else the next one puts the old artifact back, before it asks for the goal."""
    goal = tmp_path / "artifact"
    build(goal, "first")
    with monkeypatch.context() as patched:
        if number:
            no_exchange(patched, number)
        rename = os.rename
        patched.setattr(os, "rename", lambda *names: (rename(*names), kill_here()))
        assert killed(lambda: build(goal, "second", replace=True)) == (-signal.SIGKILL if number else 0)
    with pytest.raises(UsageError, match="exists already"):
        build(goal, "third")
    assert (goal / "manifest.json").read_text() == ("first" if number else "second")
    assert ("put artifact back" in capsys.readouterr().err) == bool(number)
    build(goal, "fourth", replace=True)
    assert (goal / "manifest.json").read_text() == "fourth"
    assert names(tmp_path) == ["artifact"]


@pytest.mark.parametrize("exchanged", [True, False])
def test_a_process_killed_while_it_removes_the_old_artifact(tmp_path, monkeypatch, exchanged):
    goal = tmp_path / "artifact"
    build(goal, "first")
    with monkeypatch.context() as patched:
        if not exchanged:
            no_exchange(patched)
        patched.setattr(shutil, "rmtree", kill_here)
        assert killed(lambda: build(goal, "second", replace=True)) == -signal.SIGKILL
    assert (goal / "manifest.json").read_text() == "second"
    assert len(names(tmp_path)) == 2
    build(goal, "third", replace=True)
    assert (goal / "manifest.json").read_text() == "third"
    assert names(tmp_path) == ["artifact"]


def test_a_leftover_of_the_same_process_number_is_in_nobodys_way(tmp_path):
    """As in a container, where every process is number 1."""
    goal = tmp_path / "artifact"
    build(goal, "first")
    for doing in ("replaced", "building"):
        (tmp_path / f".artifact.{doing}-{os.getpid()}").mkdir()
        fill(tmp_path / f".artifact.{doing}-{os.getpid()}")
    build(goal, "second", replace=True)
    assert (goal / "manifest.json").read_text() == "second"
    assert names(tmp_path) == ["artifact"]


@pytest.mark.parametrize("exchanged", [True, False])
def test_what_took_the_name_of_an_artifact_at_the_last_moment_is_not_replaced(
    tmp_path, monkeypatch, exchanged
):
    """Looked at, then swapped by its owner for a folder of his: he gets that back."""
    goal = tmp_path / "artifact"
    build(goal, "first")
    exchange = whole_files.exchange

    def swap_first(folder: Path, name: Path) -> bool:
        if (name / "manifest.json").exists():
            (name / "manifest.json").rename(name / "thesis.txt")
        return exchange(folder, name)

    monkeypatch.setattr(whole_files, "exchange", swap_first)
    if not exchanged:
        no_exchange(monkeypatch)
    with pytest.raises(UsageError, match="is no artifact"):
        build(goal, "second", replace=True)
    assert names(goal) == ["engines", "thesis.txt"]
    assert names(tmp_path) == ["artifact"]


def test_an_artifact_that_stepped_aside_for_one_and_was_replaced_by_another_is_removed(tmp_path, monkeypatch):
    """Where names cannot be exchanged, another process takes the name between two renames."""
    goal = tmp_path / "artifact"
    build(goal, "first")
    no_exchange(monkeypatch)
    rename, raced = os.rename, []

    def race(source: Path, target: Path) -> None:
        if ".building-" in source.name and not raced:
            raced.append(source)
            build(goal, "theirs")
        rename(source, target)

    monkeypatch.setattr(os, "rename", race)
    monkeypatch.setattr(whole_files, "_put_back", lambda _: None)  # theirs looked before the name was free
    build(goal, "mine", replace=True)
    assert raced
    assert (goal / "manifest.json").read_text() == "mine"
    assert names(tmp_path) == ["artifact"]


@pytest.mark.parametrize("exchanged", [True, False])
def test_a_name_taken_at_the_last_moment_is_not_overwritten(tmp_path, monkeypatch, exchanged):
    """After the last look at it."""
    if not exchanged:
        no_exchange(monkeypatch)
    goal, rename_new = tmp_path / "artifact", whole_files.rename_new

    def take_first(source: Path, name: Path) -> None:
        name.mkdir()
        fill(name, "theirs")
        rename_new(source, name)

    monkeypatch.setattr(whole_files, "rename_new", take_first)
    with pytest.raises(UsageError, match="exists already"):
        build(goal, "mine")
    assert (goal / "manifest.json").read_text() == "theirs"
    assert names(tmp_path) == ["artifact"]


def test_a_name_taken_while_building_is_not_overwritten(tmp_path):
    goal = tmp_path / "artifact"
    with pytest.raises(UsageError, match="exists already"):
        build(goal, "mine", meanwhile=lambda: (goal.mkdir(), fill(goal, "theirs")))
    assert (goal / "manifest.json").read_text() == "theirs"
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
        with pytest.raises(UsageError, match="is no artifact; choose another -o"):
            check_goal(tmp_path / name, replace=replace)
    assert (tmp_path / "folder/thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("parent", ["/proc/nowhere", "/proc", "FILE", "FILE/deeper", "/dev/null"])
def test_a_place_that_takes_no_folder(tmp_path, parent):
    """Root may write almost everywhere; not below a file, and not in /proc."""
    (tmp_path / "file").write_text("x")
    goal = Path(parent.replace("FILE", str(tmp_path / "file")), "artifact")
    with (
        pytest.raises(DiskError, match=r"cannot be written \(.+\): choose another -o"),
        whole_folder(goal, "building", replace=False),
    ):
        raise StoppedError
    assert names(tmp_path) == ["file"]


def test_a_full_disk(small_disk):
    """The engine's writer and the weights' each have their own error; both become one sentence."""
    goal = small_disk / "artifact"
    too_much = torch.zeros(SMALL_DISK, dtype=torch.uint8)
    with (
        pytest.raises(DiskError, match="no space left for"),
        whole_folder(goal, "building", replace=False) as f,
    ):
        write_weights(f, [("weight", too_much)])
    assert names(small_disk) == []
    with (
        pytest.raises(DiskError, match="no space left for"),
        whole_folder(goal, "building", replace=False) as f,
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
    assert "-o" in str(caught.value)


def test_a_fault_that_is_none_of_the_disks_stays_what_it_is():
    with pytest.raises(FileNotFoundError), disk_faults(Path("goal")):
        raise FileNotFoundError(errno.ENOENT, "gone")


def test_readers_get_what_the_umask_gives(tmp_path):
    """safetensors writes for the owner alone; an artifact is copied and served by others."""
    for umask, folders, files in ((0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)):
        goal = tmp_path / f"{umask:o}"
        before = os.umask(umask)
        try:
            with whole_folder(goal, "building", replace=False) as folder:
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
        with whole_folder(goal, "building", replace=False) as folder:
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
        "with whole_file(Path(sys.argv[1]), 'packing', replace=False) as file:\n"
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
        with whole_file(goal, "packing", replace=False) as file:
            file.write(b"half")
            raise StoppedError

    with pytest.raises(StoppedError):
        stop()
    assert names(tmp_path) == []
    with whole_file(goal, "packing", replace=False) as file:
        file.write(b"whole")
        assert not goal.exists()
    with pytest.raises(UsageError, match="exists already"), whole_file(goal, "packing", replace=False):
        pass
    with whole_file(goal, "packing", replace=True) as file:
        file.write(b"another")
    assert goal.read_bytes() == b"another"
    assert names(tmp_path) == ["a.tar"]


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_is_no_regular_file_is_never_replaced_by_one(tmp_path, kind):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    with (
        pytest.raises(UsageError, match="is no regular file"),
        whole_file(tmp_path / kind, "packing", replace=True),
    ):
        pass


def test_what_a_killed_process_left_is_removed_and_said(tmp_path, capsys):
    """Though its number is that of a living process by now, and whatever it was doing; a file too."""
    assert killed(lambda: build(tmp_path / "artifact", meanwhile=kill_here)) == -signal.SIGKILL
    left = tmp_path / f".artifact.building-{os.getppid()}"
    left.mkdir()
    fill(left)
    (tmp_path / ".artifact.unpacking-0123456789").mkdir()
    (tmp_path / ".artifact.unpacking-0123456789/half").touch()
    (tmp_path / ".artifact.saving-0123456789").write_text("half")
    assert len(names(tmp_path)) == 4
    build(tmp_path / "artifact")
    assert names(tmp_path) == ["artifact"]
    said = capsys.readouterr().err
    assert f"removed {left.name}: the process that left it is gone" in said
    assert said.count("removed .artifact.") == 4


def test_of_what_is_empty_nothing_is_said(tmp_path, capsys):
    """A living process may have made it this moment, and not locked it yet."""
    (tmp_path / ".artifact.unpacking-0123456789").mkdir()
    (tmp_path / ".artifact.saving-0123456789").touch()
    build(tmp_path / "artifact")
    assert names(tmp_path) == ["artifact"]
    assert capsys.readouterr().err == ""


def test_what_is_not_left_over_stays(tmp_path, capsys):
    """Another goal's, another name, what somebody holds, a link."""
    stays = [".other.building-0123456789", ".artifact.building-0123456789x", ".artifact.building-01234567890"]
    for name in stays:
        (tmp_path / name).mkdir()
    locked = tmp_path / ".artifact.building-0123456789"
    locked.mkdir()
    descriptor = os.open(locked, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        build(tmp_path / "artifact")
    finally:
        os.close(descriptor)
    assert names(tmp_path) == sorted([*stays, locked.name, "artifact"])
    assert capsys.readouterr().err == ""
    locked.rmdir()
    (tmp_path / "real").mkdir()
    locked.symlink_to("real")
    os.mkfifo(tmp_path / ".artifact.building-9876543210")
    build(tmp_path / "artifact", replace=True)
    assert locked.is_symlink()
    assert (tmp_path / ".artifact.building-9876543210").is_fifo()


def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_locks_leftovers_stay_and_an_artifact_comes_back_all_the_same(tmp_path, monkeypatch):
    goal = tmp_path / "artifact"
    build(goal, "first")
    goal.rename(tmp_path / ".artifact.replaced-0123456789")
    (tmp_path / ".artifact.building-0123456789").mkdir()
    no_locks(monkeypatch)
    build(goal, "second", replace=True)
    assert (goal / "manifest.json").read_text() == "second"
    assert names(tmp_path) == [".artifact.building-0123456789", "artifact"]


def test_what_another_process_takes_for_a_leftover_is_made_once_more(tmp_path, monkeypatch):
    """Between its making and its lock, which nothing can close."""
    hold, swept = leftovers.hold, []

    def sweep_first(descriptor: int) -> bool:
        if len(swept) < 2:
            swept.extend(path for path in tmp_path.iterdir())
            remove_leftovers(tmp_path, r"\.artifact\.[a-z]+-")
            assert names(tmp_path) == []
        return hold(descriptor)

    monkeypatch.setattr(leftovers, "hold", sweep_first)
    build(tmp_path / "artifact")
    with whole_file(tmp_path / "file", "packing", replace=False) as file:
        file.write(b"whole")
    assert len(set(swept)) == 2
    assert names(tmp_path) == ["artifact", "file"]


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_many_that_make_one_goal_at_once_are_in_nobodys_way(tmp_path, monkeypatch, kind, exchanged):
    """Threads here; a lock is of the open file, so that they are to one another what processes are."""
    if not exchanged:
        no_exchange(monkeypatch)
    goal, others, faults = tmp_path / "goal", threading.Barrier(4, timeout=20), []

    def make(content: str) -> None:
        try:
            others.wait()
            for _ in range(10):
                if kind == "folder":
                    build(goal, content, replace=True)
                else:
                    with whole_file(goal, "saving", replace=True) as file:
                        file.write(content.encode())
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=make, args=[letter * 9]) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    found = (goal / "manifest.json" if kind == "folder" else goal).read_text()
    assert found in {letter * 9 for letter in "abcd"}
    assert names(tmp_path) == ["goal"]


def test_of_many_that_may_not_replace_one_has_its_way(tmp_path):
    goal, others, ends = tmp_path / "goal", threading.Barrier(4, timeout=20), []

    def make(content: str) -> None:
        try:
            build(goal, content, meanwhile=others.wait)
            ends.append(content)
        except UsageError as refused:
            ends.append(type(refused))

    threads = [threading.Thread(target=make, args=[letter]) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (won,) = [end for end in ends if end is not UsageError]
    assert len(ends) == 4
    assert (goal / "manifest.json").read_text() == won
    assert names(tmp_path) == ["goal"]


def test_a_file_may_be_its_owners_alone(tmp_path):
    goal = tmp_path / "snapshot"
    goal.write_text("an older one, for all to read")
    goal.chmod(0o644)
    with whole_file(goal, "saving", replace=True, mode=0o600) as file:
        (hidden,) = (path for path in tmp_path.iterdir() if path != goal)
        assert stat.S_IMODE(hidden.stat().st_mode) == 0o600
        file.write(b"secret")
    assert stat.S_IMODE(goal.stat().st_mode) == 0o600
    assert goal.read_bytes() == b"secret"


def test_hidden_names_cannot_be_foretold(tmp_path):
    seen = set()
    for _ in range(5):
        with whole_file(tmp_path / "goal", "saving", replace=True):
            seen |= {path.name for path in tmp_path.iterdir()} - {"goal"}
    assert len(seen) == 5
    assert not any(name.endswith(f"-{os.getpid()}") for name in seen)


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_old_one_goes(tmp_path, monkeypatch):
    """What a crash of the machine may show: the order of fsync, exchange, fsync, removal."""
    goal, told = tmp_path / "artifact", []
    build(goal, "first")

    def recorded(word: str, work: Callable[..., object]) -> Callable[..., object]:
        def run(what: object, *more: object, **options: object) -> object:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            told.append(
                (word, re.sub(r"\.artifact\.building-[0-9a-f]+", "NEW", path.removeprefix(f"{tmp_path}/")))
            )
            return work(what, *more, **options)

        return run

    monkeypatch.setattr(os, "fsync", recorded("fsync", os.fsync))
    monkeypatch.setattr(shutil, "rmtree", recorded("remove", shutil.rmtree))
    monkeypatch.setattr(whole_files, "exchange", recorded("exchange", whole_files.exchange))
    build(goal, "second", replace=True)
    assert sorted(told[:4]) == [
        ("fsync", "NEW"),
        ("fsync", "NEW/engines"),
        ("fsync", "NEW/engines/block.pt2"),
        ("fsync", "NEW/manifest.json"),
    ]
    assert told[4:] == [("exchange", "NEW"), ("fsync", str(tmp_path)), ("remove", "NEW")]


def test_the_lock_is_held_while_the_folder_is_filled(tmp_path):
    with whole_folder(tmp_path / "artifact", "building", replace=False) as folder:
        fill(folder)
        descriptor = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
