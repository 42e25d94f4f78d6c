"""The caller's side of a rank group. The caller starts a process for each rank, sends commands to the processes,
watches them, and ends them.

Each command to the ranks has a number, which the ranks' answers repeat. A thread for each rank reads that rank's
answers, and the heartbeats that every process sends twice a second. Another thread watches for processes that hang,
also in the middle of an answer. If a process ends, hangs, or fails at a command at which other processes do not fail,
the whole group is killed. Every later command to the ranks then raises the error for which the group was killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from seko_runtime import errors
from seko_runtime.errors import RankLostError, SekoRuntimeError
from seko_runtime.parallel.channel import Channel, Packed, channel_pair, pack
from seko_runtime.parallel.process_state import is_stopped, used_ticks

SILENT_S = 4.0  # seconds without a heartbeat, after which a process is checked for hanging
APART_S = 4.0  # most seconds between the first rank's failure at a command and the last rank's answer
ENDING_S = 5.0  # seconds for a group to end by itself before it is killed
_LOOK_S = 0.2
_STDERR_BYTES = 4096  # most bytes that are read of a process's stderr


@dataclass
class Answers:
    """The answers of the ranks to one command.

    Parameters
    ----------
    ranks : frozenset of int
        The ranks that got the command.
    patient : bool
        Whether processes may be idle for a while, for example while they load libraries.
    results, faults : dict
        ``results`` has the answer of each rank that has answered, and ``faults`` the class and message of the error of
        each rank that has failed.
    first_fault_s : float or None
        Time at which the first rank failed.
    """

    ranks: frozenset[int]
    patient: bool
    results: dict[int, Any] = field(default_factory=dict)
    faults: dict[int, tuple[str, str]] = field(default_factory=dict)
    first_fault_s: float | None = None

    @property
    def missing(self) -> frozenset[int]:
        """Numbers of the ranks that have not answered yet."""
        return self.ranks - {*self.results, *self.faults}


class RankGroup:
    """The processes of one open artifact: one process for each rank (GPU).

    Parameters
    ----------
    module : str
        Name of the module that each process runs, which calls `worker.serve`.
    ranks : int
        Number of ranks, each with a process of its own.
    facts : mapping
        Arguments of the first command to each process, as a JSON value.
    seconds : float
        Largest number of seconds that the processes may take to begin.

    Raises
    ------
    SekoRuntimeError
        The error that the processes raised when they began, if all of them raised the same error. A RankLostError, if a
        process did not begin for another reason.
    """

    def __init__(self, module: str, ranks: int, facts: Mapping[str, Any], *, seconds: float) -> None:
        self.ranks = ranks
        self._lock = threading.Condition()
        self._open_calls: dict[int, Answers] = {}  # by the command's number
        self._number = 0
        self._over: SekoRuntimeError | None = None  # the error that later calls raise
        folder = self._folder = Path(tempfile.mkdtemp(prefix="seko-ranks-"))
        self._stderr_files = [tempfile.TemporaryFile() for _ in range(ranks)]  # noqa: SIM115 - closed by `_clear`
        self._members: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()  # set together with `_over`
        self._cleared = weakref.finalize(
            self, _clear, os.getpid(), self._members, self._channels, self._stderr_files, folder
        )
        try:
            for rank in range(ranks):
                self._start(module, rank)
            self._heard = [time.monotonic()] * ranks
            self._ticks = [0] * ranks
            self._looked = time.monotonic()
            own = weakref.ref(self)
            self._threads.append(threading.Thread(target=_watch, args=(own, self._ended), daemon=True))
            for rank, channel in enumerate(self._channels):
                self._threads.append(threading.Thread(target=_listen, args=(own, rank, channel), daemon=True))
            for thread in self._threads:
                thread.start()
            begun = dict(facts) | {"ranks": ranks, "meeting": str(folder / "store")}
            self.begun = self.call("begin", begun, seconds=seconds, patient=True)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the ranks' processes, in the order of the ranks."""
        return tuple(member.pid for member in self._members)

    @property
    def over(self) -> bool:
        """Whether the group of processes has ended."""
        return self._over is not None

    def call(
        self,
        command: str,
        facts: Mapping[str, Any] | None = None,
        *,
        own: Sequence[Mapping[str, Any]] | None = None,
        ranks: Sequence[int] | None = None,
        seconds: float,
        patient: bool = False,
    ) -> Answers:
        """Send a command to some ranks and wait for their answers.

        Parameters
        ----------
        command : str
            Name of a command that the processes' handler knows.
        facts : mapping, optional
            Arguments of the command, as `Channel.send` takes them.
        own : sequence of mapping, optional
            Further arguments of the command, different for each rank.
        ranks : sequence of int, optional
            Numbers of the ranks that get the command; default: all ranks.
        seconds : float
            Largest number of seconds that the answers may take.
        patient : bool
            Whether a process may be idle for a while, for example while it loads libraries or waits for a disk. A
            stopped process is lost in any case.

        Raises
        ------
        UsageError
            If an argument cannot be sent; no rank has received the command.
        SekoRuntimeError
            The error that the ranks raised, if every rank that got the command raised the same error. The group stays
            usable.
        RankLostError
            If a rank died, hung, or failed alone; the group has ended.
        """
        self._check()
        targets = frozenset(range(self.ranks) if ranks is None else ranks)
        shared = pack(facts or {})
        arguments = {
            rank: shared.with_more(own[rank] if own else {}, within="facts") for rank in sorted(targets)
        }
        with self._lock:
            self._check()
            self._number += 1
            number = self._number
        try:
            with self._lock:
                answers = self._open_calls[number] = Answers(targets, patient)
            for rank, packed in arguments.items():
                head = {"command": command, "number": number, "rank": rank}
                with contextlib.suppress(OSError):  # the watching thread reports a process that is gone
                    self._channels[rank].send(Packed({**head, **packed.parts}, packed.arrays))
            self._wait(answers, command, seconds)
        except SekoRuntimeError:
            raise
        except BaseException:  # Ctrl-C: the state of the processes is not known any more
            self._lose(RankLostError(f"{command!r} was interrupted, which ended the artifact's processes"))
            raise
        finally:
            with self._lock:
                self._open_calls.pop(number, None)
        if not answers.faults:
            return answers
        kinds = {kind for kind, _ in answers.faults.values()}
        rank, (kind, message) = min(answers.faults.items())
        if len(kinds) == 1 and not answers.results:
            raise _error(kind, message)
        self._lose(RankLostError(f"rank {rank} of {self.ranks} failed where others did not: {message}"))
        self._check()
        return answers

    def close(self) -> None:
        """Ask the processes to end, and kill those that do not end."""
        with self._lock:
            first = self._over is None
            if first:
                self._over = RankLostError("the artifact is closed; open it again with open_artifact()")
                self._ended.set()
                self._lock.notify_all()
        if first:
            for channel in self._channels:
                # Another thread may be sending a command that a stopped process does not receive.
                with contextlib.suppress(OSError):
                    channel.send_at_once({"command": "end", "number": 0, "facts": {}})
            deadline = time.monotonic() + ENDING_S
            for process in self._members:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(1.0)
        self._cleared()

    def _start(self, module: str, rank: int) -> None:
        channel, other = channel_pair()
        self._channels.append(channel)
        # the processes import modules from the caller's current path
        paths = [path for path in sys.path if path]
        # Each process gets a process group of its own, so that a terminal's Ctrl-C reaches only the caller, which
        # ends the others.
        with other:
            self._members.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(other.fileno())],
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr_files[rank],
                    # Temporary files that a killed process leaves are removed with the group's folder.
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(self._folder)},
                    process_group=0,
                )
            )

    def _wait(self, answers: Answers, command: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._lock:
            while answers.missing:
                self._check()
                now = time.monotonic()
                late = sorted(answers.missing)
                if now > deadline:
                    self._lose(
                        RankLostError(
                            f"rank {late[0]} of {self.ranks} did not answer {command!r} in {seconds:.0f} s"
                        )
                    )
                elif answers.first_fault_s is not None and now > answers.first_fault_s + APART_S:
                    rank, (_, message) = min(answers.faults.items())
                    self._lose(
                        RankLostError(
                            f"rank {rank} of {self.ranks} failed, and rank {late[0]} waits for it: {message}"
                        )
                    )
                else:
                    self._lock.wait(_LOOK_S)
            self._check()

    def _check(self) -> None:
        if self._over is not None:
            # the traceback is removed, because each further raise would extend it
            raise self._over.with_traceback(None)

    def _lose(self, error: SekoRuntimeError) -> None:
        """End the group of processes because of an error, which every later call raises."""
        with self._lock:
            if self._over is None:
                self._over = error
                self._ended.set()
            for process in self._members:
                process.kill()
            for process in self._members:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
            self._lock.notify_all()

    def _look(self) -> bool:
        """End the group of processes if one of them hangs; return False once the group has ended."""
        now = time.monotonic()
        with self._lock:
            # this process itself was stopped, so missing heartbeats mean nothing
            if now - self._looked > 1 + _LOOK_S:
                self._heard = [heard + now - self._looked for heard in self._heard]
            self._looked = now
            quiet = [rank for rank, heard in enumerate(self._heard) if now - heard > SILENT_S]
            open_calls = [answers for answers in self._open_calls.values() if answers.missing]
            due = {rank for answers in open_calls if not answers.patient for rank in answers.missing}
        if quiet and open_calls and self._over is None:
            hung = self._hung(quiet, due)
            if hung is not None:
                self._lose(
                    RankLostError(
                        f"rank {hung} of {self.ranks} (process {self._members[hung].pid}) hangs: for {SILENT_S:.0f} s "
                        "it was silent and did not run; open the artifact again"
                    )
                )
        return self._over is None

    def _hung(self, quiet: Sequence[int], due: set[int]) -> int | None:
        """Return the number of a rank that hangs, among ranks without recent heartbeats; None if all of them may be
        working or waiting.

        A compiled engine holds Python's interpreter lock, so a process sends no heartbeats while an engine runs or
        waits for another rank. A process counts as hanging if it is stopped, or if none of the ranks in ``due``,
        which have a call to answer that is not patient, has used processor time meanwhile.
        """
        stopped = [rank for rank in quiet if is_stopped(self._members[rank].pid)]
        if stopped:
            return stopped[0]
        idle = {rank for rank in quiet if used_ticks(self._members[rank].pid) == self._ticks[rank]}
        return min(due) if due and due <= idle else None

    def _take(self, rank: int, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._heard[rank] = time.monotonic()
            self._ticks[rank] = used_ticks(self._members[rank].pid)
            answers = self._open_calls.get(message.get("number", 0))
            if answers is None:
                return
            if "fault" in message:
                kind, text = message["fault"]
                answers.faults[rank] = (str(kind), str(text))
                if answers.first_fault_s is None:
                    answers.first_fault_s = time.monotonic()
            else:
                answers.results[rank] = message["result"]
            self._lock.notify_all()

    def _is_gone(self, rank: int, fault: Exception) -> None:
        """End the group of processes because one of them has closed its channel, or sends what cannot be read."""
        if self._over is None:
            closed = isinstance(fault, EOFError | OSError)
            unread = f"rank {rank} of {self.ranks} sent a message that cannot be read: {fault}"
            self._lose(RankLostError(self._how_it_ended(rank) if closed else unread))

    def _how_it_ended(self, rank: int) -> str:
        process = self._members[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.returncode
        how = "closed its channel" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by signal {-code}"
        line = _last_line(self._stderr_files[rank])
        saying = f", saying {line!r}" if line else ""
        return (
            f"rank {rank} of {self.ranks} (process {process.pid}) {how}{saying}; the others were ended too: open the "
            "artifact again"
        )


def _watch(group: weakref.ref[RankGroup], ended: threading.Event) -> None:
    """Watch a group of processes until it has ended or is garbage-collected."""
    while (alive := group()) is not None and alive._look():
        del alive
        ended.wait(_LOOK_S)


def _listen(group: weakref.ref[RankGroup], rank: int, channel: Channel) -> None:
    """Receive the messages of one process until its group has ended or is garbage-collected."""
    while (alive := group()) is not None and not alive.over:
        del alive
        try:
            if not channel.connection.poll(_LOOK_S):
                continue
            message = channel.receive()
        except Exception as fault:
            if (alive := group()) is not None:
                alive._is_gone(rank, fault)
            return
        if (alive := group()) is None:
            return
        alive._take(rank, message)


def _clear(
    owner: int,
    processes: list[subprocess.Popen[bytes]],
    channels: list[Channel],
    stderr_files: Sequence[IO[bytes]],
    meeting: Path,
) -> None:
    """Kill the remaining processes of a group and remove its folder. Do nothing in a forked child, which does not own
    the group."""
    if os.getpid() != owner:
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    for channel in channels:
        channel.close()
    for file in stderr_files:
        file.close()
    shutil.rmtree(meeting, ignore_errors=True)


def _last_line(file: IO[bytes]) -> str:
    """Return the last line that a process wrote to stderr."""
    size = os.fstat(file.fileno()).st_size
    text = os.pread(file.fileno(), _STDERR_BYTES, max(0, size - _STDERR_BYTES)).decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _error(kind: str, message: str) -> SekoRuntimeError:
    """Return an error of the runtime, made by the name of its class."""
    error_class = getattr(errors, kind, None)
    known = isinstance(error_class, type) and issubclass(error_class, SekoRuntimeError)
    return error_class(message) if known else RankLostError(message)  # type: ignore[misc]
