"""How long the tests take beside the quick start, on one machine: one after the other, from a fresh clone.

Rows: `quickstart_s` (building the sample's artifact and replaying twelve chunks), `test_s`, and `test_per_quickstart`,
their ratio. Seconds are the clock's; beside them stands the machine's load before, and a row is to be taken on idle
cores. The environment is installed before; compiler caches are empty, as a newcomer's are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.bench.children import without_caches
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


def timed(script: tuple[str, ...], folder: Path, environment: dict[str, str]) -> float:
    """Run a bash script, its output on stderr, and return its seconds.

    Raises
    ------
    SystemExit
        If it fails: what did not end well has no time.
    """
    begun = time.monotonic()
    done = subprocess.run(["bash", *script], cwd=folder, env=environment, stdout=sys.stderr, check=False)
    seconds = time.monotonic() - begun
    if done.returncode:
        raise SystemExit(f"{' '.join(script)} ended with {done.returncode} after {seconds:.0f} s: no row")
    return seconds


def run(options: argparse.Namespace) -> None:
    """Measure the quick start, then the tests, and append their rows."""
    require_committed()
    subprocess.run(["bash", "-c", INSTALL], cwd=ROOT, check=True, stdout=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="seko-suite-") as work:
        clone = Path(work, "seko")
        subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(clone)], check=True)
        environment = without_caches(Path(work))
        environment.setdefault("SEKO_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
        cores = {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 1)}
        quickstart = timed(QUICKSTART, clone, environment)
        again = timed(QUICKSTART, clone, environment)  # finds the artifact and replays it
        append_row(
            options.rows, "quickstart_s", _named(QUICKSTART), quickstart, "s", QUICKSTART_GOAL,
            twelve_chunks_s=round(again, 1), **cores,
        )  # fmt: skip
        for tier in options.tiers:
            script, most = TIERS[tier]
            tests = timed(script, clone, environment)
            append_row(options.rows, "test_s", _named(script), tests, "s", None, **cores)
            append_row(
                options.rows, "test_per_quickstart", _named(script), tests / quickstart, "times the quick start", most,
                test_s=round(tests, 1), quickstart_s=round(quickstart, 1),
            )  # fmt: skip


def _named(script: tuple[str, ...]) -> str:
    return f"bash {' '.join(script)}"
