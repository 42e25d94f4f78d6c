"""Ranks whose processes torchrun started: that of rank 0 is the caller, and the others connect to it.

They meet at a Unix socket in a private folder, whose name all derive from torchrun's environment variables.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from select import POLLRDHUP, poll

from seko_runtime.errors import HostFaultError, RankLostError, UsageError
from seko_runtime.parallel.channel import Channel, inherited_channel

_NAMES = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
_LOOK_S = 0.05
_met: set[Path] = set()  # folders in which this process was rank 0


@dataclass(frozen=True)
class Joined:
    """Another rank's process, which torchrun started and waits for; used as `subprocess.Popen` is.

    While the other end of ``channel`` is open the process lives, and ``pid`` is its own.
    """

    pid: int
    channel: Channel
    returncode = None

    def wait(self, timeout: float) -> None:
        """Wait until its end of the channel is closed; subprocess.TimeoutExpired after ``timeout`` seconds."""
        waiting = poll()
        waiting.register(self.channel.connection.fileno(), POLLRDHUP)
        if not waiting.poll(timeout * 1000):
            raise subprocess.TimeoutExpired("rank", timeout)

    def kill(self) -> None:
        """End it by a signal, unless it has ended."""
        try:
            self.wait(0)
        except subprocess.TimeoutExpired:
            os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Meeting:
    """Where process ``rank`` of ``ranks`` of a run finds the others: a private folder, which rank 0 makes."""

    rank: int
    ranks: int
    folder: Path

    def gather(self, seconds: float) -> list[Joined]:
        """Return the other ranks' processes in order; RankLostError if one is late, UsageError at a second call."""
        if self.folder in _met:
            raise UsageError("under torchrun an artifact of several ranks is opened once")
        with suppress(FileNotFoundError), _private(self.folder):  # of a run of this name that was killed
            shutil.rmtree(self.folder)
        self.folder.mkdir(0o700)
        _met.add(self.folder)
        deadline, found = time.monotonic() + seconds, dict[int, Joined]()
        with _private(self.folder) as address, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.ranks)
            while missing := [rank for rank in range(1, self.ranks) if rank not in found]:
                try:
                    listener.settimeout(max(_LOOK_S, deadline - time.monotonic()))
                    other, _ = listener.accept()
                except TimeoutError:
                    raise self._late(missing[0], seconds) from None
                with other:
                    process, channel = _peer(other), inherited_channel(other.detach())
                with suppress(EOFError, OSError):  # it has ended already
                    found[int(channel.receive()["rank"])] = Joined(process, channel)
        return [found[rank] for rank in range(1, self.ranks)]

    def connect(self, seconds: float) -> Channel:
        """Return the channel to rank 0; RankLostError if that is late."""
        deadline = time.monotonic() + seconds
        while True:
            with (
                socket.socket(socket.AF_UNIX) as own,
                suppress(FileNotFoundError, ConnectionRefusedError),  # rank 0 is not there yet
                _private(self.folder) as address,
            ):
                own.connect(address)
                _peer(own)
                channel = inherited_channel(own.detach())
                channel.send({"rank": self.rank})
                return channel
            if time.monotonic() > deadline:
                raise self._late(0, seconds)
            time.sleep(_LOOK_S)

    def _late(self, rank: int, seconds: float) -> RankLostError:
        return RankLostError(f"rank {rank} of {self.ranks} did not open the artifact in {seconds:.0f} s")


def meeting_of_torchrun(ranks: int) -> Meeting | None:
    """Return where this process meets the others if torchrun started it, else None.

    UsageError if torchrun started another number of processes, or some on other machines.
    """
    if not all(name in os.environ for name in _NAMES):
        return None
    rank, _, world, local = (int(os.environ[name]) for name in _NAMES[1:])
    if not world == local == ranks:
        raise UsageError(
            f"torchrun started {world} processes, {local} on this machine; this artifact has {ranks} ranks on one "
            f"machine: give --nproc-per-node {ranks}"
        )
    told = "\0".join(os.environ.get(name, "") for name in _OF_RUN)
    name = f"seko-ranks-{os.getuid()}-{hashlib.sha256(told.encode()).hexdigest()[:24]}"
    return Meeting(rank, ranks, Path(tempfile.gettempdir(), name))


@contextmanager
def _private(folder: Path) -> Iterator[str]:
    """Give a short address (107 bytes at most) of the socket in a folder; HostFaultError if other users may use it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as fault:
        raise HostFaultError(f"{folder}: {fault.strerror}; remove it") from fault
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise HostFaultError(f"others than this user may use {folder}; remove it")
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


def _peer(connected: socket.socket) -> int:
    """Return the id of the process at the other end; RankLostError if it is another user's."""
    packed = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    process, user, _ = struct.unpack("3i", packed)
    if user != os.getuid() or process <= 0:
        raise RankLostError(f"process {process} of user {user} is no rank: expected user {os.getuid()}")
    return int(process)
