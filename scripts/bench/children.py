"""Python processes of a benchmark: a fresh one where a figure must not profit from what ran before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

LINES_SAID = 20  # of stderr, in the error of a child that failed


def without_caches(folder: Path) -> dict[str, str]:
    """Return the environment with empty caches of compilers, which are made in a folder."""
    environ = os.environ | {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
    return environ


def last_json(*arguments: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run Python with these arguments and return the JSON object of its last line of output; see `run_python`.

    Raises
    ------
    SystemExit
        If it fails, with the end of its output.
    """
    report: dict[str, Any] = json.loads(run_python(*arguments, environ=environ).strip().splitlines()[-1])
    return report


def run_python(*arguments: str, environ: Mapping[str, str] | None = None) -> str:
    """Run Python with these arguments, and in this environment if one is given, and return its output; what it says on
    stderr is passed on as it comes.

    Raises
    ------
    SystemExit
        If it fails, with the end of its output and, last, of what it said on stderr: there stands why.
    """
    said: deque[str] = deque(maxlen=LINES_SAID)

    def pass_on(lines: Iterable[str]) -> None:
        for line in lines:
            said.append(line)
            sys.stderr.write(line)

    command = [sys.executable, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environ) as child:
        beside = threading.Thread(target=pass_on, args=(child.stderr,))
        beside.start()
        output = child.stdout.read() if child.stdout is not None else ""
        beside.join()
    if child.returncode:
        ending = f"{output[-2000:]}{''.join(said)}".rstrip()
        raise SystemExit(f"{' '.join(arguments)[:200]} ended with {child.returncode}\n{ending}")
    return output
