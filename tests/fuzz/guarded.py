"""One call in a forked child with limits on processor time and memory, and how it ended. Knows no case."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

CPU_SECONDS = 2.0
MEMORY_BYTES = 512 << 20
WALL_SECONDS = 30.0  # of a child that waits for something that never comes; wide, as the machine may be busy
_CHILD_FAULT = 70


@dataclass(frozen=True)
class Limits:
    """What one call may take.

    Parameters
    ----------
    cpu_s : float
        Seconds of processor time, user and system, of all threads.
    memory_bytes : int
        Bytes of private memory beyond what the parent holds.
    """

    cpu_s: float = CPU_SECONDS
    memory_bytes: int = MEMORY_BYTES


@dataclass
class Outcome:
    """How a call ended.

    Parameters
    ----------
    caught : bool
        Whether it succeeded or ended in an error of ours.
    ending : str
        ``ok``, the error's class, or what killed it.
    detail : str
        The error's message, or the end of a traceback.
    notes : str
        What the call said of itself before it did what it is about.
    """

    caught: bool
    ending: str
    detail: str = ""
    notes: str = ""


class NotGoodEnoughError(Exception):
    """Raised by a judge: an ending that looks like one of ours and is not good enough."""


def guarded(
    work: Callable[[list[str]], str], judge: Callable[[Exception], str | None], limits: Limits, log: Path
) -> Outcome:
    """Run ``work`` in a child.

    Parameters
    ----------
    work : callable
        Takes a list to append notes to, and returns its ending.
    judge : callable
        Given what ``work`` raised, returns the ending if the error is one of ours, else None.
    limits : Limits
        Of the child.
    log : Path
        Where the child's stderr goes.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _run_child(work, judge, limits, log, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        output, hung = _read_until(pipe.fileno(), time.monotonic() + WALL_SECONDS)
    if hung:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if hung:
        return Outcome(False, f"waited for more than {WALL_SECONDS:.0f} s", *_partly(output, log))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ending = f"died by {signal.Signals(number).name}"
        if number == signal.SIGPROF:
            ending = f"took more than {limits.cpu_s} s of processor time"
        return Outcome(False, ending, *_partly(output, log))
    try:
        return Outcome(**json.loads(output.split(b"\n")[1]))
    except (ValueError, IndexError, TypeError):
        return Outcome(False, f"exited with {os.WEXITSTATUS(status)} and no word", *_partly(output, log))


def _run_child(
    work: Callable[[list[str]], str],
    judge: Callable[[Exception], str | None],
    limits: Limits,
    log: Path,
    writer: int,
) -> None:
    """Never returns."""
    try:
        stderr = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(stderr, 2)
        faulthandler.enable()
        before = _status("VmData")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (before + limits.memory_bytes,) * 2)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        notes = _TellingList(writer)
        outcome = _judged(work, judge, notes)
        signal.setitimer(signal.ITIMER_PROF, 0)
        os.write(writer, b"\n" + json.dumps(asdict(outcome)).encode() + b"\n")
        sys.stderr.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(_CHILD_FAULT)


class _TellingList(list[str]):
    """Notes that reach the parent at once, so that it knows them if the child is killed."""

    def __init__(self, writer: int) -> None:
        super().__init__()
        self._writer = writer

    def append(self, note: str) -> None:
        super().append(note)
        os.write(self._writer, note[:200].replace("\n", " ").encode("utf-8", "backslashreplace") + b"; ")


def _judged(
    work: Callable[[list[str]], str], judge: Callable[[Exception], str | None], notes: list[str]
) -> Outcome:
    prefix = ""
    try:
        return Outcome(True, work(notes), "", _joined(notes))
    except Exception as error:
        try:
            ending = judge(error)
        except NotGoodEnoughError as refusal:
            ending, prefix = None, f"{refusal}: "
        if ending is not None:
            return Outcome(True, ending, str(error)[:400], _joined(notes))
        return Outcome(
            False,
            type(error).__name__,
            prefix + "".join(traceback.format_exception(error))[-3000:],
            _joined(notes),
        )
    except BaseException as error:  # a panic of native code comes as one, and is nobody's interrupt here
        return Outcome(False, type(error).__name__, traceback.format_exc()[-3000:], _joined(notes))


def _joined(notes: list[str]) -> str:
    return "; ".join(note[:200] for note in notes)


def _read_until(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """All that comes before the pipe ends, and whether the deadline came first."""
    parts = []
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([descriptor], [], [], left)[0]:
            continue
        part = os.read(descriptor, 1 << 16)
        if not part:
            return b"".join(parts), False
        parts.append(part)
    return b"".join(parts), True


def _partly(output: bytes, log: Path) -> tuple[str, str]:
    """What is known of a child that did not come to its end: the end of its stderr, and its notes."""
    stderr = log.read_text(errors="replace")[-3000:] if log.exists() else ""
    return stderr, output.split(b"\n")[0].decode(errors="replace")


def _status(key: str) -> int:
    """Bytes that the kernel counts for this process under a name."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
