"""How long the tests take beside the quick start, on one machine: one after the other, each from a fresh clone.

    python -m scripts.bench.suite_time           the quick start, then scripts/test.sh
    python -m scripts.bench.suite_time --all     then scripts/test.sh --all, too

Rows: `quickstart_s` (building the sample's artifact and replaying twelve chunks), `test_s`, and `test_per_quickstart`,
their ratio. Seconds are the clock's. Beside them stand processor seconds, in which compilers and all other processes
count that a script starts and waits for, and the share of the processors that others used meanwhile: a row is to be
taken on idle cores. The environment is installed before; compiler caches are empty, as a newcomer's are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.counting import processor_ticks
from scripts.bench.rows import append_row

ROOT = Path(__file__).parents[2]
STEPS = ("seko_make_venv", "seko_make_venv dev", "seko_add_serve", "seko_try_extra tensorrt-rtx")
INSTALL = " && ".join(("source scripts/venv.sh", *STEPS))
QUICKSTART = ("scripts/quickstart.sh",)
# Of each tier: the script with its arguments, and how many quick starts it may take.
TIERS = {"fast": (("scripts/test.sh",), 6.5), "all": (("scripts/test.sh", "--all"), 11.0)}
QUICKSTART_GOAL = 150.0  # seconds, where twelve chunks take 17


@dataclass(frozen=True)
class Timed:
    """What a script took.

    Parameters
    ----------
    seconds : float
        By the clock.
    processor_seconds : float
        Of the script and of every process below it that was waited for.
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
    child = subprocess.Popen(["bash", *script], cwd=folder, env=environment, stdout=sys.stderr)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - begun
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(script)} ended with {child.returncode} after {seconds:.0f} s: no row")
    busy_now, there_now = processor_ticks()
    own = usage.ru_utime + usage.ru_stime
    others = (busy_now - busy) - own * os.sysconf("SC_CLK_TCK")
    return Timed(seconds, own, max(0.0, others) / max(1, there_now - there))


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
