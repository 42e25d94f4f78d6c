"""The caller's side of a rank group: starts a process for each rank, sends commands, watches, and ends all of them.

A command goes to the ranks with a number, and each answers with that number. A thread for each rank reads its answers
and the beats that every process sends twice a second; another thread watches for processes that hang, also in the midst
of an answer. If a process ends, hangs, or fails at a command where others do not, the whole group is killed, and every
call from then on raises the same error.
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
from seko_runtime.parallel.torchrun import Joined, Meeting

SILENT_S = 4.0  # without a beat, after which it is looked whether a process hangs
APART_S = 4.0  # between the first rank that failed at a command and the last that answers it
ENDING_S = 5.0  # for a group to end by itself, before it is killed
_LOOK_S = 0.2
_TOLD_BYTES = 4096  # of a process's last words


@dataclass
class Answers:
    """The answers of the ranks to one command.

    Parameters
    ----------
    ranks : frozenset of int
        Those that were asked.
    patient : bool
        Whether they may do nothing for a while, as processes that load libraries do.
    results, faults : dict
        By rank: the answer; class and message of an error.
    first_fault_s : float or None
        When the first rank failed.
    """

    ranks: frozenset[int]
    patient: bool
    results: dict[int, Any] = field(default_factory=dict)
    faults: dict[int, tuple[str, str]] = field(default_factory=dict)
    first_fault_s: float | None = None

    @property
    def missing(self) -> frozenset[int]:
        """The ranks that have not answered."""
        return self.ranks - {*self.results, *self.faults}


class RankGroup:
    """The processes of one open artifact.

    Parameters
    ----------
    module : str
        The module that each process runs: it calls `worker.serve`.
    ranks : int
        How many.
    facts : mapping
        What each needs to begin, as JSON can hold it.
    seconds : float
        How long they may take to begin.
    meeting : Meeting, optional
        Where the processes behind rank 0's connect, which torchrun started; default: all are started here.

    Raises
    ------
    SekoRuntimeError
        What all processes raised when they began, or RankLostError.
    """

    def __init__(
        self,
        module: str,
        ranks: int,
        facts: Mapping[str, Any],
        *,
        seconds: float,
        meeting: Meeting | None = None,
    ) -> None:
        self.ranks = ranks
        self._lock = threading.Condition()
        self._asked: dict[int, Answers] = {}
        self._number = 0
        self._over: SekoRuntimeError | None = None
        folder = Path(tempfile.mkdtemp(prefix="seko-ranks-")) if meeting is None else meeting.folder
        self._folder = folder
        self._words = [tempfile.TemporaryFile() for _ in range(ranks)]  # noqa: SIM115 - closed by `_clear`
        self._started: list[subprocess.Popen[bytes]] = []
        self._members: list[subprocess.Popen[bytes] | Joined] = []
        self._channels: list[Channel] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()  # set with `_over`
        self._cleared = weakref.finalize(
            self, _clear, os.getpid(), self._started, self._channels, self._words, folder
        )
        try:
            for rank in range(ranks if meeting is None else 1):
                self._start(module, rank)
            if meeting is not None:
                joined = meeting.gather(seconds)
                self._members += joined
                self._channels += [member.channel for member in joined]
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
        """Their process ids, by rank."""
        return tuple(member.pid for member in self._members)

    @property
    def over(self) -> bool:
        """Whether the group has ended."""
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
        """Send a command to ranks and wait for their answers.

        Parameters
        ----------
        command : str
            What the processes' handler knows.
        facts : mapping, optional
            Its arguments, as `Channel.send` takes them.
        own : sequence of mapping, optional
            Further arguments for each rank.
        ranks : sequence of int, optional
            Those that it is for; default: all.
        seconds : float
            How long the answers may take.
        patient : bool
            Whether a process may do nothing for a while, as one that loads libraries or waits for a disk does. One
            that is stopped is lost in any case.

        Raises
        ------
        UsageError
            If an argument cannot be sent; no rank has received anything then.
        SekoRuntimeError
            What all asked ranks raised; the group goes on.
        RankLostError
            If a rank died, hung, or failed alone; the group has ended.
        """
        self._check()
        asked = frozenset(range(self.ranks) if ranks is None else ranks)
        shared = pack(facts or {})
        arguments = {
            rank: shared.with_more(own[rank] if own else {}, within="facts") for rank in sorted(asked)
        }
        with self._lock:
            self._check()
            self._number += 1
            number = self._number
        try:
            with self._lock:
                answers = self._asked[number] = Answers(asked, patient)
            for rank, packed in arguments.items():
                head = {"command": command, "number": number, "rank": rank}
                with contextlib.suppress(OSError):  # whoever is gone is told of by the watcher
                    self._channels[rank].send(Packed({**head, **packed.parts}, packed.arrays))
            self._wait(answers, command, seconds)
        except SekoRuntimeError:
            raise
        except BaseException:  # Ctrl-C: where the processes stand is not known any more
            self._lose(RankLostError(f"{command!r} was interrupted, which ended the artifact's processes"))
            raise
        finally:
            self._asked.pop(number, None) if self._over is None else self._asked.clear()
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
        """End the processes: request it, and kill those that do not end."""
        with self._lock:
            first = self._over is None
            if first:
                self._over = RankLostError("the artifact is closed; open it again with open_artifact()")
                self._ended.set()
                self._lock.notify_all()
        if first:
            for channel in self._channels:
                # Another thread may be in the midst of a command that a stopped process does not take.
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
        paths = [path for path in sys.path if path]  # theirs are the caller's, as they stand now
        # A group of its own: Ctrl-C of a terminal reaches the caller alone, who ends the others.
        with other:
            self._started.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(other.fileno())],
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._words[rank],
                    # What its libraries leave behind if it is killed goes with the group's folder.
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(self._folder)},
                    process_group=0,
                )
            )
        self._members.append(self._started[-1])

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
            raise self._over.with_traceback(None)  # else each raise would keep its traceback in the error

    def _lose(self, error: SekoRuntimeError) -> None:
        """End the group with an error, which every call from now on raises."""
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
        """End the group if a process hangs; return False once the group has ended."""
        now = time.monotonic()
        with self._lock:
            if now - self._looked > 1 + _LOOK_S:  # this process itself stood still
                self._heard = [heard + now - self._looked for heard in self._heard]
            self._looked = now
            quiet = [rank for rank, heard in enumerate(self._heard) if now - heard > SILENT_S]
            open_calls = [answers for answers in self._asked.values() if answers.missing]
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
        """Return the rank that hangs, of those that were silent; None if they may only wait or work.

        A compiled engine holds the interpreter, so a process is silent while one runs or waits for another rank.
        One hangs if it is stopped, or if none of those that are ``due``, that is to answer a call that is not patient,
        has used the processor meanwhile.
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
            answers = self._asked.get(message.get("number", 0))
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

    def _is_gone(self, rank: int) -> None:
        """End the group, as a process has closed its channel."""
        if self._over is None:
            self._lose(RankLostError(self._how_it_ended(rank)))

    def _how_it_ended(self, rank: int) -> str:
        process = self._members[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        code = process.returncode
        how = "closed its channel" if code is None else f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by signal {-code}"
        words = _last_words(self._words[rank])
        saying = f", saying {words!r}" if words else ""
        return (
            f"rank {rank} of {self.ranks} (process {process.pid}) {how}{saying}; the others were ended too: open the "
            "artifact again"
        )


def _watch(group: weakref.ref[RankGroup], ended: threading.Event) -> None:
    """Look at a group until it has ended, or nothing refers to it any more."""
    while (alive := group()) is not None and alive._look():
        del alive
        ended.wait(_LOOK_S)


def _listen(group: weakref.ref[RankGroup], rank: int, channel: Channel) -> None:
    """Take what a process sends until the group has ended, or nothing refers to it any more."""
    while (alive := group()) is not None and not alive.over:
        del alive
        message: Mapping[str, Any] | None
        try:
            if not channel.connection.poll(_LOOK_S):
                continue
            message = channel.receive()
        except (EOFError, OSError, ValueError):
            message = None
        if (alive := group()) is None:
            return
        if message is None:
            alive._is_gone(rank)
            return
        alive._take(rank, message)


def _clear(
    owner: int,
    processes: list[subprocess.Popen[bytes]],
    channels: list[Channel],
    words: Sequence[IO[bytes]],
    meeting: Path,
) -> None:
    """End what is left of a group and remove its folder; in a forked child, whose group it is not, do nothing."""
    if os.getpid() != owner:
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    for channel in channels:
        channel.close()
    for file in words:
        file.close()
    shutil.rmtree(meeting, ignore_errors=True)


def _last_words(file: IO[bytes]) -> str:
    """Return the last line that a process wrote to stderr."""
    size = os.fstat(file.fileno()).st_size
    text = os.pread(file.fileno(), _TOLD_BYTES, max(0, size - _TOLD_BYTES)).decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _error(kind: str, message: str) -> SekoRuntimeError:
    """Return an error of the runtime's by the name of its class."""
    error_class = getattr(errors, kind, None)
    known = isinstance(error_class, type) and issubclass(error_class, SekoRuntimeError)
    return error_class(message) if known else RankLostError(message)  # type: ignore[misc]
