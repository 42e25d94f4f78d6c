"""Two ranks whose processes others started: torchrun, or a test that gives them what torchrun does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.bench.rank_faults import is_running
from seko_runtime import OpenArtifact, open_artifact
from seko_runtime.errors import EnvironmentLacksError, RankLostError, UsageError
from seko_runtime.parallel import torchrun
from seko_runtime.parallel.torchrun import Joined, Meeting, meeting_of_torchrun
from tests.conftest import Built
from tests.parallel.test_faults import await_all

CHUNKS = 4
SEEDS = [3, 4]
RANK_1 = {
    "TORCHELASTIC_RUN_ID": "a run",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
}
SCRIPT = f"""
import json, os, sys
import numpy as np
from seko_runtime import open_artifact
from seko_runtime.errors import RankLostError, UsageError

folder, out, what = sys.argv[1:]
try:
    with open_artifact(folder, ranks=2) as artifact:
        with artifact.open_session({SEEDS[0]}) as session:
            chunks = [session.run_chunk().to_host() for _ in range({CHUNKS})]
            if what == "endless":
                print(json.dumps(artifact.processes), flush=True)
                while True:
                    session.run_chunk()
        engines = "torch" in sys.modules
        try:
            open_artifact(folder)
        except UsageError as fault:
            again = str(fault)
    np.savez(out, latents=chunks, processes=artifact.processes, own=os.getpid(), engines=engines, again=again)
except RankLostError as fault:
    print(fault, flush=True)
finally:
    with open(out + os.environ["RANK"], "w") as file:
        file.write("left")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """What every process runs."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.slow
def test_torchrun_starts_the_ranks_and_ends_well(two: Built, opened: OpenArtifact, script: Path) -> None:
    out = script.with_name("out.npz")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # torchrun's is 1
    done = subprocess.run(
        [*command, script, two.folder, out, "once"], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = np.load(out)
    with opened.open_session(SEEDS[0]) as session:
        expected = [session.run_chunk().to_host() for _ in range(CHUNKS)]
    assert np.array_equal(results["latents"], expected)
    assert not results["engines"]  # the caller's process loads none
    processes = tuple(map(int, results["processes"]))
    assert len({*processes, int(results["own"])}) == 3
    assert not any(map(is_running, processes))
    assert [Path(f"{out}{rank}").read_text() for rank in (0, 1)] == ["left"] * 2
    assert "under torchrun an artifact of several ranks is opened once" in str(results["again"])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_all_with_one_error(two: Built, script: Path, rank: int) -> None:
    with started(two, script, "endless") as processes:
        members = json.loads(processes[0].stdout.readline())
        assert members[1] == processes[1].pid
        os.kill(members[rank], signal.SIGKILL)
        line = processes[0].stdout.readline()
        assert f"rank {rank} of 2 (process {members[rank]})" in line
        assert [process.wait(30) for process in processes] == [0, -signal.SIGKILL]
        await_all((members[0],))


@pytest.mark.slow
def test_the_others_end_when_the_callers_process_is_killed(two: Built, script: Path) -> None:
    with started(two, script, "endless") as processes:
        members = json.loads(processes[0].stdout.readline())
        processes[0].kill()
        assert processes[1].wait(30) == 0
        await_all((members[0],))


@contextmanager
def started(two: Built, script: Path, what: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two processes of a run as torchrun does; end them with the context."""
    processes = []
    try:
        for rank in range(2):
            environment = RANK_1 | {"TMPDIR": str(script.parent), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, script, two.folder, script.with_name("out"), what]
            processes.append(
                subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"WORLD_SIZE": "3"},
            "torchrun started 3 processes, 2 on this machine; this artifact has 2 ranks on one machine: give",
        ),
        ({"LOCAL_WORLD_SIZE": "1"}, "torchrun started 2 processes, 1 on this machine; .* --nproc-per-node 2"),
    ],
)
def test_another_number_of_processes_is_refused(
    two: Built, monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], expected: str
) -> None:
    for name, value in (RANK_1 | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=expected):
        open_artifact(two.folder)


def test_a_run_is_known_by_all_that_torchrun_sets_and_by_its_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)
    first = meeting_of_torchrun(2)
    monkeypatch.setenv("RANK", "0")
    assert meeting_of_torchrun(2) == Meeting(0, 2, first.folder)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert meeting_of_torchrun(2).folder != first.folder
    monkeypatch.delenv("LOCAL_RANK")
    assert meeting_of_torchrun(2) is None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose path is longer than a socket's may be."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    return deep / "meeting"


