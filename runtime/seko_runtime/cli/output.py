"""Output of a command. Its report is printed on stdout, as lines of text or as one JSON object, and everything else on
stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO

from seko_runtime.errors import DiskError, SekoRuntimeError


@dataclass(frozen=True)
class Report:
    """The result of a command, as text and as JSON.

    Parameters
    ----------
    result : dict
        The result as a dict, which is printed with ``--json``.
    lines : tuple of str
        The result as lines of text, which are printed without ``--json``.
    error : SekoRuntimeError, optional
        The error with which the command ends after it has printed its report, such as a failed verification.
    aside : bool
        Whether stdout carries the video, so that the lines of text go to stderr.
    """

    result: dict[str, object]
    lines: tuple[str, ...]
    error: SekoRuntimeError | None = None
    aside: bool = False


def note(sentence: str, end: str = "\n") -> None:
    """Print a line to stderr; errors are ignored if stderr is closed or full."""
    if sys.stderr is not None:  # print() would take stdout in its place
        with contextlib.suppress(OSError):
            print(sentence, end=end, file=sys.stderr, flush=True)


def show(report: Report, *, as_json: bool) -> None:
    """Print a report on stdout and flush it.

    Raises
    ------
    DiskError
        If stdout cannot be written, for example because a disk is full.
    BrokenPipeError
        If the reader of stdout has closed the pipe.
    """
    if as_json:
        print_lines([json.dumps(report.result, sort_keys=True)])
    elif report.aside:
        note("\n".join(report.lines))
    else:
        print_lines(report.lines)


def show_failure(result: dict[str, object], message: str, code: int) -> None:
    """Print the JSON object of a failed command on stdout, or on stderr if stdout is closed or full."""
    with contextlib.suppress(BrokenPipeError, DiskError):
        print_lines([json.dumps(result | {"error": message, "exit": code}, sort_keys=True)])


@contextlib.contextmanager
def stdout_for_video() -> Iterator[int]:
    """Context manager that makes a descriptor of stdout for the video alone. Inside the context other output to stdout
    goes to stderr.

    Native libraries may also print to stdout, so the descriptor of stdout itself is replaced inside the context. The
    descriptor for the video is closed at the end of the context.
    """
    print_lines([])  # what was printed so far
    video, stderr = os.dup(1), sys.stderr
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(stderr):
            yield video
    finally:
        os.dup2(video, 1)
        os.close(video)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines on stdout and flush stdout; raises the errors of `show`."""
    stdout = sys.stdout
    if stdout is None:  # closed by whoever started this
        return
    try:
        encoding = stdout.encoding or "utf-8"
        for line in lines:  # a file's name may have bytes that are no text
            print(line.encode(encoding, "backslashreplace").decode(encoding), file=stdout)
        stdout.flush()
    except BrokenPipeError:
        _drop(stdout)
        raise
    except OSError as fault:
        _drop(stdout)
        raise DiskError(f"stdout cannot be written ({fault.strerror or fault}): send it elsewhere") from fault


def _drop(stdout: TextIO) -> None:
    """Discard the data that Python still buffers for stdout, which could not be written when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stdout.fileno())
        finally:
            os.close(nowhere)
