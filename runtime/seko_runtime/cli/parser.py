"""The command line of `seko-run`: commands and options. The module `commands` implements the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from seko_runtime import __version__
from seko_runtime.arguments import nearest
from seko_runtime.cli.controls import control_options
from seko_runtime.cli.option_values import OptionParser
from seko_runtime.cli.output import print_lines
from seko_runtime.controls.base import ControlOption
from seko_runtime.errors import UsageError

SUMMARIES = {
    "run": "make video or speech and write it to a file",
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
BOTH = "Text and noise (video and speech)"
VIDEO = "Video (length, prompt)"
MEDIA = "Media (pictures and sound)"
INPUTS = "Camera and other inputs"
SPEECH = "Speech (voice, length)"
OUTPUT = "Output"
# In the order of the help; controls of other distributions may bring headings of their own, which follow.
GROUPS = (ARTIFACT, BOTH, VIDEO, MEDIA, INPUTS, SPEECH, OUTPUT)


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
        Further arguments of argparse's `add_argument`.
    """

    group: str
    commands: tuple[str, ...]
    names: tuple[str, ...]
    settings: dict[str, Any]


def _option(*names: str, group: str, of: str = "run", **settings: Any) -> Option:
    return Option(group, tuple(of.split()), names, settings)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _of_control(option: ControlOption) -> Option:
    settings: dict[str, Any] = {"metavar": option.metavar, "help": option.help}
    if option.file:
        settings["type"] = Path
    if option.repeatable:
        settings["action"] = "append"
    return _option(option.name, group=option.heading, **settings)


