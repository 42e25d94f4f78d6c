"""Whole folders among others: two that take one name, a process killed between any two steps, what it leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from seko_runtime.errors import DiskError, UsageError
from seko_runtime.format import leftovers, whole_files
from seko_runtime.format.leftovers import remove_leftovers
from seko_runtime.format.whole_files import whole_file
from tests.runtime.whole_files_cases import (
    build,
    fill,
    kill_here,
    killed,
    names,
    no_exchange,
    no_locks,
)


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


@pytest.mark.parametrize("finished", [True, False])
def test_a_replaced_artifact_that_a_third_process_is_removing_does_not_come_back(
    tmp_path, monkeypatch, finished
):
    """Another process takes the name just before the exchange and ends; a third takes its artifact for a leftover."""
    goal = tmp_path / "artifact"
    build(goal, "first")
    exchange, raced, third = whole_files.exchange, [], []

    def race(folder: Path, name: Path) -> bool:
        if raced:
            return exchange(folder, name)
        raced.append(True)
        build(name, "theirs", replace=True)
        exchange(folder, name)
        if finished:
            shutil.rmtree(folder)
        else:
            third.append(os.open(folder, os.O_RDONLY))
            fcntl.flock(third[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / "manifest.json").unlink()
        return True

    monkeypatch.setattr(whole_files, "exchange", race)
    build(goal, "mine", replace=True)
    for descriptor in third:
        os.close(descriptor)
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
    text = (goal / "manifest.json" if kind == "folder" else goal).read_text()
    assert text in {letter * 9 for letter in "abcd"}
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
