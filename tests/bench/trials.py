"""Trials of the benchmark's cases, in this process: torch is imported once for all of them. No tests."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench import __main__ as runner


@dataclass(frozen=True)
class Tried:
    """What a trial gave.

    Parameters
    ----------
    code : int
        Its exit code.
    summary : dict
        The last line that it printed.
    rows : list of dict
        What it appended to its file of rows.
    """

    code: int
    summary: dict[str, Any]
    rows: list[dict[str, Any]]


def tried(folder: Path, case: str, *more: str) -> Tried:
    """Run the trial of a case, with its builds and its rows in a folder."""
    file, printed = folder / f"{case}.jsonl", io.StringIO()
    arguments = [case, "--trial", "--work", str(folder), "--rows", str(file), *more]
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of itself, which tests take as errors
        code = runner.main(arguments)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return Tried(code, json.loads(printed.getvalue().splitlines()[-1]), rows)
