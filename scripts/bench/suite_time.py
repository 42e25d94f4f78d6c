"""How long the tests take beside the quick start, on one machine: one after the other, each from a fresh clone.

    python -m scripts.bench.suite_time           the quick start, then scripts/test.sh
    python -m scripts.bench.suite_time --all     then scripts/test.sh --all, too

Rows: `quickstart_s` (building the sample's artifact and replaying twelve chunks), `test_s`, and `test_per_quickstart`,
their ratio. Seconds are the clock's. Beside them stand processor seconds, in which compilers and all other processes
count that a script starts, and the share of the processors that others used meanwhile: a row is to be taken on idle
cores. The environment is installed before; compiler caches are empty, as a newcomer's are.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.counting import processor_ticks
from scripts.bench.rows import append_row

ROOT = Path(__file__).parents[2]
STEPS = (
    "seko_make_venv",
    "seko_make_venv dev",
    "seko_add_serve",
    "seko_try_extra tensorrt-rtx",
    "seko_try_extra clients",
)
INSTALL = " && ".join(("source scripts/venv.sh", *STEPS))
QUICKSTART = ("scripts/quickstart.sh",)
# Of each tier: the script with its arguments, and how many quick starts it may take.
TIERS = {"fast": (("scripts/test.sh",), 6.5), "all": (("scripts/test.sh", "--all"), 11.0)}
QUICKSTART_GOAL = 150.0  # seconds, where twelve chunks take 17
PR_SET_CHILD_SUBREAPER = 36  # of prctl: processes whose parent ended become children of this one
ORPHANS_END_S = 10.0  # what a script left behind and goes on for longer counts as others' work


@dataclass(frozen=True)
class Timed:
    """What a script took.

    Parameters
    ----------
    seconds : float
        By the clock.
    processor_seconds : float
        Of the script and of every process below it, whether or not its parent waited for it.
    others_share : float
        Share of the host's processors that other processes used meanwhile.
    """

    seconds: float
    processor_seconds: float
    others_share: float


def timed(script: tuple[str, ...], folder: Path, environment: dict[str, str]) -> Timed:
    """Run a bash script; its output goes to stderr.

    Raises
    ------
    SystemExit
        If it fails: what did not end well has no time.
    """
    begun, (busy, there) = time.monotonic(), processor_ticks()
    with _adopting():
        others_children = _children()
        child = subprocess.Popen(["bash", *script], cwd=folder, env=environment, stdout=sys.stderr)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.monotonic() - begun
        child.returncode = os.waitstatus_to_exitcode(status)
        own = _processor_seconds(usage) + _orphans_processor_seconds(others_children)
    if child.returncode:
        raise SystemExit(f"{' '.join(script)} ended with {child.returncode} after {seconds:.0f} s: no row")
    busy_now, there_now = processor_ticks()
    others = (busy_now - busy) - own * os.sysconf("SC_CLK_TCK")
    return Timed(seconds, own, max(0.0, others) / max(1, there_now - there))


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Have this process become the parent of processes below it whose parent ended.

    A build's compile workers are children of a fork server, for which nobody waits when the build ends.
    """
    prctl = ctypes.CDLL(None).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise SystemExit("prctl refused: the workers' processor time cannot be counted")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _children() -> set[int]:
    """Return the ids of this process's children, of those, too, that have ended and were not waited for."""
    children = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.add(int(stat.parent.name))
    return children


def _orphans_processor_seconds(others_children: set[int]) -> float:
    """Wait for this process's children, but for ``others_children``, and return their processor seconds."""
    seconds, until = 0.0, time.monotonic() + ORPHANS_END_S
    while (orphans := _children() - others_children) and time.monotonic() < until:
        for orphan in orphans:
            ended, _, usage = os.wait4(orphan, os.WNOHANG)
            seconds += _processor_seconds(usage) if ended else 0.0
        time.sleep(0.02)
    return seconds


def _processor_seconds(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def append(
    rows: Path, figure: str, script: tuple[str, ...], took: Timed, goal: float | None, **more: float
) -> None:
    """Append a row of seconds."""
    append_row(
        rows, figure, f"bash {' '.join(script)}", took.seconds, "s", goal, cores=len(os.sched_getaffinity(0)),
        processor_s=round(took.processor_seconds, 1), others_share=round(took.others_share, 3), **more,
    )  # fmt: skip


def require_committed() -> None:
    """Refuse a tree whose files differ from its commit.

    Raises
    ------
    SystemExit
        If they do: a clone would measure other files than those that are here.
    """
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs/benchmarks"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    if changed:
        raise SystemExit(
            f"{len(changed)} files differ from the commit that would be measured: commit them first"
        )


def main(arguments: list[str] | None = None) -> int:
    """Measure the quick start, then the tests, and append their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="measure scripts/test.sh --all, too")
    parser.add_argument("--rows", type=Path, default=ROOT / "docs" / "benchmarks" / "cpu.jsonl")
    options = parser.parse_args(arguments)
    require_committed()
    subprocess.run(["bash", "-c", INSTALL], cwd=ROOT, check=True, stdout=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="seko-suite-") as work:
        clone = Path(work, "seko")
        subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(clone)], check=True)
        environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
        environment.setdefault("SEKO_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
        environment["XDG_CACHE_HOME"] = str(Path(work, "cache"))
        quickstart = timed(QUICKSTART, clone, environment)
        again = timed(QUICKSTART, clone, environment)  # finds the artifact and replays it
        append(
            options.rows, "quickstart_s", QUICKSTART, quickstart, QUICKSTART_GOAL,
            twelve_chunks_s=round(again.seconds, 1),
        )  # fmt: skip
        for script, most in TIERS.values() if options.all else [TIERS["fast"]]:
            tests = timed(script, clone, environment)
            append(options.rows, "test_s", script, tests, None)
            append_row(
                options.rows, "test_per_quickstart", f"bash {' '.join(script)}", tests.seconds / quickstart.seconds,
                "times the quick start", most,
                test_s=round(tests.seconds, 1), quickstart_s=round(quickstart.seconds, 1),
            )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
