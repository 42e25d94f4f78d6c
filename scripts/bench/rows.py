"""One row of docs/benchmarks: written by the script that measured it, with versions, never by hand."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path

import torch

COMMIT = "SEKO_COMMIT"


def append_row(
    file: Path, figure: str, shape: str, value: float, unit: str, bar: float | None, **more: object
) -> None:
    """Append one measured figure as a JSON line and print it.

    Parameters
    ----------
    file : Path
        ``docs/benchmarks/NAME.jsonl``.
    figure, shape, unit : str
        Name of the figure, what it was measured on, unit of the value.
    value : float
        As measured.
    bar : float or None
        What it must reach, if it is a bar.
    **more
        Whatever explains the value: the numbers of a ratio, counts.
    """
    row = {
        "figure": figure,
        "shape": shape,
        "value": round(value, 6),
        "unit": unit,
        "bar": bar,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": _versions(),
        "commit": measured_commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **more,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row, sort_keys=True) + "\n")
    print(json.dumps(row, sort_keys=True), flush=True)


def measured_commit() -> str | None:
    """Return the commit of the code that is measured, with ``+`` behind it where files differ from it.

    Rows that were measured before do not count: a run appends them. ``SEKO_COMMIT`` says it where the repository's
    files were copied without their history; None: nobody knows.
    """
    if commit := os.environ.get(COMMIT):
        return commit
    try:
        named = _git("rev-parse", "--short=12", "HEAD")
        same = _git("diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)docs/benchmarks")
    except FileNotFoundError:
        return None
    return None if named.returncode else named.stdout.strip() + "+" * bool(same.returncode)


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("git", "-C", str(Path(__file__).parent), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if torch.cuda.is_available():
        import triton

        versions |= {"triton": triton.__version__, "cudnn": str(torch.backends.cudnn.version())}
    return versions
