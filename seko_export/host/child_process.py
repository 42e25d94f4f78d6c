"""Execution of Python modules in child processes that use the private compiler cache. A child process does not check
signatures, because an artifact under construction cannot be signed yet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from seko_export.host.compiler_cache import CACHE_VARIABLE, private_cache
from seko_runtime.format.trust import TRUST_VARIABLE

ENDING_S = 90.0  # seconds for a child to end by itself, as docs/serving.md has systemd give a server
_WAITS = """
import importlib, runpy, sys
imports, module, *sys.argv[1:] = sys.argv[1:]
importlib.import_module(imports)
if sys.stdin.readline():  # else the parent has ended
    runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_CRASH = "Current thread"  # begins the line before a crashed thread's frames, the innermost first


def run_child(module: str, *arguments: str, shown: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE ARGUMENTS`` and return its output; the caller checks the exit code.

    If ``shown`` is true, the child's stderr goes to the stderr of this process. If native code ends the child process
    by a signal, Python writes the place in the code to stderr. Python's hashes of strings are the same in every child
    process, so that sets have the same order and equal builds give equal bytes.

    If a signal interrupts the wait, the child is asked to end, and killed only if it takes longer than `ENDING_S`.
    """
    with _started("-m", module, *arguments, stderr=None if shown else subprocess.PIPE) as child:
        return _ended(child)


@contextmanager
def waiting_child(
    module: str, *arguments: str, imports: str
) -> Iterator[Callable[[], subprocess.CompletedProcess[str]]]:
    """Start a child process that imports a module, which takes seconds, and waits. The yielded function lets it do what
    `run_child` does; a child that it was not called for is ended with the context."""
    with _started("-c", _WAITS, imports, module, *arguments, stdin=subprocess.PIPE) as child:
        try:
            yield partial(_ended, child, "go\n")
        finally:
            child.kill()


def _started(*words: str, **pipes: Any) -> subprocess.Popen[str]:
    environ = os.environ | {
        "PYTHONHASHSEED": "0",
        "PYTHONFAULTHANDLER": "1",
        CACHE_VARIABLE: private_cache(),
    }
    environ.pop(TRUST_VARIABLE, None)  # what is being built cannot be signed yet
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
    # -P: the current directory is no place to import from.
    return subprocess.Popen([sys.executable, "-P", *words], text=True, env=environ, **pipes)


def _ended(child: subprocess.Popen[str], said: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        out, err = child.communicate(said)
    except BaseException:
        child.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                child.communicate(timeout=ENDING_S)
        finally:  # also at a second signal
            child.kill()
        raise
    done = subprocess.CompletedProcess(child.args, child.returncode, out, err)
    if done.returncode < 0:
        done.returncode = 128 - done.returncode  # as a shell says it, and Seko's commands
    return done


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line of a child's stderr that states the reason of a failure: the last line, or after a crash the
    innermost call.
    """
    lines = done.stderr.strip().splitlines() or ["no message"]
    crashed = [at for at, line in enumerate(lines) if line.startswith(_CRASH)]
    return " ".join(lines[crashed[0] + 1].split()) if crashed and crashed[0] + 1 < len(lines) else lines[-1]
