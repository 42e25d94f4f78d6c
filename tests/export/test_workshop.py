"""The folder of compilers is gone whatever ends the block, at whatever moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from seko_export.host import workshop as module
from seko_export.host.workshop import workshop
from tests.support.delivered_signal import deliver


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def heard():
    """What runs the tests may have SIGINT ignored, as a shell's background job has."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def bystander():
    """A thread that does nothing, and may be the one that takes a signal."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield thread
    end.set()
    thread.join()


def test_handlers_are_those_of_before(place):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with workshop("seko-x-"):
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert list(place.iterdir()) == []


def test_beside_the_main_thread_it_is_made_and_removed_too(place):
    def work():
        with workshop("seko-x-") as folder:
            assert folder.is_dir()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("ended_by", [None, ValueError, KeyboardInterrupt])
def test_it_is_gone_after_the_block(place, ended_by):
    def work():
        with workshop("seko-x-") as folder:
            assert folder.parent == place
            assert folder.name.startswith("seko-x-")
            (folder / "half.o").touch()
            if ended_by is not None:
                raise ended_by

    if ended_by is None:
        work()
    else:
        with pytest.raises(ended_by):
            work()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("taken_by", ["main", "another"])
@pytest.mark.parametrize("moment", ["made", "removed"])
def test_a_signal_while_it_is_made_or_removed_waits(place, monkeypatch, moment, taken_by, bystander):
    thread = threading.main_thread() if taken_by == "main" else bystander
    make, remove = module.make_own_folder, module.remove_own_folder

    def make_slowly(*options):
        folder = make(*options)
        if moment == "made":
            deliver(thread, signal.SIGINT)  # there, and nobody knows of it
        return folder

    def removed(folder):
        if moment == "removed":
            deliver(thread, signal.SIGINT)
        return remove(folder)

    monkeypatch.setattr(module, "make_own_folder", make_slowly)
    monkeypatch.setattr(module, "remove_own_folder", removed)
    entered = []
    with pytest.raises(KeyboardInterrupt), workshop("seko-x-") as folder:
        entered.append(folder)
    assert len(entered) == (moment == "removed")
    assert list(place.iterdir()) == []


def killed_in_a_workshop(prefix):
    """Let a process be killed that has such a folder, and return that."""
    child = os.fork()
    if not child:
        with workshop(prefix) as folder:
            (folder / "half.o").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_what_a_killed_process_left_is_removed_by_the_next(place, capsys):
    """And what others work in stays, as does what is somebody's own."""
    (place / "seko-1700000000").mkdir()
    killed_in_a_workshop("seko-y-")
    with workshop("seko-x-") as own_folder:
        killed_in_a_workshop("seko-x-")
        stays = sorted(path.name for path in place.iterdir() if "-x-" not in path.name or path == own_folder)
        assert len(stays) == 3
        assert len(list(place.iterdir())) == 4
        with workshop("seko-x-") as folder:
            assert sorted(path.name for path in place.iterdir()) == sorted([*stays, folder.name])
    assert capsys.readouterr().err.count("the process that left it is gone") == 1


def test_only_its_owner_may_look_into_it():
    with workshop("seko-x-") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700


def test_what_a_compiler_writes_while_it_ends_goes_too(place):
    """It goes on writing for a fifth of a second after the block has ended."""
    writing = (
        "import pathlib, sys, time\n"
        "end = time.monotonic() + .2\n"
        "number = 0\n"
        "while time.monotonic() < end:\n"
        "    number += 1\n"
        "    try: pathlib.Path(sys.argv[1], str(number)).touch()\n"
        "    except FileNotFoundError: break\n"
    )
    with workshop("seko-x-") as folder:
        compiler = subprocess.Popen([sys.executable, "-c", writing, str(folder)])
        deadline = time.monotonic() + 60
        while not any(folder.iterdir()):  # it may have ended by now, and left what it wrote
            assert time.monotonic() < deadline
    compiler.wait(timeout=60)
    assert list(place.iterdir()) == []


def test_a_folder_that_stays_is_told(monkeypatch):
    monkeypatch.setattr(module, "_REMOVALS", 2)
    monkeypatch.setattr(module, "remove_own_folder", lambda _folder: False)
    with pytest.warns(UserWarning, match="could not be removed"), workshop("seko-x-"):
        pass