_ALL = " ".join(SUMMARIES)
OPTIONS = (
    _option(
        "artifact",
        group=ARTIFACT,
        of="run verify info",
        type=Path,
        metavar="ARTIFACT",
        help="the artifact's folder",
    ),
    _option(
        "artifact",
        group=ARTIFACT,
        of="unpack",
        type=Path,
        metavar="FILE.tar",
        help="what `seko-export pack` made",
    ),
    _option("--device", group=ARTIFACT, of="run verify", default="auto", help="auto, cpu, cuda or cuda:N"),
    _option(
        "--copy-weights",
        group=ARTIFACT,
        of="run verify",
        action="store_true",
        help="read the weights into memory instead of mapping files, which others could truncate",
    ),
    _option(
        "--trust",
        group=ARTIFACT,
        of=_ALL,
        type=Path,
        metavar="FILE",
        help="open only an artifact that a key in this file signed; default: SEKO_TRUST",
    ),
    _option(
        "--text",
        group=BOTH,
        metavar="TEXT",
        help="speech: the text to speak. Video: FILE.npy, text embeddings [B, tokens, dim]",
    ),
    _option(
        "--seed",
        group=BOTH,
        type=int,
        default=0,
        metavar="S",
        help="seed of the noise; row r of a video gets S + r",
    ),
    _option(
        "--chunks",
        group=VIDEO,
        type=_positive,
        metavar="N",
        help="how many chunks; default: as many as --audio, --keys or --poses last, else 4",
    ),
    _option("--prompt", group=VIDEO, metavar="TEXT", help="a sentence; default: that of the recorded chunks"),
    _option(
        "--prompts",
        group=VIDEO,
        type=Path,
        metavar="FILE.json",
        help='prompts over time: [{"at_s": 0, "prompt": "..."}, {"at_s": 6.5, "prompt": ..., "recache": true}]; '
        "at_frame in place of at_s: a video frame",
    ),
    _option("--steps", group=VIDEO, type=_positive, metavar="N", help="denoise passes per chunk"),
    _option("--shift", group=VIDEO, type=float, metavar="X", help="shift of their times towards noise"),
    *map(_of_control, control_options()),
    _option(
        "--events",
        group=INPUTS,
        type=Path,
        metavar="FILE",
        help="replay the recording of a session: its seed, prompt, and all events of its controls",
    ),
    _option(
        "--control",
        group=INPUTS,
        action="append",
        metavar="NAME=FILE.json",
        help="events that a control of the artifact takes before the first chunk: an object, or an array of them; "
        "repeatable",
    ),
    _option(
        "--input",
        group=INPUTS,
        action="append",
        metavar="NAME=FILE.npy",
        help="an input of the model, such as a camera: one chunk's array, or [chunks, ...]; repeatable",
    ),
    _option(
        "--text-file",
        group=SPEECH,
        type=Path,
        metavar="FILE",
        help="speak a text in UTF-8, sentence by sentence; a pipe, or - for stdin, as it is read",
    ),
    _option(
        "--voice",
        group=SPEECH,
        type=Path,
        metavar="FILE",
        help="the voice to sound like: wav; with PyAV also mp3, m4a. Default: the model chooses one",
    ),
    _option(
        "--voice-text",
        group=SPEECH,
        metavar="TEXT",
        help="the words of --voice: the text goes on where it ends",
    ),
    _option(
        "--patches",
        group=SPEECH,
        type=_positive,
        metavar="N",
        help="the most patches of a sentence; default: by its tokens",
    ),
    _option("--guidance", group=SPEECH, type=float, metavar="X", help="default: the artifact's, such as 2"),
    _option(
        "--temperature", group=SPEECH, type=float, metavar="X", help="of the noise; default: the artifact's"
    ),
    _option(
        "-o",
        "--output",
        group=OUTPUT,
        type=Path,
        required=True,
        metavar="FILE",
        help=".npy .y4m .mp4, speech: .wav .mp3 .flac; a named pipe is written to as chunks come, and - is stdout",
    ),
    _option(
        "-o",
        "--output",
        group=OUTPUT,
        of="unpack",
        type=Path,
        required=True,
        metavar="DIR",
        help="the folder to make",
    ),
    _option(
        "--format",
        group=OUTPUT,
        metavar="NAME",
        help="npy, y4m, mp4, or raw: rgb24 pictures alone; y4m for - and pipes. Speech: wav, mp3, flac, or raw: 16-bit "
        "samples alone, which is for - and pipes",
    ),
    _option(
        "--force",
        group=OUTPUT,
        of="unpack",
        action="store_true",
        help="replace an artifact that is already there",
    ),
    _option(
        "--json",
        group=OUTPUT,
        of=_ALL,
        action="store_true",
        help="print one JSON object, and nothing else, on stdout",
    ),
    _option("-h", "--help", group=OUTPUT, of=_ALL, action="help", help="show this help"),
)


def used_options(options: argparse.Namespace, *groups: str) -> list[str]:
    """Return the options that a command line of `run` contains and the help lists under the headings ``groups``, as the
    command line spells them."""
    return [
        option.names[-1]
        for option in OPTIONS
        if "run" in option.commands
        and option.group in groups
        and getattr(options, option.names[-1].removeprefix("--").replace("-", "_")) is not None
    ]


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


def parsers(
    functions: Mapping[str, Callable[..., Any]],
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and the parsers of its commands by name."""
    parser = Parser(
        prog="seko-run",
        description="Open an artifact and make video of it, chunk by chunk, or speech, patch by patch.",
    )
    parser.add_argument("--version", action="version", version=f"seko-runtime {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", title="Commands")
    commands: dict[str, argparse.ArgumentParser] = {}
    for name, summary in SUMMARIES.items():
        commands[name] = subparsers.add_parser(
            name, help=summary, description=summary, usage=USAGES[name], add_help=False
        )
        commands[name].set_defaults(command=functions[name])
        _add_options(commands[name], name)
    return parser, commands


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    for group in dict.fromkeys((*GROUPS, *(option.group for option in OPTIONS))):
        options = [option for option in OPTIONS if option.group == group and name in option.commands]
        if options:
            section = command.add_argument_group(group)
            for option in options:
                section.add_argument(*option.names, **option.settings)


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
