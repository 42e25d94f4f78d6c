"""Execution of Python modules in child processes that use the private compiler cache. A child process does not check
signatures, because an artifact under construction cannot be signed yet."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from seko_export.host.compiler_cache import CACHE_VARIABLE, private_cache
from seko_runtime.format.trust import TRUST_VARIABLE

ENDING_S = 90.0  # seconds for a child to end by itself, as docs/serving.md has systemd give a server
_CRASH = "Current thread"  # begins the line before a crashed thread's frames, the innermost first


def run_child(module: str, *arguments: str, shown: bool = False) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE ARGUMENTS`` and return its output; the caller checks the exit code.

    If ``shown`` is true, the child's stderr goes to the stderr of this process. If native code ends the child process
    by a signal, Python writes the place in the code to stderr. Python's hashes of strings are the same in every child
    process, so that sets have the same order and equal builds give equal bytes.

    If a signal interrupts the wait, the child is asked to end, and killed only if it takes longer than `ENDING_S`.
    """
    environ = os.environ | {
        "PYTHONHASHSEED": "0",
        "PYTHONFAULTHANDLER": "1",
        CACHE_VARIABLE: private_cache(),
    }
    environ.pop(TRUST_VARIABLE, None)  # what is being built cannot be signed yet
    # -P: the current directory is no place to import from.
    command = [sys.executable, "-P", "-m", module, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=None if shown else subprocess.PIPE, text=True, env=environ
    ) as child:
        try:
            out, err = child.communicate()
        except BaseException:
            child.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.communicate(timeout=ENDING_S)
            finally:  # also at a second signal
                child.kill()
            raise
    done = subprocess.CompletedProcess(command, child.returncode, out, err)
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
