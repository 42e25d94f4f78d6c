"""The command line of `seko-serve`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from seko_serve import __version__
from seko_serve.command_line import Parser, lacking, sentence
from seko_serve.security.certificates import check_certificate
from seko_serve.security.keys import private_bytes, read_keys
from seko_serve.settings import Settings, turn_login

INTERRUPTED = 130  # exit code, as of a shell


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    argument_parser = Parser(
        "seko-serve",
        description="Serve an artifact as live video in a browser.",
        epilog="seko-serve load URL puts viewers on a server and prints what came late: seko-serve load --help. "
        "seko-serve fleet CONFIG serves from many processes: seko-serve fleet --help. "
        "seko-serve simulate TIMES says how many are needed: seko-serve simulate --help.",
    )
    argument_parser.add_argument("--version", action="version", version=f"seko-serve {__version__}")
    argument_parser.add_argument("artifact", type=Path, help="folder of the artifact")
    groups: dict[str, Any] = {"": argument_parser}
    for entry in fields(Settings):
        if entry.metadata:
            group = entry.metadata["group"]
            words = {"dest": entry.name, "default": entry.default, **entry.metadata["words"]}
            if group not in groups:
                groups[group] = argument_parser.add_argument_group(group)
            groups[group].add_argument(words.pop("option", f"--{entry.name.replace('_', '-')}"), **words)
    return argument_parser


def settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of a command line; ValueError if an option's value is invalid."""
    chosen = vars(arguments).copy()
    key_file, secret_file = chosen.pop("api_key_file") or None, chosen.pop("snapshot_key_file")
    key, certificate, uds = chosen["tls_key"], chosen["tls_certificate"], chosen["uds"]
    for option, file in (("--ssl-keyfile", key), ("--ssl-certfile", certificate)):
        if file is not None and not file.is_file():
            raise ValueError(f"{option} {file} is not a file")
    if certificate is not None and key is not None:
        check_certificate(certificate, key, "--ssl-certfile and --ssl-keyfile")
    if uds is not None and not uds.absolute().parent.is_dir():
        raise ValueError(f"--uds {uds}: there is no folder {uds.absolute().parent}")
    chosen["keys"] = tuple(read_keys([], key_file, os.environ))
    chosen["allowed_origins"] = frozenset(arguments.allowed_origins)
    chosen["picture_hosts"] = frozenset(host.lower() for host in arguments.picture_hosts)
    chosen["turn_login"] = turn_login(os.environ)
    chosen["snapshots"] = _snapshots(arguments.snapshots, os.environ)
    if secret_file is not None:
        chosen["snapshot_key"] = private_bytes(secret_file, "--snapshot-key-file")
    return Settings(**chosen)


def _snapshots(chosen: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the place where snapshots are saved: the value of the option, or a folder that belongs to the user."""
    if chosen:
        return None if chosen == "none" else chosen
    state = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(state) / "seko-serve" / "snapshots")


def main(arguments: list[str] | None = None) -> int:
    """Run ``seko-serve`` (serve until a signal ends the process), ``seko-serve load`` (put a load on a server),
    ``seko-serve fleet`` (serve from many processes) or ``seko-serve simulate`` (simulate such a fleet); return the exit
    code.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(words)
    except BrokenPipeError:  # of figures on stdout
        print("seko-serve: whoever read the output stopped reading", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the server takes signals
        print("seko-serve: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("seko_serve"):
            raise
        print(f"seko-serve: {lacking(error)}", file=sys.stderr)
        return 3


def _run(words: list[str]) -> int:
    if words[:1] == ["load"]:
        from seko_serve.load import main as load  # with the client's libraries

        return load(words[1:])
    if words[:1] == ["fleet"]:
        from seko_serve.fleet.command import main as fleet  # with Ray

        return fleet(words[1:])
    if words[:1] == ["simulate"]:
        from seko_serve.simulation.command import main as simulate

        return simulate(words[1:])
    try:
        chosen = settings(parser().parse_args(words))
    except (ValueError, OSError) as error:
        print(f"seko-serve: {sentence(error)}", file=sys.stderr)
        return 2
    from seko_serve.run import serve  # with the server's libraries

    return serve(chosen)
