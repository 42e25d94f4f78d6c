"""The command line of `seko-run`: commands and options. The module `commands` implements the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from seko_runtime.arguments import nearest
from seko_runtime.cli.option_values import OptionParser
from seko_runtime.cli.options import OUTPUT, Option, option
from seko_runtime.cli.output import print_lines
from seko_runtime.cli.runs import RUNS
from seko_runtime.errors import UsageError

SUMMARIES = {
    "run": "make what the model makes, such as video, and write it to a file",
    "verify": "replay what was recorded and compare",
    "info": "print what the manifest says",
    "unpack": "unpack a packed artifact into a folder",
}

USAGES = {
    "run": "%(prog)s ARTIFACT -o FILE [OPTIONS]",
    "verify": "%(prog)s ARTIFACT [OPTIONS]",
    "info": "%(prog)s ARTIFACT [OPTIONS]",
    "unpack": "%(prog)s FILE.tar -o DIR [OPTIONS]",
}

ARTIFACT = "Artifact (how it is opened)"


_ALL = " ".join(SUMMARIES)
COMMON = (
    option(
        "artifact",
        group=ARTIFACT,
        of="run verify info",
        type=Path,
        metavar="ARTIFACT",
        help="the artifact's folder",
    ),
    option(
        "artifact",
        group=ARTIFACT,
        of="unpack",
        type=Path,
        metavar="FILE.tar",
        help="what `seko-export pack` made",
    ),
    option("--device", group=ARTIFACT, of="run verify", default="auto", help="auto, cpu, cuda or cuda:N"),
    option(
        "--copy-weights",
        group=ARTIFACT,
        of="run verify",
        action="store_true",
        help="read the weights into memory instead of mapping files, which others could truncate",
    ),
    option(
        "--trust",
        group=ARTIFACT,
        of=_ALL,
        type=Path,
        metavar="FILE",
        help="open only an artifact that a key in this file signed; default: SEKO_TRUST",
    ),
    option(
        "-o",
        "--output",
        group=OUTPUT,
        type=Path,
        required=True,
        metavar="FILE",
        help="a named pipe is written to as chunks come, and - is stdout",
    ),
    option(
        "-o",
        "--output",
        group=OUTPUT,
        of="unpack",
        type=Path,
        required=True,
        metavar="DIR",
        help="the folder to make",
    ),
    option(
        "--force",
        group=OUTPUT,
        of="unpack",
        action="store_true",
        help="replace an artifact that is already there",
    ),
    option(
        "--json",
        group=OUTPUT,
        of=_ALL,
        action="store_true",
        help="print one JSON object, and nothing else, on stdout",
    ),
    option("-h", "--help", group=OUTPUT, of=_ALL, action="help", help="show this help"),
)


def all_options() -> list[Option]:
    """Return all options of all commands, in the order of the help under each heading. An option that several
    workloads declare is there once, with the notes of all."""
    merged: dict[tuple[tuple[str, ...], tuple[str, ...]], Option] = {}
    of_workloads = [entry for _, command in RUNS.every() for entry in command.options]
    for entry in (*of_workloads, *COMMON):
        key = entry.commands, entry.names
        first = merged.setdefault(key, entry)
        notes, note = str(first.settings["help"]), str(entry.settings["help"])
        if {**entry.settings, "help": notes} != first.settings:
            raise UsageError(
                f"{entry.names[-1]} is declared in two ways by the workloads that are installed; uninstall one"
            )
        if note not in notes:
            merged[key] = replace(first, settings={**first.settings, "help": f"{notes}; {note}"})
    return list(merged.values())


def groups(options: Iterable[Option]) -> list[str]:
    """Return the headings of options in the order of the help."""
    between = [entry.group for entry in options if entry.group not in (ARTIFACT, OUTPUT)]
    return list(dict.fromkeys([ARTIFACT, *between, OUTPUT]))


class Parser(OptionParser):
    """An argparse parser that raises the runtime's errors."""

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError, where argparse would end the process."""
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def _print_message(self, message: str, file: object = None) -> None:  # noqa: ARG002  argparse gives it
        """Print help or version; argparse itself would ignore an error of stdout."""
        print_lines(message.splitlines())


def parse(arguments: Sequence[str], functions: Mapping[str, Callable[..., Any]]) -> argparse.Namespace:
    """Parse a command line; ``command`` of the result is the command's function.

    Parameters
    ----------
    arguments : sequence of str
        Command line without the program name.
    functions : dict of str to callable
        Functions of the commands, by name: one for each of `SUMMARIES`.

    Raises
    ------
    UsageError
        If the command line is invalid. For an unknown command or option the message names the most similar known
        command or option.
    """
    parser, commands = parsers(functions)
    _check_names(arguments, commands)
    return parser.parse_args(arguments)


class _Version(argparse.Action):
    """Prints the version, which only who asks for it looks up."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from seko_runtime import __version__

        parser.exit(0, f"seko-runtime {__version__}\n")


def parsers(
    functions: Mapping[str, Callable[..., Any]],
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and the parsers of its commands by name."""
    parser = Parser(
        prog="seko-run",
        description="Open an artifact and make what its model makes, such as video, chunk by chunk.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", title="Commands")
    commands: dict[str, argparse.ArgumentParser] = {}
    options = all_options()
    for name, summary in SUMMARIES.items():
        commands[name] = subparsers.add_parser(
            name, help=summary, description=summary, usage=USAGES[name], add_help=False
        )
        commands[name].set_defaults(command=functions[name])
        _add_options(commands[name], name, options)
    return parser, commands


def _add_options(command: argparse.ArgumentParser, name: str, options: Sequence[Option]) -> None:
    for group in groups(options):
        entries = [entry for entry in options if entry.group == group and name in entry.commands]
        if entries:
            section = command.add_argument_group(group)
            for entry in entries:
                section.add_argument(*entry.names, **entry.settings)


def _check_names(arguments: Sequence[str], commands: dict[str, argparse.ArgumentParser]) -> None:
    """Raise a UsageError for an unknown command or option, with the nearest one."""
    if not arguments or arguments[0].startswith("-"):
        return
    command = arguments[0]
    if command not in commands:
        raise UsageError(
            f"there is no command {command!r}{nearest(command, commands)}; see `seko-run --help`"
        )
    names = [spelled for action in commands[command]._actions for spelled in action.option_strings]
    for argument in arguments[1:]:
        if argument == "--":
            return
        option = argument.split("=", 1)[0]
        if not option.startswith("--") or " " in option:  # with a space it is a value
            continue
        if not any(name.startswith(option) for name in names):  # argparse takes beginnings
            raise UsageError(
                f"`seko-run {command}` has no option {option}{nearest(option, names)}; "
                f"see `seko-run {command} --help`"
            )
