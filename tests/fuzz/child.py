"""One call in a forked child with limits on processor time and memory, and whether its ending is good enough."""

from __future__ import annotations

import errno
import faulthandler
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from seko_export.errors import ExportError
from seko_runtime.errors import SekoRuntimeError

WALL_SECONDS = 30.0  # of a child that waits for something that never comes; wide, as the machine may be busy
MAX_MESSAGE = 4096  # letters
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Limits:
    """What one call may take: seconds of processor time, of all threads, and bytes beyond what the parent holds."""

    cpu_s: float = 2.0
    memory_bytes: int = 512 << 20


@dataclass(frozen=True)
class Outcome:
    """How a call ended: whether in success or in an error of ours, in what, and what is to be told of it."""

    caught: bool
    ending: str
    detail: str = ""


def run_in_child(
    work: Callable[[], object], codes: tuple[int, ...], folder: Path, limits: Limits | None = None
) -> Outcome:
    """Run ``work`` in a child, which may end in errors of ours with these exit codes; its stderr goes to the folder."""
    limits, log = limits or Limits(), folder / "log"
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_judged_in_child, args=(work, codes, limits, log, sender))
    child.start()
    sender.close()
    try:
        outcome = receiver.recv() if receiver.poll(WALL_SECONDS) else None
    except EOFError:
        outcome = None
    hung = outcome is None and child.exitcode is None and not _ended(child)
    if hung:
        child.kill()
    child.join()
    if outcome is not None:
        return outcome  # type: ignore[no-any-return]
    if hung:
        ending = f"waited for more than {WALL_SECONDS:.0f} s"
    elif child.exitcode == -signal.SIGPROF:
        ending = f"took more than {limits.cpu_s} s of processor time"
    elif child.exitcode is not None and child.exitcode < 0:
        ending = f"died by {signal.Signals(-child.exitcode).name}"
    else:
        ending = f"exited with {child.exitcode} and no word"
    return Outcome(False, ending, log.read_text(errors="replace")[-3000:] if log.exists() else "")


def _ended(child: multiprocessing.process.BaseProcess) -> bool:
    """Whether a child that closed its pipe without a word comes to its end."""
    child.join(1.0)
    return child.exitcode is not None


def _judged_in_child(
    work: Callable[[], object], codes: tuple[int, ...], limits: Limits, log: Path, sender: Connection
) -> None:
    for descriptor, file in ((0, os.devnull), (1, os.devnull), (2, log)):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), descriptor)
    faulthandler.enable(2)
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (int(held.split()[1]) * 1024 + limits.memory_bytes,) * 2)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    try:
        outcome = Outcome(True, str(work() or "ok"))
    except BaseException as error:  # a panic of native code comes as one, and is nobody's interrupt here
        fault = _fault(error, codes)
        detail = str(error)[:400] if fault is None else fault + _traceback(error)
        outcome = Outcome(fault is None, type(error).__name__, detail)
    signal.setitimer(signal.ITIMER_PROF, 0)
    sender.send(outcome)
    os._exit(0)


def _fault(error: BaseException, codes: tuple[int, ...]) -> str | None:
    """Return why an error is not good enough for the end of a case; None if it is."""
    message = str(error)
    if not isinstance(error, SekoRuntimeError | ExportError):
        return "no error of ours: "
    if error.exit_code not in codes:
        return f"exit code {error.exit_code}, expected one of {codes}: "
    if not 0 < len(message) <= MAX_MESSAGE:
        return f"a message of {len(message)} letters: "
    if not message.replace("\n", " ").isprintable():
        return "a message with control characters: "
    causes: list[BaseException | None] = [error]
    for cause in causes:  # grows
        if isinstance(cause, MemoryError) or getattr(cause, "errno", 0) == errno.ENOMEM:
            return "the memory limit stopped it, and not a check: "
        if cause is not None:
            causes += [other for other in (cause.__cause__, cause.__context__) if other not in causes]
    return None


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-3000:]
