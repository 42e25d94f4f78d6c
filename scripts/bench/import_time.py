"""How long the runtime takes to import in a fresh process, beyond the interpreter's own start."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from rows import append_row

ROOT = Path(__file__).parents[2]
BAR_MS = 60.0
NOTHING, NUMPY = "pass", "import numpy"
IMPORTS = ("import seko_runtime", "from seko_runtime import open_artifact")


def main() -> None:
    """Time the imports in turn, so that a busy moment hits all of them, and append a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40, help="processes of each kind; the fastest counts")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "cpu.jsonl")
    options = parser.parse_args()
    codes = (NOTHING, NUMPY, *IMPORTS)
    wall: dict[str, list[float]] = {code: [] for code in codes}
    cpu: dict[str, list[float]] = {code: [] for code in codes}
    for _ in range(options.runs):
        for code in codes:
            taken, busy = _process_ms(code)
            wall[code].append(taken)
            cpu[code].append(busy)
    best = {code: min(found) for code, found in wall.items()}
    least = {code: min(found) for code, found in cpu.items()}
    for code in IMPORTS:
        append_row(
            options.out,
            "import_ms",
            code,
            best[code] - best[NOTHING],
            "ms beyond an empty program",
            BAR_MS,
            cpu_ms=round(least[code] - least[NOTHING], 3),
            empty_ms=round(best[NOTHING], 3),
            numpy_ms=round(best[NUMPY] - best[NOTHING], 3),
            numpy_cpu_ms=round(least[NUMPY] - least[NOTHING], 3),
            runs=options.runs,
            load=round(os.getloadavg()[0], 1),
        )


def _process_ms(code: str) -> tuple[float, float]:
    """Wall time and CPU time of a process; on a busy machine the second says more."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code])
    _, status, usage = os.wait4(process.pid, 0)
    taken = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{code!r} ended with {process.returncode}")
    return taken * 1e3, (usage.ru_utime + usage.ru_stime) * 1e3


if __name__ == "__main__":
    main()
