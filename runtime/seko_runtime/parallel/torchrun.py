"""Ranks (one process for each GPU) whose processes torchrun started: the process of rank 0 is the caller, and the
processes of the other ranks connect to rank 0.

All processes meet at a Unix socket in a private folder. Each process derives the folder's name from torchrun's
environment variables.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from select import POLLIN, POLLRDHUP, poll

from seko_runtime.errors import EnvironmentLacksError, RankLostError, UsageError
from seko_runtime.parallel.channel import Channel, inherited_channel, peer_of

_NAMES = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
_LOOK_S = 0.05
_HELLO = struct.Struct("!4sI")  # first message of a process on the socket: a mark, and its rank
_MARK = b"seko"
_met: set[Path] = set()  # meeting folders in which this process was rank 0


@dataclass(frozen=True)
class Joined:
    """The process of another rank, which torchrun started and waits for, with the interface of `subprocess.Popen`.

    The process counts as alive while the other end of ``channel`` is open; ``pid`` is the id of the living process.
    """

    pid: int
    channel: Channel
    returncode = None

    def wait(self, timeout: float) -> None:
        """Wait until the process has closed its end of the channel; subprocess.TimeoutExpired after ``timeout``
        seconds."""
        waiting = poll()
        waiting.register(self.channel.connection.fileno(), POLLRDHUP)
        if not waiting.poll(timeout * 1000):
            raise subprocess.TimeoutExpired("rank", timeout)

    def kill(self) -> None:
        """Kill the process of the rank, unless it has ended."""
        try:
            self.wait(0)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):  # it ended just now, or its child has the channel open
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Meeting:
    """The meeting place of the processes of a torchrun job: a private folder that rank 0 makes."""

    rank: int
    ranks: int
    folder: Path

    def gather(self, seconds: float) -> list[Joined]:
        """Return the processes of the other ranks in order; RankLostError if a process is late, UsageError at a second
        call."""
        if self.folder in _met:
            raise UsageError("under torchrun an artifact of several ranks is opened once")
        with suppress(FileNotFoundError), _private(self.folder):  # left by a killed job of the same name
            shutil.rmtree(self.folder)
        self.folder.mkdir(0o700)
        _met.add(self.folder)
        deadline, joined = time.monotonic() + seconds, dict[int, Joined]()
        with ExitStack() as stack:
            address = stack.enter_context(_private(self.folder))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen(self.ranks)
            calls = poll()
            calls.register(listener, POLLIN)
            # By descriptor: connections that have not sent their rank yet, with the id of the process at the other
            # end.
            silent: dict[int, tuple[socket.socket, int]] = {}
            while missing := [rank for rank in range(1, self.ranks) if rank not in joined]:
                left = deadline - time.monotonic()
                ready = calls.poll(left * 1000) if left > 0 else []
                if not ready:
                    raise self._late(missing[0], seconds)
                for descriptor, _ in ready:
                    if descriptor == listener.fileno():
                        newcomer = stack.enter_context(listener.accept()[0])
                        silent[newcomer.fileno()] = (newcomer, _peer(newcomer))
                        calls.register(newcomer, POLLIN)
                        continue
                    calls.unregister(descriptor)
                    member, process = silent.pop(descriptor)
                    rank = _said_rank(member)
                    if rank in missing and rank not in joined:
                        joined[rank] = Joined(process, inherited_channel(member.detach()))
                    else:  # the process has ended, is another program, or repeats the rank of another process
                        member.close()
        return [joined[rank] for rank in range(1, self.ranks)]

    def connect(self, seconds: float) -> Channel:
        """Return the channel to rank 0's process; RankLostError if that process is late."""
        deadline = time.monotonic() + seconds
        while True:
            with (
                socket.socket(socket.AF_UNIX) as own,
                suppress(FileNotFoundError, ConnectionRefusedError),  # rank 0 has not opened the socket yet
                _private(self.folder) as address,
            ):
                own.connect(address)
                _peer(own)
                own.sendall(_HELLO.pack(_MARK, self.rank))
                return inherited_channel(own.detach())
            if time.monotonic() > deadline:
                raise self._late(0, seconds)
            time.sleep(_LOOK_S)

    def _late(self, rank: int, seconds: float) -> RankLostError:
        return RankLostError(f"rank {rank} of {self.ranks} did not open the artifact in {seconds:.0f} s")


def meeting_of_torchrun(ranks: int) -> Meeting | None:
    """Return the meeting place if torchrun started this process, otherwise None.

    A UsageError is raised if torchrun started another number of processes, or some on other machines.
    """
    if not all(name in os.environ for name in _NAMES):
        return None
    rank, _, world, local = (_number(name) for name in _NAMES[1:])
    if not world == local == ranks:
        raise UsageError(
            f"torchrun started {world} processes, {local} on this machine; this artifact has {ranks} ranks on one "
            f"machine: give --nproc-per-node {ranks}"
        )
    run_id = "\0".join(os.environ.get(name, "") for name in _OF_RUN)
    name = f"seko-ranks-{os.getuid()}-{hashlib.sha256(run_id.encode()).hexdigest()[:24]}"
    return Meeting(rank, ranks, Path(tempfile.gettempdir(), name))


def _number(name: str) -> int:
    """Return the number in one of torchrun's environment variables; UsageError if the variable holds no number."""
    text = os.environ[name]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(
            f"the environment variable {name} is {text[:40]!r}, expected a number as torchrun sets it"
        )
    return int(text)


def _said_rank(member: socket.socket) -> int | None:
    """Read the rank that a connected process sends; None if the process sends something else."""
    try:
        hello = member.recv(_HELLO.size)  # read no more than this: the following bytes belong to the channel
    except OSError:
        return None
    mark, rank = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0)
    return int(rank) if mark == _MARK else None


@contextmanager
def _private(folder: Path) -> Iterator[str]:
    """Yield a short address (107 bytes at most) of a folder's socket; EnvironmentLacksError if other users may use
    the folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as fault:
        raise EnvironmentLacksError(f"{folder}: {fault.strerror}; remove it") from fault
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise EnvironmentLacksError(f"others than this user may use {folder}; remove it")
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


def _peer(connected: socket.socket) -> int:
    """Return the id of the process at the other end of a socket; RankLostError if it belongs to another user."""
    process, user = peer_of(connected)
    if user != os.getuid() or process <= 0:
        raise RankLostError(f"process {process} of user {user} is no rank: expected user {os.getuid()}")
    return process
