"""The command ``seko-serve fleet``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

from seko_runtime.errors import SekoRuntimeError
from seko_serve.command_line import Parser, sentence
from seko_serve.fleet.config import read_config
from seko_serve.fleet.directory import DirectoryError
from seko_serve.logs import last_line
from seko_serve.store.base import StoreError


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    argument_parser = Parser(
        "seko-serve fleet",
        description="Serve artifacts from many processes and machines, through Ray Serve.",
    )
    argument_parser.add_argument("config", type=Path, help="the fleet's configuration, a YAML file")
    argument_parser.add_argument(
        "--address",
        help="a running Ray cluster, such as auto or 10.0.0.5:6379: change its fleet and return (default: start Ray on "
        "this machine, and serve until a signal comes)",
    )
    argument_parser.add_argument(
        "--stop", action="store_true", help="with --address: save all sessions and end the fleet"
    )
    return argument_parser


def main(arguments: list[str]) -> int:
    """Run ``seko-serve fleet``; return the exit code."""
    chosen = parser().parse_args(arguments)
    if chosen.stop and chosen.address is None:
        print("seko-serve: --stop ends a fleet in a running cluster: give --address", file=sys.stderr)
        return 2
    try:
        config = read_config(chosen.config)
    except (ValueError, OSError) as error:
        print(f"seko-serve: {sentence(error)}", file=sys.stderr)
        return 3
    except ImportError:
        return _lacking()
    try:
        import ray

        from seko_serve.fleet import deployments
        from seko_serve.fleet.actor_directory import NAMESPACE
        from seko_serve.fleet.checks import check, check_cluster, check_room
        from seko_serve.run import url_host
    except ImportError:
        return _lacking()
    try:
        if chosen.address is None:  # else the files are those of other machines
            check(config, os.environ)
        else:
            check_cluster(chosen.address)
    except (ValueError, OSError, SekoRuntimeError, StoreError, DirectoryError) as error:
        print(f"seko-serve: {sentence(error)}", file=sys.stderr)
        return 3
    reason = ""
    if not sys.stderr.isatty():  # Ray colours what its processes print, also in files
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # After 5 s Ray ends a proxy that a busy machine has not started yet, and `serve.start` fails with it.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    try:
        # Without an address Ray would join a cluster that already runs on this machine, and change its fleet.
        ray.init(address=chosen.address or "local", namespace=NAMESPACE, log_to_driver=True)
        if chosen.stop:
            deployments.remove()
            return 0
        if chosen.address is None:
            check_room(config, ray.cluster_resources())
        deployments.apply(config)
    except (RuntimeError, ConnectionError, ray.exceptions.RayError) as error:
        with suppress(Exception):  # of a Ray that has ended
            reason = deployments.fault() if ray.is_initialized() else ""  # else it would start Ray
        print(
            f"seko-serve: the fleet does not start: {reason or last_line(str(error)) or type(error).__name__}",
            file=sys.stderr,
        )
        return 3
    except KeyboardInterrupt:
        print("seko-serve: interrupted before the fleet was ready", file=sys.stderr)
        return 130
    print(f"seko-serve: the fleet answers at http://{url_host(config.host)}:{config.port}/", file=sys.stderr)
    if chosen.address is None:
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
        deployments.remove()
    return 0


def _lacking() -> int:
    print(
        "seko-serve: a fleet needs Ray Serve; in Seko's folder, pip install ./runtime './serve[ray]'",
        file=sys.stderr,
    )
    return 3
