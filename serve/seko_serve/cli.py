"""The command line of `seko-serve`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
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
    argument_parser.add_argument("artifact", type=Path, help="folder of the artifact")
    argument_parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    where = argument_parser.add_argument_group("where it listens")
    where.add_argument("--host", default="127.0.0.1", help="address (default: this machine alone)")
    where.add_argument("--port", type=int, default=8000)
    where.add_argument("--uds", type=Path, help="a Unix socket instead")
    where.add_argument("--ssl-keyfile", type=Path)
    where.add_argument("--ssl-certfile", type=Path)
    where.add_argument("--root-path", default="", help="path under which a proxy serves it")
    who = argument_parser.add_argument_group("who may call")
    who.add_argument(
        "--api-key-file", type=Path, help=f"one key a line, mode 0600; {ENVIRONMENT} holds one too"
    )
    who.add_argument("--allowed-origins", nargs="*", default=[], help="origins of pages on other hosts")
    much = argument_parser.add_argument_group("how much")
    much.add_argument("--max-sessions", type=int, help="sessions at a time (default: the artifact's rows)")
    much.add_argument("--lease", type=float, default=60.0, help="seconds that a session outlives its socket")
    much.add_argument(
        "--opens-per-second",
        type=float,
        default=1.0,
        help="sessions and videos that a key opens from an address, in the long run (default: 1)",
    )
    much.add_argument(
        "--queue", type=int, default=16, help="requests for a session that may wait (default: 16)"
    )
    much.add_argument(
        "--videos", type=int, default=32, help="videos of /v1/videos that wait or are kept; 0: none are made"
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
        default=8,
        help="chunks from one snapshot of a session to the next (default: 8); 0: only when its viewer is gone or the "
        "server stops",
    )
    saved.add_argument(
        "--snapshot-keep",
        type=float,
        default=3600.0,
        help="seconds that a folder keeps a session (default: 3600)",
    )
    saved.add_argument(
        "--snapshot-key-file",
        type=Path,
        help="a secret of 32 bytes or more, where others may write to the store",
    )
    argument_parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return argument_parser


def settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings of a command line; ValueError if an option's value is invalid."""
    for option in ("ssl_keyfile", "ssl_certfile"):
        file = getattr(arguments, option)
        if file is not None and not file.is_file():
            raise ValueError(f"--{option.replace('_', '-')} {file} is not a file")
    if arguments.ssl_certfile is not None and arguments.ssl_keyfile is not None:
        check_certificate(arguments.ssl_certfile, arguments.ssl_keyfile, "--ssl-certfile and --ssl-keyfile")
    if arguments.uds is not None and not arguments.uds.absolute().parent.is_dir():
        raise ValueError(f"--uds {arguments.uds}: there is no folder {arguments.uds.absolute().parent}")
    return Settings(
        artifact=arguments.artifact,
        device=arguments.device,
        host=arguments.host,
        port=arguments.port,
        uds=arguments.uds,
        keys=tuple(read_keys([], arguments.api_key_file, os.environ)),
        allowed_origins=frozenset(arguments.allowed_origins),
        tls_key=arguments.ssl_keyfile,
        tls_certificate=arguments.ssl_certfile,
        root_path=arguments.root_path,
        max_sessions=arguments.max_sessions,
        lease_s=arguments.lease,
        opens_per_s=arguments.opens_per_second,
        queue=arguments.queue,
        snapshots=_snapshots(arguments.snapshots, os.environ),
        snapshot_every=arguments.snapshot_every,
        snapshot_keep_s=arguments.snapshot_keep,
        snapshot_key=None
        if arguments.snapshot_key_file is None
        else private_bytes(arguments.snapshot_key_file, "--snapshot-key-file"),
        videos=arguments.videos,
        video_folder=arguments.video_folder,
        picture_hosts=frozenset(host.lower() for host in arguments.picture_hosts),
        log_level=arguments.log_level,
    )


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
