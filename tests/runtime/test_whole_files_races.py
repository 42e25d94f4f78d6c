"""Whole folders among others: two that take one name, a process killed between any two steps, what it leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import threading
from functools import partial
from pathlib import Path

import pytest

from seko_runtime.errors import DiskError, UsageError
from seko_runtime.format import own_folders, whole_files
from seko_runtime.format.own_folders import MARKER, sweep
from seko_runtime.format.whole_files import check_alone, whole_file
from tests.runtime.whole_files_cases import (
    build,
    fill,
    kill_here,
    killed,
    names,
    no_exchange,
    no_locks,
)
from tests.support.together import together


def test_the_old_artifact_comes_back_if_the_new_one_cannot_take_its_name(tmp_path, monkeypatch):
    goal = tmp_path / "artifact"
    build(goal, "first")
    no_exchange(monkeypatch)
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name == "new":
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


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_many_that_make_one_goal_at_once_are_in_nobodys_way(tmp_path, monkeypatch, kind, exchanged):
    """Threads here; a lock is of the open file, so that they are to one another what processes are."""
    if not exchanged:
        no_exchange(monkeypatch)
    goal = tmp_path / "goal"

    def make(content: str) -> None:
        for _ in range(10):
            if kind == "folder":
                build(goal, content, replace=True)
            else:
                with whole_file(goal, replace=True) as file:
                    file.write(content.encode())

    together([partial(make, letter * 9) for letter in "abcd"])
    text = (goal / "manifest.json" if kind == "folder" else goal).read_text()
    assert text in {letter * 9 for letter in "abcd"}
    assert names(tmp_path) == ["goal"]


def test_one_that_makes_a_goal_is_known_as_long_as_it_lives(tmp_path):
    goal = tmp_path / "goal"
    check_alone(goal)
    with pytest.raises(UsageError, match="another process is making"):
        build(goal, meanwhile=lambda: check_alone(goal))
    check_alone(goal)
    assert killed(lambda: build(tmp_path / "other", meanwhile=kill_here)) == -signal.SIGKILL
    check_alone(tmp_path / "other")


def test_an_artifact_that_came_behind_the_check_stays(tmp_path, monkeypatch):
    goal, check = tmp_path / "artifact", whole_files.check_folder_place

    def another_comes(path: Path, *, replace: bool) -> None:
        check(path, replace=replace)
        goal.mkdir()
        fill(goal, "another")

    with pytest.raises(UsageError, match="exists already"):
        build(
            goal,
            "mine",
            meanwhile=lambda: monkeypatch.setattr(whole_files, "check_folder_place", another_comes),
        )
    assert (goal / "manifest.json").read_text() == "another"
    assert names(tmp_path) == ["artifact"]


def test_of_many_that_may_not_replace_one_has_its_way(tmp_path):
    goal, others = tmp_path / "goal", threading.Barrier(4, timeout=20)

    def make(content: str) -> str:
        try:
            build(goal, content, meanwhile=others.wait)
        except UsageError:
            return ""
        return content

    (won,) = filter(None, together([partial(make, letter) for letter in "abcd"]))
    assert (goal / "manifest.json").read_text() == won
    assert names(tmp_path) == ["goal"]


def left_folder(goal: Path, digit: str, *, marker: bool = True) -> Path:
    """What a process that was killed leaves beside its goal."""
    left = goal.with_name(f".{goal.name}.seko-{digit * 10}")
    left.mkdir()
    (left / "new").write_text("half")
    if marker:
        (left / MARKER).touch()
    return left


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_a_killed_process_left_is_removed_and_said(tmp_path, capsys, kind):
    goal = tmp_path / "goal"

    def make(meanwhile=lambda: None) -> None:
        if kind == "folder":
            build(goal, meanwhile=meanwhile)
        else:
            with whole_file(goal, replace=False) as file:
                file.write(b"whole")
                meanwhile()

    assert killed(lambda: make(kill_here)) == -signal.SIGKILL
    (left,) = names(tmp_path)
    left_folder(goal, "a")
    make()
    assert names(tmp_path) == ["goal"]
    said = capsys.readouterr().err
    assert f"removed {left}: the process that left it is gone" in said
    assert said.count("removed .goal.seko-") == 2


def test_what_is_not_left_over_stays(tmp_path, monkeypatch, capsys):
    """Another goal's, what somebody holds, what another user made, links in the place of folder and marker."""
    goal = tmp_path / "goal"
    stays = [
        left_folder(tmp_path / "other", "a"),
        left_folder(goal, "b"),
        left_folder(goal, "c", marker=False),
    ]
    held = os.open(stays[1] / MARKER, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    (stays[2] / MARKER).symlink_to(stays[0] / MARKER)
    (tmp_path / ".goal.seko-dddddddddd").symlink_to(stays[0].name)
    before = names(tmp_path)
    build(goal)
    os.close(held)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with whole_file(goal / "a file", replace=False, beside=goal):
        pass
    build(goal, replace=True)
    assert names(tmp_path) == sorted([*before, "goal"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("locks", [True, False])
def test_of_an_artifact_that_was_being_replaced_nothing_is_lost(tmp_path, monkeypatch, capsys, locks):
    """On a file system without locks nobody can know whether its process lives, and it stays where it is."""
    goal = tmp_path / "artifact"
    build(goal, "first")
    left = left_folder(goal, "a")
    goal.rename(left / "replaced")
    if not locks:
        no_locks(monkeypatch)
    if locks:
        with pytest.raises(UsageError, match="exists already"):
            build(goal, "second")
    build(goal, "third", replace=True)
    assert (goal / "manifest.json").read_text() == "third"
    assert names(tmp_path) == (["artifact"] if locks else [left.name, "artifact"])
    assert ("put artifact back" in capsys.readouterr().err) == locks
    assert locks or (left / "replaced/manifest.json").read_text() == "first"


def test_a_folder_of_the_users_that_was_moved_away_is_never_removed(tmp_path, capsys):
    """It took the artifact's name at the last moment, where two names cannot be exchanged."""
    goal = tmp_path / "artifact"
    left = left_folder(goal, "a")
    (left / "replaced").mkdir()
    (left / "replaced/thesis.txt").write_text("years of work")
    build(goal.with_name("other"))
    goal.with_name("other").rename(goal)
    build(goal, replace=True)
    assert (left / "replaced/thesis.txt").read_text() == "years of work"
    assert capsys.readouterr().err == ""


def test_what_another_process_sweeps_before_it_is_locked_is_made_once_more(tmp_path, monkeypatch):
    hold, swept = own_folders.hold, []

    def sweep_first(descriptor: int) -> bool:
        if len(swept) < 2:
            swept.extend(tmp_path.glob(".*"))
            sweep(tmp_path, ".artifact.seko-")
            sweep(tmp_path, ".file.seko-")
            assert names(tmp_path) == [path for path in names(tmp_path) if path == "artifact"]
        return hold(descriptor)

    monkeypatch.setattr(own_folders, "hold", sweep_first)
    build(tmp_path / "artifact")
    swept.pop()
    with whole_file(tmp_path / "file", replace=False) as file:
        file.write(b"whole")
    assert len(swept) == 2
    assert names(tmp_path) == ["artifact", "file"]