def test_a_folder_that_others_may_use_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)
    with pytest.raises(EnvironmentLacksError, match="others than this user may use"):
        Meeting(1, 2, folder).connect(1)
    folder.rmdir()
    folder.symlink_to(folder.parent)
    with pytest.raises(EnvironmentLacksError, match="Not a directory; remove it"):
        Meeting(0, 2, folder).gather(1)


def test_a_process_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = os.getuid() + 1
    monkeypatch.setattr(torchrun, "peer_of", lambda _: (5, peer))
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(Meeting(0, 2, folder).gather, 30)
        with pytest.raises(RankLostError, match=f"process 5 of user {peer} is no rank"):
            Meeting(1, 2, folder).connect(30)
        with pytest.raises(RankLostError, match=f"process 5 of user {peer} is no rank"):
            gathered.result()


def test_a_rank_that_does_not_come_is_named(folder: Path) -> None:
    with pytest.raises(RankLostError, match=r"rank 0 of 3 did not open the artifact in 0 s"):
        Meeting(2, 3, folder).connect(0.1)
    folder.mkdir(0o700)  # left by a run that was killed
    (folder / "socket").touch()
    with ThreadPoolExecutor(1) as pool:
        gathered = pool.submit(Meeting(0, 3, folder).gather, 5)
        Meeting(2, 3, folder).connect(30)
        with pytest.raises(RankLostError, match=r"rank 1 of 3 did not open the artifact in 5 s"):
            gathered.result()
    with pytest.raises(UsageError, match="is opened once"):
        Meeting(0, 3, folder).gather(1)


def test_a_silent_connection_delays_nobody_and_strangers_words_are_passed_over(folder: Path) -> None:
    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        gathered = threads.submit(Meeting(0, 3, folder).gather, 30)
        first = Meeting(1, 3, folder).connect(30)

        for says in (b"", b"x", b"not a rank at all", b'{"rank": 2}', b"seko" + bytes(4), b"seko\0\0\0\7"):
            stack.enter_context(stranger(folder)).sendall(says)
        Meeting(1, 3, folder).connect(30).close()  # what another process has said
        second = Meeting(2, 3, folder).connect(30)
        joined = gathered.result(30)
        for channel, far in zip((first, second), joined, strict=True):
            channel.send({"said": 1})
            assert far.channel.receive() == {"said": 1}
            channel.close()
            far.channel.close()


def test_only_silent_connections_do_not_stop_the_meeting(folder: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        gathered = threads.submit(Meeting(0, 2, folder).gather, 5)
        with (
            stranger(folder),
            pytest.raises(RankLostError, match="rank 1 of 2 did not open the artifact in 5 s"),
        ):
            gathered.result(30)


def stranger(folder: Path) -> socket.socket:
    """Return a connection to rank 0's socket, as soon as rank 0 listens: bind() makes the file before that."""
    deadline = time.monotonic() + 30
    while True:
        with suppress(FileNotFoundError, ConnectionRefusedError), torchrun._private(folder) as address:
            connected = socket.socket(socket.AF_UNIX)
            try:
                connected.connect(address)
            except OSError:
                connected.close()
                raise
            return connected
        assert time.monotonic() < deadline, folder
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["x", "", "-1", "1" * 5000, "\u0661"])
def test_an_environment_that_torchrun_did_not_make_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for known, number in (RANK_1 | {name: value}).items():
        monkeypatch.setenv(known, number)
    with pytest.raises(UsageError, match=f"environment variable {name} is .*expected a number"):
        meeting_of_torchrun(2)


def test_a_joined_process_is_killed_only_while_its_channel_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = torchrun.inherited_channel, socket.socketpair()
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    joined = Joined(12345, own(other[0].detach()))
    with pytest.raises(subprocess.TimeoutExpired):
        joined.wait(0)
    joined.kill()
    assert killed == [(12345, signal.SIGKILL)]
    other[1].close()
    joined.wait(5)
    joined.kill()
    assert len(killed) == 1


def test_a_joined_process_that_has_just_ended_need_not_be_killed() -> None:
    connected, child = socket.socketpair()
    no_process = 1 << 22  # more than any process id
    with child:  # a child of the process has its channel open
        Joined(no_process, torchrun.inherited_channel(connected.detach())).kill()
