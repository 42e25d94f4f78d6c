"""The command ``seko-serve simulate``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from urllib.request import urlopen

from seko_runtime.cli.output import print_lines
from seko_serve.command_line import Parser, sentence
from seko_serve.simulation.durations import ARTIFACT, read_times
from seko_serve.simulation.scenario import LENGTHS, Scenario, option

URL_S = 10.0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    argument_parser = Parser(
        "seko-serve simulate", description="Simulate a fleet, to choose its size from measured durations."
    )
    argument_parser.add_argument(
        "times", help="measured durations: a JSON file, or the address or a copy of a box's /metrics"
    )
    artifact = argument_parser.add_argument_group("the artifact, where the durations do not say it")
    for name, kind in ARTIFACT.items():
        artifact.add_argument(option(name), type=kind)
    for entry in fields(Scenario):
        words = f"{entry.default:g}" if isinstance(entry.default, int | float) else entry.default
        has_choices = entry.name == "lengths"
        argument_parser.add_argument(
            option(entry.name),
            dest=entry.name,
            type=type(entry.default),
            default=entry.default,
            choices=LENGTHS if has_choices else None,
            metavar=None if has_choices else option(entry.name)[2:].upper().replace("-", "_"),
            help=f"{entry.metadata['meaning']} (default: {words})",
        )
    argument_parser.add_argument("--json", action="store_true", help="one line of JSON")
    return argument_parser


def main(arguments: Sequence[str]) -> int:
    """Run ``seko-serve simulate``; return the exit code."""
    chosen = parser().parse_args(arguments)
    try:
        from seko_serve.simulation.run import simulate
    except ImportError:
        print(
            "seko-serve: a simulation needs SimPy; in Seko's folder, pip install ./runtime './serve[simulate]'",
            file=sys.stderr,
        )
        return 3
    overrides = {name: getattr(chosen, name) for name in ARTIFACT if getattr(chosen, name) is not None}
    try:
        times = read_times(_text(chosen.times), overrides)
    except (ValueError, OSError) as error:
        named = isinstance(error, OSError) and error.filename is not None
        print(f"seko-serve: {'' if named else f'{chosen.times}: '}{sentence(error)}", file=sys.stderr)
        return 3
    try:
        scenario = Scenario(**{entry.name: getattr(chosen, entry.name) for entry in fields(Scenario)})
    except ValueError as error:
        print(f"seko-serve: {error}", file=sys.stderr)
        return 3
    figures = simulate(scenario, times)
    print_lines([json.dumps(asdict(figures)) if chosen.json else figures.text()])
    return 0


def _text(source: str) -> str:
    """Return the text of a file, or of an address that begins with http:// or https://."""
    if source.startswith(("http://", "https://")):
        with urlopen(source, timeout=URL_S) as answer:
            return str(answer.read().decode("utf-8"))
    return Path(source).read_text(encoding="utf-8")
