"""Children of the comparison: one process a measurement, artifacts built side by side, and a budget for all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench.peers.shapes import Shape

ROOT = Path(__file__).parents[3]
CHILD = "scripts.bench.peers.child"
_END = 600  # characters of a failed child's output that are kept

# What `seko-export build` is asked for, by the name of an engine.
ENGINES: dict[str, tuple[str, ...]] = {
    "exact": ("--kv", "bf16"),
    "fp4": ("--fp4-kv",),
    "fp4_fp8": ("--fp4-kv", "--fp8"),
    "fp4_fp8_resident": ("--fp4-kv", "--fp8", "--resident-window"),
}


# Builds that run at a time: each is a process per engine, and each of those holds torch and a CUDA context.
SIDE_BY_SIDE = 3

_alive: set[subprocess.Popen[str]] = set()


class ChildError(Exception):
    """A child failed."""


class TimeUpError(Exception):
    """The time was up while a child ran; it was ended."""


@dataclass
class Runner:
    """Runs children until the time is up.

    Parameters
    ----------
    deadline : float
        On `time.monotonic`'s clock: nothing begins behind it, and what still runs is ended.
    report : callable
        Told of every result.
    failed : dict of str to str
        What failed, with the end of what it said.
    skipped : list of str
        What was not begun, or not finished, when the time was up.
    """

    deadline: float
    report: Callable[[str, dict[str, Any]], None]
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def measure(self, name: str, job: dict[str, Any]) -> dict[str, Any] | None:
        """Run one job in a child; return its report, or None where there is none (`failed` or `skipped` says why).

        Parameters
        ----------
        name : str
            For reports.
        job : dict
            For `child.JOBS`; plain data.
        """
        return self._run(name, ("-m", CHILD, json.dumps(job)))

    def build(self, name: str, arguments: Sequence[str]) -> dict[str, Any] | None:
        """Run `seko-export build`; as `measure`."""
        return self._run(name, ("-m", "seko_export", "build", *arguments, "--force", "--json"))

    def script(self, name: str, *arguments: str) -> dict[str, Any] | None:
        """Run a script of the repository that ends in a JSON line; as `measure`."""
        return self._run(name, arguments)

    def together(self, tasks: Sequence[Callable[[], object]]) -> None:
        """Run tasks side by side, a few at a time: nothing among them is timed."""
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            for done in [pool.submit(task) for task in tasks]:
                done.result()

    def _run(self, name: str, arguments: Sequence[str]) -> dict[str, Any] | None:
        if time.monotonic() >= self.deadline:
            self.skipped.append(name)
            return None
        started = time.monotonic()
        try:
            report = run_child(arguments, self.deadline - started)
        except TimeUpError:
            self.skipped.append(name)
            return None
        except ChildError as fault:
            self.failed[name] = str(fault)
            print(f"{name}: {fault}", file=sys.stderr, flush=True)
            return None
        self.report(name, report | {"job_s": round(time.monotonic() - started, 1)})
        return report


def run_child(arguments: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run Python and return the JSON object of its last line of output.

    Raises
    ------
    ChildError
        If it fails, or does not end in a JSON object.
    TimeUpError
        If it does not end in time; it and its children are ended.
    """
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,  # a group of its own: compilers of a child end with it
    )
    _alive.add(child)
    try:
        output, errors = child.communicate(timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        raise TimeUpError(f"{' '.join(arguments)[:200]} was ended after {seconds:.0f} s") from None
    finally:
        _alive.discard(child)
        if child.poll() is None:  # the time is up, or this process is told to end
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    if child.returncode:
        raise ChildError(f"ended with {child.returncode}: {(errors or output).strip()[-_END:]}")
    try:
        report: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise ChildError(f"its last line is no JSON: {output.strip()[-_END:]!r}") from None
    return report


def end_with_children(number: int, _frame: object) -> None:
    """Handle a signal: end every child with all that it started, then this process."""
    for child in list(_alive):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    os._exit(128 + number)


def build_arguments(shape: Shape, engine: str, checkpoint: Path, output: Path, *more: str) -> tuple[str, ...]:
    """Return the arguments of `seko-export build` for one engine at one shape."""
    layout = [word for name, size in shape.layout.items() for word in (f"--{name}", str(size))]
    return (str(checkpoint), "--preset", shape.preset, *ENGINES[engine], *layout, *more, "-o", str(output))
