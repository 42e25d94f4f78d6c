"""How long the runtime takes to import in a fresh process, beyond the interpreter's own start, and a command of the
exporter to its first line."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from scripts.bench.rows import append_row
from seko_export.options.checks import SAMPLE_FOLDER

BAR_MS = 60.0
NOTHING, NUMPY = "pass", "import numpy"
IMPORTS = ("import seko_runtime", "from seko_runtime import open_artifact")
COMMANDS = {
    "--help": (["--help"], 300.0),
    "presets": (["presets"], 500.0),
    "doctor": (["doctor"], 1500.0),
    "inspect FILE": (["inspect", str(SAMPLE_FOLDER / "dit.safetensors")], 1000.0),
    "plan": (["plan", "--gpu", "h200", "--preset", "self-forcing-1.3b"], 1500.0),
}
AT_OPEN = "import seko_runtime.opening.artifact"  # what the first open imports


def run(options: argparse.Namespace) -> None:
    """Time the imports in turn, so that a busy moment hits all of them, then the commands; append a row for each."""
    codes = (NOTHING, NUMPY, AT_OPEN, *IMPORTS)
    times: dict[str, list[float]] = {code: [] for code in codes}
    for _ in range(options.runs):
        for code in codes:
            times[code].append(_process_ms(code))
    for name, (words, bar) in COMMANDS.items():
        first_ms = min(_first_line_ms(words) for _ in range(options.command_runs))
        append_row(
            options.rows,
            "first_line_ms",
            f"seko-export {name}",
            first_ms,
            "ms of CPU time before the first line",
            bar,
            runs=options.command_runs,
            load=round(os.getloadavg()[0], 1),
        )
    least = {code: min(seconds) for code, seconds in times.items()}
    for code in IMPORTS:
        append_row(
            options.rows,
            "import_ms",
            code,
            least[code] - least[NOTHING],
            "ms of CPU time beyond an empty program",
            BAR_MS,
            empty_ms=round(least[NOTHING], 3),
            numpy_ms=round(least[NUMPY] - least[NOTHING], 3),
            at_open_ms=round(least[AT_OPEN] - least[NOTHING], 3),
            runs=options.runs,
            load=round(os.getloadavg()[0], 1),
        )


def _process_ms(code: str) -> float:
    """CPU time of a process: a busy machine stretches wall time."""
    process = subprocess.Popen([sys.executable, "-c", code])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{code!r} ended with {process.returncode}")
    return (usage.ru_utime + usage.ru_stime) * 1e3


def _first_line_ms(words: list[str]) -> float:
    """CPU time of a command of the exporter until it has printed a line; then it is ended."""
    process = subprocess.Popen([sys.executable, "-m", "seko_export", *words], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as printed:
        line = printed.readline()
        process.kill()
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not line:
        raise SystemExit(f"{words} printed nothing")
    return (usage.ru_utime + usage.ru_stime) * 1e3
