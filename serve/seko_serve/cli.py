"""The command line of `seko-serve`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from seko_serve.command_line import Parser, lacking, sentence
from seko_serve.security.certificates import check_certificate
from seko_serve.security.keys import ENVIRONMENT, private_bytes, read_keys
from seko_serve.settings import Settings

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
    defaults = {entry.name: entry.default for entry in fields(Settings) if entry.default is not MISSING}
    argument_parser.set_defaults(**defaults)
    argument_parser.add_argument("artifact", type=Path, help="folder of the artifact")
    argument_parser.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    where = argument_parser.add_argument_group("where it listens")
    where.add_argument("--host", help="address (default: this machine alone)")
    where.add_argument("--port", type=int)
    where.add_argument("--uds", type=Path, help="a Unix socket instead")
    where.add_argument("--ssl-keyfile", dest="tls_key", type=Path, metavar="FILE")
    where.add_argument("--ssl-certfile", dest="tls_certificate", type=Path, metavar="FILE")
    where.add_argument("--root-path", help="path under which a proxy serves it")
    who = argument_parser.add_argument_group("who may call")
    who.add_argument(
        "--api-key-file", type=Path, help=f"one key a line, mode 0600; {ENVIRONMENT} holds one too"
    )
    who.add_argument("--allowed-origins", nargs="*", default=[], help="origins of pages on other hosts")
    much = argument_parser.add_argument_group("how much")
    much.add_argument("--max-sessions", type=int, help="sessions at a time (default: the artifact's rows)")
    much.add_argument(
        "--lease",
        dest="lease_s",
        type=float,
        metavar="SECONDS",
        help="seconds that a session outlives its socket",
    )
    much.add_argument(
        "--opens-per-second",
        dest="opens_per_s",
        type=float,
        metavar="NUMBER",
        help="sessions and videos that a key opens from an address, in the long run (default: %(default)g)",
    )
    much.add_argument("--queue", type=int, help="requests for a session that may wait (default: %(default)s)")
    much.add_argument(
        "--videos", type=int, help="videos of /v1/videos that wait or are kept; 0: none are made"
    )
    much.add_argument(
        "--video-folder",
        type=Path,
        help="where their files lie for an hour; it holds nothing else (default: temporary)",
    )
    much.add_argument(
        "--picture-hosts",
        nargs="*",
        default=[],
        metavar="HOST",
        help="from where a picture is fetched that /v1/videos names by its address (default: nowhere)",
    )
    saved = argument_parser.add_argument_group("what outlives the process")
    saved.add_argument(
        "--snapshots",
        default="",
        help="a folder that holds nothing else, s3://BUCKET/PREFIX, or none (default: seko-serve/snapshots in the "
        "user's state folder)",
    )
    saved.add_argument(
        "--snapshot-every",
        type=int,
        help="chunks from one snapshot of a session to the next (default: %(default)s); 0: only when its viewer is "
        "gone or the server stops",
    )
    saved.add_argument(
        "--snapshot-keep",
        dest="snapshot_keep_s",
        type=float,
        metavar="SECONDS",
        help="seconds that a folder keeps a session (default: %(default)g)",
    )
    saved.add_argument(
        "--snapshot-key-file",
        type=Path,
        help="a secret of 32 bytes or more, where others may write to the store",
    )
    argument_parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    return argument_parser


def settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of a command line; ValueError if an option's value is invalid."""
    chosen = vars(arguments).copy()
    key_file, secret_file = chosen.pop("api_key_file"), chosen.pop("snapshot_key_file")
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
    chosen["snapshots"] = _snapshots(arguments.snapshots, os.environ)
    if secret_file is not None:
        chosen["snapshot_key"] = private_bytes(secret_file, "--snapshot-key-file")
    return Settings(**chosen)


def _snapshots(chosen: str, environment: Mapping[str, str]) -> str | None:
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
