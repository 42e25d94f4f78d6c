"""How an option of `seko-run` is declared, and those that several workloads share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NOISE = "Text and noise"
OUTPUT = "Output"


@dataclass(frozen=True)
class Option:
    """An option or argument that some commands of `seko-run` have.

    Parameters
    ----------
    group : str
        The heading above the option in the help.
    commands : tuple of str
        The commands that have the option.
    names : tuple of str
        The ways to spell the option.
    settings : dict
        Further arguments of argparse's `add_argument`. An option of a workload has the value None or False where a
        command line lacks it, so that it is known whether it was given.
    """

    group: str
    commands: tuple[str, ...]
    names: tuple[str, ...]
    settings: dict[str, Any]

    def given(self, options: argparse.Namespace) -> bool:
        """Return whether a command line has the option."""
        value = getattr(options, self.names[-1].lstrip("-").replace("-", "_"))
        return value is not None and value is not False


def option(*names: str, group: str, of: str = "run", **settings: Any) -> Option:
    """Return an option of the commands ``of``, words of one text; see `Option`."""
    return Option(group, tuple(of.split()), names, settings)


def positive(text: str) -> int:
    """Return the value of an option that is a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def given(options: argparse.Namespace, declared: Iterable[Option], *groups: str) -> list[str]:
    """Return which of some options a command line has, as it spells them; with ``groups``, those under these headings
    alone."""
    return [
        entry.names[-1]
        for entry in declared
        if (not groups or entry.group in groups) and entry.given(options)
    ]


# Options with one meaning and a note for each workload: the help has the notes of all workloads, one after another.


def text_option(note: str) -> Option:
    """Return the option ``--text`` with what it is for a workload."""
    return option("--text", group=NOISE, metavar="TEXT", help=note)


def seed_option(note: str = "seed of the noise") -> Option:
    """Return the option ``--seed``."""
    return option("--seed", group=NOISE, type=int, default=0, metavar="S", help=note)


def output_option(note: str) -> Option:
    """Return the option ``-o`` with the kinds of files that a workload writes."""
    return option("-o", "--output", group=OUTPUT, type=Path, required=True, metavar="FILE", help=note)


def format_option(note: str) -> Option:
    """Return the option ``--format`` with the formats that a workload writes."""
    return option("--format", group=OUTPUT, metavar="NAME", help=note)
