"""The settings of one server process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seko_runtime.backends.host import check_device_name
from seko_runtime.errors import UsageError
from seko_runtime.sessions.snapshot import LEAST_KEY_BYTES

ROOT_PATH = re.compile(r"(/[\w.~%-]+)+", re.ASCII)
LOOPBACK = ("127.0.0.1", "::1", "localhost")


LISTENS, CALLS, MUCH, SAVED = "where it listens", "who may call", "how much", "what outlives the process"


def _option(default: Any, group: str, meaning: str | None = None, *, shown: bool = True, **words: Any) -> Any:
    """Return a field of `Settings` that is an option of the command line: its group there, its meaning, and further
    words for argparse. ``option`` is its name there, if it is not the field's."""
    return field(default=default, repr=shown, metadata={"group": group, "words": {"help": meaning, **words}})


def turn_login(environment: Mapping[str, str]) -> str:
    """Return the name and the password, ``USER:PASSWORD``, for a server that relays WebRTC; empty if there are none."""
    return environment.get("SEKO_SERVE_TURN_LOGIN", "")


@dataclass(frozen=True)
class Settings:
    """The settings of one server process, such as address, keys and limits; ``artifact`` is the folder that it serves.

    The command line reads files of keys and of a secret; here ``keys`` are the API keys, and ``snapshot_key`` is the
    secret with which snapshots are written and read. Without ``snapshots`` sessions are not saved.

    Raises
    ------
    ValueError
        If a setting is out of range, ``device`` is no name of a device, or other machines can reach the
        address and there is no API key.
    """

    artifact: Path
    device: str = _option("auto", "", "auto, cpu, cuda or cuda:N")
    host: str = _option("127.0.0.1", LISTENS, "address (default: this machine alone)")
    port: int = _option(8000, LISTENS, type=int)
    uds: Path | None = _option(None, LISTENS, "a Unix socket instead", type=Path)
    tls_key: Path | None = _option(None, LISTENS, option="--ssl-keyfile", type=Path, metavar="FILE")
    tls_certificate: Path | None = _option(None, LISTENS, option="--ssl-certfile", type=Path, metavar="FILE")
    root_path: str = _option("", LISTENS, "path under which a proxy serves it")
    keys: tuple[str, ...] = _option(
        (),
        CALLS,
        "one key a line, mode 0600; SEKO_SERVE_API_KEY holds one too",
        option="--api-key-file",
        dest="api_key_file",
        type=Path,
    )
    allowed_origins: frozenset[str] = _option(
        frozenset(), CALLS, "origins of pages on other hosts", nargs="*"
    )
    stun: str = _option(
        "", LISTENS, "server by which WebRTC learns its address: stun:HOST:PORT", metavar="URL"
    )
    turn: str = _option(
        "",
        LISTENS,
        "server that relays WebRTC: turn:HOST:PORT; SEKO_SERVE_TURN_LOGIN holds USER:PASSWORD",
        metavar="URL",
    )
    turn_login: str = field(default="", repr=False)
    max_sessions: int | None = _option(
        None, MUCH, "sessions at a time (default: the artifact's rows)", type=int
    )
    lease_s: float = _option(
        60.0,
        MUCH,
        "seconds that a session outlives its socket",
        option="--lease",
        type=float,
        metavar="SECONDS",
    )
    opens_per_s: float = _option(
        1.0,
        MUCH,
        "sessions and videos that a key opens from an address, in the long run; eight times as many at once "
        "(default: %(default)g)",
        option="--opens-per-second",
        type=float,
        metavar="NUMBER",
    )
    lead_s: float | None = _option(
        None,
        MUCH,
        "seconds before a player needs a chunk at which it is begun, so that keys act sooner, but none may take longer "
        "(default: as soon as two are unshown at most)",
        option="--lead",
        type=float,
        metavar="SECONDS",
    )
    queue: int = _option(16, MUCH, "requests for a session that may wait (default: %(default)s)", type=int)
    videos: int = _option(32, MUCH, "videos of /v1/videos that wait or are kept; 0: none are made", type=int)
    video_folder: Path | None = _option(
        None,
        MUCH,
        "where their files lie for an hour; it holds nothing else (default: temporary)",
        type=Path,
    )
    picture_hosts: frozenset[str] = _option(
        frozenset(),
        MUCH,
        "from where a picture is fetched that a request names by its address (default: nowhere)",
        nargs="*",
        metavar="HOST",
    )
    snapshots: str | None = _option(
        None,
        SAVED,
        "a folder that holds nothing else, s3://BUCKET/PREFIX, or none (default: seko-serve/snapshots in the user's "
        "state folder)",
    )
    snapshot_every: int = _option(
        8,
        SAVED,
        "chunks from one snapshot of a session to the next (default: %(default)s); 0: only when its viewer is gone or "
        "the server stops",
        type=int,
    )
    snapshot_keep_s: float = _option(
        3600.0,
        SAVED,
        "seconds that a folder keeps a session (default: %(default)g)",
        option="--snapshot-keep",
        type=float,
        metavar="SECONDS",
    )
    snapshot_key: bytes | None = _option(
        None,
        SAVED,
        "a secret of 32 bytes or more, where others may write to the store",
        shown=False,
        option="--snapshot-key-file",
        dest="snapshot_key_file",
        type=Path,
    )
    log_level: str = _option("info", "", choices=["debug", "info", "warning", "error"])

    def __post_init__(self) -> None:
        try:
            check_device_name(self.device)
        except UsageError:
            raise ValueError(f"--device {self.device}: expected auto, cpu, cuda or cuda:N") from None
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"--port {self.port}: expected 0 to 65535")
        for kind, address in (("stun", self.stun), ("turn", self.turn)):
            if address and not re.fullmatch(
                rf"{kind}s?:[\w.\-\[\]:]+(\?transport=(udp|tcp))?", address, re.ASCII
            ):
                raise ValueError(
                    f"--{kind} {address}: expected an address such as {kind}:{kind}.example.org:3478"
                )
        if self.turn_login and ":" not in self.turn_login:
            raise ValueError("SEKO_SERVE_TURN_LOGIN has no colon, expected USER:PASSWORD")
        if not (self.turn_login.isascii() and self.turn_login.isprintable()):
            raise ValueError(
                "SEKO_SERVE_TURN_LOGIN has letters that no header can carry, expected printable ASCII"
            )
        if self.max_sessions is not None and self.max_sessions < 1:
            raise ValueError(f"--max-sessions {self.max_sessions}: expected 1 or more")
        if not 0 < self.opens_per_s < 1e6:
            raise ValueError(f"--opens-per-second {self.opens_per_s}: expected a number above 0")
        if self.videos < 0:
            raise ValueError(f"--videos {self.videos}: expected 0 or more")
        if not 0 < self.lease_s < 86_400:
            raise ValueError(f"--lease {self.lease_s}: expected seconds above 0, at most a day")
        if self.lead_s is not None and not 0 < self.lead_s < 86_400:
            raise ValueError(f"--lead {self.lead_s}: expected seconds above 0, at most a day")
        for host in self.picture_hosts:
            if not host or urlsplit(f"//{host}").netloc != host or host != host.lower() or "@" in host:
                raise ValueError(f"--picture-hosts {host}: expected a host such as pictures.example.org")
        if self.queue < 0:
            raise ValueError(f"--queue {self.queue}: expected 0 or more")
        if self.snapshot_every < 0:
            raise ValueError(f"--snapshot-every {self.snapshot_every}: expected 0 or more")
        if not self.snapshot_keep_s > 0:
            raise ValueError(f"--snapshot-keep {self.snapshot_keep_s}: expected seconds above 0")
        if self.root_path and not ROOT_PATH.fullmatch(self.root_path):
            raise ValueError(f"--root-path {self.root_path}: expected a path such as /seko")
        for origin in self.allowed_origins - {"*"}:
            parts = urlsplit(origin)
            if not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}":
                raise ValueError(
                    f"--allowed-origins {origin}: expected an origin such as https://video.example.org"
                )
        if self.snapshot_key is not None and len(self.snapshot_key) < LEAST_KEY_BYTES:
            raise ValueError(
                f"--snapshot-key-file has {len(self.snapshot_key)} bytes, expected {LEAST_KEY_BYTES} or more"
            )
        if (self.tls_key is None) != (self.tls_certificate is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile belong together: give both")
        if self.uds is None and self.host not in LOOPBACK and not self.keys:
            raise ValueError(
                f"--host {self.host} is reached by others, and there is no API key: give --api-key-file, or set "
                "SEKO_SERVE_API_KEY"
            )
