"""What a bench builds before it measures, kept for a later run of the same commit.

Where a GPU is lent by the minute, the engines of many benches are built side by side first (``--prepare``). Nothing
should be built while something is measured: a build on the same GPU can double the times.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from scripts.bench.rows import measured_commit


def add_prepare(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--prepare`` to a bench."""
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="only build what is measured; a later run of the same commit with the same --work uses it",
    )


def known(output: Path, made_of: object) -> dict[str, Any] | None:
    """Return what `mark` was told of a build, if this commit built the same there; else None.

    Files that differ from their commit, or whose commit nobody knows, are never taken for the same.

    Parameters
    ----------
    output : Path
        File or folder of the build.
    made_of : object
        What was built: a configuration or arguments, told apart by their representation.
    """
    commit = measured_commit()
    if commit is None or commit.endswith("+") or not output.exists():
        return None
    try:
        told: dict[str, Any] = json.loads(_mark(output).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return told if (told.pop("commit"), told.pop("made_of")) == (commit, repr(made_of)) else None


def mark(output: Path, made_of: object, **told: object) -> None:
    """Note beside a file or folder that this commit built it, with what a row says of the build."""
    content = {"commit": measured_commit(), "made_of": repr(made_of), **told}
    _mark(output).write_text(json.dumps(content), encoding="utf-8")


def forget(output: Path) -> None:
    """Take a build for unknown from now on: it is about to be made anew."""
    _mark(output).unlink(missing_ok=True)


def _mark(output: Path) -> Path:
    return output.with_name(f".{output.name}.built.json")
