"""A rank group of plain processes: what it notices, what it refuses, and that nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from seko_runtime.errors import RankLostError, UsageError
from seko_runtime.parallel import channel
from seko_runtime.parallel.channel import MAX_DEPTH
from seko_runtime.parallel.group import SILENT_S, RankGroup
from seko_runtime.parallel.records import record
from seko_runtime.sessions.ranked_rows import rows_over_ranks
from seko_runtime.video.pool import Pool, Session
from seko_runtime.video.row_numbers import STATE_FORM
from seko_runtime.video.rows import VideoRows
from tests.parallel.rank_faults import PATIENCE_S, await_all, is_running
from tests.runtime import toy_whole

MODULE = "tests.parallel.plain_rank"
FEW_PARTS = 1000
LONG_S = 10 * PATIENCE_S  # no test waits so long for an answer


@pytest.fixture
def group() -> Iterator[RankGroup]:
    """Two processes."""
    ranks = RankGroup(MODULE, 2, {}, seconds=PATIENCE_S)
    yield ranks
    ranks.close()


@contextlib.contextmanager
def ended_anyway(group: RankGroup) -> Iterator[ThreadPoolExecutor]:
    """Give a thread for a call; kill the processes before waiting for it, so that a failing test ends."""
    with ThreadPoolExecutor(1) as threads:
        try:
            yield threads
        finally:
            for process in group.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("patient", [True, False])
def test_a_stopped_rank_is_noticed_whatever_is_asked(group: RankGroup, patient: bool) -> None:
    os.kill(group.processes[1], signal.SIGSTOP)
    with ended_anyway(group) as threads:
        called = threads.submit(group.call, "echo", seconds=LONG_S, patient=patient)
        with pytest.raises(RankLostError, match=r"rank 1 of 2 .* hangs"):
            called.result(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "patient"), [(0, True), (1, False)])
def test_a_rank_that_is_stopped_in_the_midst_of_its_answer_is_noticed(
    group: RankGroup, patient: bool, rank: int
) -> None:
    """The caller has a part of the answer, and waits for the rest."""
    with ended_anyway(group) as threads:
        facts = {"rank": rank, "size": 1 << 20}
        called = threads.submit(group.call, "stop", facts, seconds=LONG_S, patient=patient)
        with pytest.raises(RankLostError, match=rf"rank {rank} of 2 .* hangs"):
            called.result(PATIENCE_S)


def test_a_rank_that_is_stopped_in_the_midst_of_a_command_is_noticed(group: RankGroup) -> None:
    """The command's array does not fit into the socket, so the caller waits in the midst of sending it."""
    os.kill(group.processes[1], signal.SIGSTOP)
    with ended_anyway(group) as threads:
        called = threads.submit(group.call, "echo", {"x": np.zeros(1 << 20)}, seconds=LONG_S)
        with pytest.raises(RankLostError, match=r"rank 1 of 2 .* hangs"):
            called.result(PATIENCE_S)


