"""A rank that dies or hangs, and a caller that does: one error, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from seko_runtime import Session, open_artifact
from seko_runtime.errors import RankLostError, SessionClosedError
from tests.conftest import Built
from tests.parallel.rank_faults import beside, is_running, kill_once

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0  # until a test gives up; what it waits for takes seconds
CALLER = """
import signal, sys, time
from seko_runtime import open_artifact
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without
with open_artifact(sys.argv[1]) as artifact:
    with artifact.open_session() as session:
        session.run_chunk().to_host()
        print(*artifact.processes, flush=True)
        {then}
"""


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)])
def test_a_rank_that_dies_or_stands_still_ends_the_group_with_one_error(
    two: Built, number: signal.Signals, rank: int
) -> None:
    with open_artifact(two.folder) as artifact:
        session = artifact.open_session()
        session.run_chunk()
        members = artifact.processes
        os.kill(members[rank], number)
        with pytest.raises(RankLostError, match=f"rank {rank} of 2") as first:
            run_on(session)
        with pytest.raises(RankLostError, match=f"rank {rank} of 2") as second:
            session.run_chunk()
        assert str(second.value) == str(first.value)
        assert not any(map(is_running, members))
        session.close()
    with pytest.raises(SessionClosedError):
        session.run_chunk()


def test_a_rank_that_dies_while_nothing_is_asked_ends_the_others(two: Built) -> None:
    with open_artifact(two.folder) as artifact:
        members = artifact.processes
        os.kill(members[1], signal.SIGKILL)
        await_all(members)
        with pytest.raises(RankLostError, match=r"rank 1 of 2 .* was ended by signal 9"):
            artifact.open_session()


def test_a_kill_at_any_moment_ends_one_group_and_no_other(two: Built) -> None:
    with beside(two.folder) as wrong:
        killed = [kill_once(two.folder, rank, delay) for rank, delay in ((0, 0.0), (1, 0.5))]
    assert wrong == []
    assert [report["error"][:11] for report in killed] == ["rank 0 of 2", "rank 1 of 2"]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files, of torch, which unpacks each engine there, as of the group."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_closing_ends_all_processes_and_leaves_no_thread_and_no_file(two: Built, temporary: Path) -> None:
    before = threading.active_count()
    artifact = open_artifact(two.folder)
    members = artifact.processes
    assert list(temporary.iterdir()) != []
    artifact.close()
    artifact.close()
    assert not any(map(is_running, members))
    assert threading.active_count() <= before
    assert list(temporary.iterdir()) == []
    with pytest.raises(SessionClosedError):
        artifact.open_session()


def test_nothing_stays_in_the_temporary_folder_of_killed_ranks(two: Built, temporary: Path) -> None:
    with open_artifact(two.folder) as artifact:
        artifact.open_session().run_chunk().to_host()
        assert list(temporary.iterdir()) != []
        os.kill(artifact.processes[0], signal.SIGKILL)
        await_all(artifact.processes)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_the_caller(two: Built, number: signal.Signals) -> None:
    script = CALLER.format(then="[session.run_chunk() for _ in range(10**9)]")
    command = [sys.executable, "-c", script, str(two.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as caller:
        members = tuple(map(int, caller.stdout.readline().split()))
        assert len(members) == 2
        caller.send_signal(number)
    await_all(members)


def run_on(session: Session | Session) -> None:
    """Make chunks until it fails."""
    while True:
        session.run_chunk()


def await_all(members: tuple[int, ...]) -> None:
    """Wait until these processes are gone."""
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_running, members)):
        assert time.monotonic() < deadline, members
        time.sleep(0.05)
