"""Python processes of a benchmark: a fresh one where a figure must not profit from what ran before."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def last_json(*arguments: str) -> dict[str, Any]:
    """Run Python with these arguments and return the JSON object of its last line of output.

    Raises
    ------
    SystemExit
        If it fails, with the end of its output.
    """
    report: dict[str, Any] = json.loads(run_python(*arguments).strip().splitlines()[-1])
    return report


def run_python(*arguments: str) -> str:
    """Run Python with these arguments and return its output.

    Raises
    ------
    SystemExit
        If it fails, with the end of its output.
    """
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)[:200]} ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.stdout