def test_a_group_closes_while_another_thread_sends_to_a_stopped_rank(group: RankGroup) -> None:
    os.kill(group.processes[1], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as closing, ended_anyway(group) as calling:
        called = calling.submit(group.call, "echo", {"x": np.zeros(1 << 20)}, seconds=LONG_S)
        deadline = time.monotonic() + PATIENCE_S
        while not group._channels[1]._sending.locked():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        closing.submit(group.close).result(PATIENCE_S)
        with pytest.raises(RankLostError, match="the artifact is closed"):
            called.result(PATIENCE_S)


def test_a_child_of_the_caller_that_ends_does_not_end_the_group(group: RankGroup) -> None:
    """A forked child that exits as Python does runs what its parent registered for its own end."""
    folder = Path(group.call("echo", seconds=PATIENCE_S).results[1]["temporary"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if not child:
        try:
            group._cleared()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert folder.exists()
    assert group.call("echo", seconds=PATIENCE_S).results[1]["rank"] == 1


def test_a_rank_that_is_stopped_while_it_begins_is_noticed() -> None:
    def stop() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for line in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if MODULE.encode() in line.read_bytes() and parent_of(line.parent) == os.getpid():
                        time.sleep(1.0)  # until it serves
                        os.kill(int(line.parent.name), signal.SIGSTOP)
                        return
            time.sleep(0.01)

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(RankLostError, match="hangs"):
        RankGroup(MODULE, 1, {"seconds": 3 * SILENT_S}, seconds=PATIENCE_S)
    stopping.join()


def parent_of(process: Path) -> int:
    """Return the parent's id of a process in /proc."""
    return int((process / "stat").read_text().rpartition(")")[2].split()[1])


def test_short_calls_of_another_thread_do_not_hide_a_rank_that_hangs(group: RankGroup) -> None:
    """A call waits for a rank that does nothing; another thread asks the other rank every few milliseconds."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            with contextlib.suppress(RankLostError):
                group.call("echo", ranks=(0,), seconds=LONG_S)
            time.sleep(0.02)

    asking = threading.Thread(target=ask)
    with ended_anyway(group) as threads:
        try:
            os.kill(group.processes[1], signal.SIGSTOP)
            called = threads.submit(group.call, "echo", ranks=(1,), seconds=LONG_S, patient=False)
            asking.start()
            with pytest.raises(RankLostError, match=r"rank 1 of 2 .* hangs"):
                called.result(PATIENCE_S)
        finally:
            over.set()
    asking.join()


def test_the_table_of_calls_changes_under_the_lock_under_which_others_read_it(group: RankGroup) -> None:
    class Table(dict[int, Any]):
        def __setitem__(self, number: int, answers: Any) -> None:
            assert group._lock._is_owned()  # type: ignore[attr-defined]
            super().__setitem__(number, answers)

        def pop(self, *arguments: Any) -> Any:
            assert group._lock._is_owned()  # type: ignore[attr-defined]
            return super().pop(*arguments)

    group._open_calls = Table()
    group.call("echo", seconds=LONG_S)
    assert not group._open_calls


def test_a_patient_call_may_wait_and_an_impatient_one_beside_it_does_not_end_it(group: RankGroup) -> None:
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(
            group.call, "wait", {"seconds": 2 * SILENT_S}, ranks=(1,), seconds=LONG_S, patient=True
        )
        for _ in range(20):
            group.call("echo", ranks=(0,), seconds=LONG_S, patient=False)
        assert waiting.result(PATIENCE_S).results[1]["rank"] == 1


def nested(depth: int) -> list[Any]:
    """Return lists in each other."""
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def in_itself() -> dict[str, Any]:
    """Return a mapping that contains itself."""
    own: dict[str, Any] = {}
    own["own"] = own
    return own


@record
@dataclass
class Linked:
    """A dataclass that may contain itself."""

    next: Any = None


def linked_to_itself() -> Linked:
    """Return one that does."""
    linked = Linked()
    linked.next = linked
    return linked


def wide(doublings: int) -> list[Any]:
    """Return lists that hold one another twice: few objects, 2**doublings parts."""
    inner: list[Any] = [1]
    for _ in range(doublings):
        inner = [inner, inner]
    return inner


class Unreadable:
    """Something whose conversion to an array raises what nobody expects."""

    def __array__(self, *_: object, **__: object) -> Any:
        raise KeyError("planted")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: nested(600), f"text is nested more than {MAX_DEPTH} deep"),
        (lambda: nested(100_000), f"text is nested more than {MAX_DEPTH} deep"),
        (lambda: wide(30), f"text has more than {FEW_PARTS} parts"),
        (in_itself, f"own is nested more than {MAX_DEPTH} deep, or contains itself"),
        (linked_to_itself, f"next is nested more than {MAX_DEPTH} deep"),
        (Unreadable, "text is no array of numbers"),
        (lambda: 10**5000, "text is an integer of 16610 bits"),
        (lambda: np.broadcast_to(np.float32(0), 2**40), "text is a view of 4398046511104 bytes"),
    ],
    ids=["600", "100000", "wide", "mapping", "dataclass", "conversion", "integer", "view"],
)
def test_an_argument_that_cannot_be_sent_is_refused_and_the_group_goes_on(
    group: RankGroup, made: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "MAX_PARTS", FEW_PARTS)  # a million take a second to count
    wrong = made()
    with pytest.raises(UsageError, match=message):
        group.call("echo", {"text": wrong}, seconds=PATIENCE_S)
    with pytest.raises(UsageError, match=message):  # known only when rank 0 would have had its part
        group.call("echo", own=[{"text": 1}, {"text": wrong}], seconds=PATIENCE_S)
    answers = group.call("echo", {"x": np.arange(3)}, own=[{"y": 0}, {"y": [np.ones(2)]}], seconds=PATIENCE_S)
    assert [answers.results[rank]["x"].tolist() for rank in range(2)] == [[0, 1, 2]] * 2
    assert answers.results[0]["y"] == 0
    assert answers.results[1]["y"][0].tolist() == [1, 1]


def test_a_rank_that_gets_what_it_does_not_know_ends_and_says_so(group: RankGroup) -> None:
    with pytest.raises(
        RankLostError, match=r"ended with code 1, .*knows no record tests\.parallel\..*Linked"
    ):
        group.call("echo", {"x": Linked()}, seconds=PATIENCE_S)


def test_an_answer_of_an_unknown_class_ends_the_group(group: RankGroup) -> None:
    with pytest.raises(RankLostError, match=r"of 2 sent a message .*knows no record __main__\.Own"):
        group.call("own", seconds=PATIENCE_S)


def folder_of(group: RankGroup) -> Path:
    """Return the ranks' temporary folder, in which something was left as libraries do."""
    folder = Path(group.call("echo", seconds=PATIENCE_S).results[1]["temporary"])
    (folder / "aotinductor_left").mkdir()
    return folder


def test_closing_ends_all_processes_and_leaves_no_thread_and_no_file() -> None:
    before = threading.active_count()
    group = RankGroup(MODULE, 2, {}, seconds=PATIENCE_S)
    members, folder = group.processes, folder_of(group)
    group.close()
    group.close()
    assert not any(map(is_running, members))
    assert threading.active_count() <= before
    assert not folder.exists()


def test_a_rank_that_dies_while_nothing_is_asked_ends_the_others_and_leaves_no_file(group: RankGroup) -> None:
    folder = folder_of(group)
    os.kill(group.processes[1], signal.SIGKILL)
    await_all(group.processes)
    with pytest.raises(RankLostError, match=r"rank 1 of 2 .* was ended by signal 9"):
        group.call("echo", seconds=PATIENCE_S)
    group.close()
    assert not folder.exists()


FORKING_CALLER = f"""
import os, signal, time
from seko_runtime.parallel.group import RankGroup
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without
group = RankGroup({MODULE!r}, 2, {{}}, seconds=60)
child = os.fork()
if not child:
    time.sleep(600)
print(group._folder, child, *group.processes, flush=True)
group.call("wait", {{"seconds": 600}}, seconds=600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_a_caller_whose_own_child_lives_on(number: signal.Signals) -> None:
    """The child has inherited the sockets, so their other ends stay open."""
    command = [sys.executable, "-W", "ignore", "-c", FORKING_CALLER]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet, text=True, env=environ) as caller:
        folder, *processes = caller.stdout.readline().split()
        child, *members = map(int, processes)
        caller.send_signal(number)
    try:
        await_all(members)
        assert not Path(folder).exists()
        assert is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)


class LostUnnoticed:
    """A group whose ranks have died, which only its next call finds."""

    lost = False

    def call(self, *_: object, **__: object) -> SimpleNamespace:
        if self.lost:
            raise RankLostError("rank 1 of 2 (process 7) was ended by signal 9")
        return SimpleNamespace(results={0: {"overlaps": False}})


def test_sessions_of_ranks_that_died_unnoticed_end_quietly() -> None:
    group = LostUnnoticed()
    pool = Pool(rows_over_ranks(VideoRows, toy_whole.whole_manifest(), group, STATE_FORM, {}))
    session = Session(pool, "a", None, None)
    session._place = 0  # as `open_session` does, of which the ranks' answers are more than this double gives
    group.lost = True
    with pytest.raises(RankLostError):
        session.run_chunk()
    session.close()
    assert session.closed
    pool.close()
