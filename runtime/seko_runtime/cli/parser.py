"""The command line of `seko-run`: commands and options. `commands` implements them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from seko_runtime import __version__
from seko_runtime.cli.output import print_lines
from seko_runtime.errors import UsageError

SUMMARIES = {
    "run": "replay chunks and write them to a file",
    "verify": "replay the recorded chunks and compare",
    "info": "print what the manifest says",
    "unpack": "unpack a packed artifact into a folder",
}


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises the runtime's errors."""

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError instead of ending the process."""
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def _print_message(self, message: str, file: object = None) -> None:  # noqa: ARG002  argparse gives it
        """Print help or version; argparse itself would ignore an error of stdout."""
        print_lines(message.splitlines())


def parse(arguments: Sequence[str], functions: Mapping[str, Callable[..., Any]]) -> argparse.Namespace:
    """Parse a command line; ``command`` of the result is the command's function.

    Parameters
    ----------
    arguments : sequence of str
        Without the program name.
    functions : dict of str to callable
        One for each of `SUMMARIES`.

    Raises
    ------
    UsageError
        If they are invalid; for an unknown command or option the message names the nearest one.
    """
    parser, commands = parsers(functions)
    _check_names(arguments, commands)
    return parser.parse_args(arguments)


def parsers(
    functions: Mapping[str, Callable[..., Any]],
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and those of its commands by name."""
    parser = Parser(prog="seko-run", description="Open an artifact and make video of it, chunk by chunk.")
    parser.add_argument("--version", action="version", version=f"seko-runtime {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    commands: dict[str, argparse.ArgumentParser] = {}
    for name, summary in SUMMARIES.items():
        commands[name] = subparsers.add_parser(name, help=summary, description=summary)
        commands[name].set_defaults(command=functions[name])
        _add_options(commands[name], name)
    return parser, commands


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    packed = name == "unpack"
    command.add_argument(
        "artifact",
        type=Path,
        metavar="FILE.tar" if packed else "ARTIFACT",
        help="what `seko-export pack` made" if packed else "the artifact's folder",
    )
    command.add_argument(
        "--json", action="store_true", help="print one JSON object, and nothing else, on stdout"
    )
    command.add_argument(
        "--trust",
        type=Path,
        metavar="FILE",
        help="open only an artifact that a key in this file signed; default: SEKO_TRUST",
    )
    if packed:
        command.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
        command.add_argument("--force", action="store_true", help="replace an artifact that is already there")
    if name in ("run", "verify"):
        command.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
        command.add_argument(
            "--copy-weights",
            action="store_true",
            help="read the weights into memory instead of mapping files, which others could truncate",
        )
    if name == "run":
        _add_run_options(command)


def _add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--chunks",
        type=_positive,
        metavar="N",
        help="default: as many as --audio, --keys or --poses say, else 4",
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of the noise; row r gets S + r"
    )
    command.add_argument("--prompt", metavar="TEXT", help="a sentence; default: that of the recorded chunks")
    command.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE.json",
        help='prompts over time: [{"at_s": 0, "prompt": "..."}, {"at_s": 6.5, "prompt": ..., "recache": true}]; '
        "at_frame in place of at_s: a video frame",
    )
    command.add_argument("--text", type=Path, metavar="FILE.npy", help="text embeddings [B, tokens, dim]")
    command.add_argument("--steps", type=_positive, metavar="N", help="denoise passes per chunk")
    command.add_argument("--shift", type=float, metavar="X", help="shift of their times towards noise")
    command.add_argument(
        "--image",
        type=Path,
        metavar="FILE",
        help="start with a picture, or the portrait that speaks: .npy uint8; with PyAV also .png",
    )
    command.add_argument(
        "--audio",
        type=Path,
        action="append",
        metavar="FILE",
        help="the voice, once for each speaker: wav; with PyAV also mp3, m4a. An .mp4 output gets its sound",
    )
    command.add_argument(
        "--mask",
        type=Path,
        action="append",
        metavar="FILE",
        help="where in the portrait a speaker is, of several: a picture, bright there. One for each --audio, in order",
    )
    command.add_argument(
        "--reference",
        type=Path,
        metavar="FILE",
        help="reference frames: pictures as --image takes them, or .npy float32 latents",
    )
    command.add_argument(
        "--input",
        action="append",
        metavar="NAME=FILE.npy",
        help="an input of the model, such as a camera: one chunk's array, or [chunks, ...]; repeatable",
    )
    command.add_argument(
        "--keys",
        metavar="KEYS",
        help="steer the camera with keys w a s d i j k l: w-10,iw-15,none-5 holds w for 10 video frames, then i and w "
        "for 15, then none for 5",
    )
    command.add_argument(
        "--poses", type=Path, metavar="FILE.npy", help="a recorded camera: [N, 4, 4], camera to world"
    )
    command.add_argument(
        "--intrinsics",
        type=Path,
        metavar="FILE.npy",
        help="focal lengths x, y and centre x, y, [4] or [N, 4], in pixels of a picture of 480x832",
    )
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help=".npy .y4m .mp4; a named pipe is written to as chunks come, and - is stdout",
    )
    command.add_argument(
        "--format", metavar="NAME", help="npy, y4m, mp4, or raw: rgb24 pictures alone; y4m for - and pipes"
    )


def _check_names(arguments: Sequence[str], commands: dict[str, argparse.ArgumentParser]) -> None:
    """Raise a UsageError for an unknown command or option, with the nearest one."""
    if not arguments or arguments[0].startswith("-"):
        return
    command = arguments[0]
    if command not in commands:
        raise UsageError(
            f"there is no command {command!r}{_nearest(command, commands)}; see `seko-run --help`"
        )
    known = [spelled for action in commands[command]._actions for spelled in action.option_strings]
    for argument in arguments[1:]:
        if argument == "--":
            return
        option = argument.split("=", 1)[0]
        if not option.startswith("--") or " " in option:  # with a space it is a value
            continue
        if not any(one.startswith(option) for one in known):  # argparse takes beginnings
            raise UsageError(
                f"`seko-run {command}` has no option {option}{_nearest(option, known)}; "
                f"see `seko-run {command} --help`"
            )


def _nearest(found: str, known: Iterable[str]) -> str:
    import difflib

    near = difflib.get_close_matches(found, list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
