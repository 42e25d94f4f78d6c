"""The settings of one server process."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from seko_runtime.backends.host import check_device_name
from seko_runtime.errors import UsageError

LEAST_KEY_BYTES = 32
ROOT_PATH = re.compile(r"(/[\w.~%-]+)+", re.ASCII)
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Settings:
    """The settings of one server process, such as address, keys and limits.

    Parameters
    ----------
    artifact : Path
        Folder of the artifact that is served.
    device : str
        Device on which the artifact is opened, as `open_artifact` takes it.
    host, port : str, int
        Address on which the server listens; a host that is no loopback address needs API keys.
    uds : Path or None
        Path of a Unix socket on which the server listens instead of ``host`` and ``port``.
    keys : tuple of str
        API keys of the server; without keys, anyone who reaches the address may call.
    allowed_origins : frozenset of str
        Origins of pages on other hosts that may open sockets.
    tls_key, tls_certificate : Path or None
        Files of the TLS key and certificate.
    root_path : str
        URL path under which a proxy serves this server.
    max_sessions : int or None
        Largest number of sessions at a time; default: the number of rows of the artifact.
    lease_s : float
        Seconds for which a session stays open after its socket was lost.
    opens_per_s : float
        Number of sessions and videos that a key may open from an address in a second, in the long run; eight times as
        many at once.
    queue : int
        Largest number of requests for a session that wait at a time.
    snapshots : str or None
        Place where sessions are saved: a folder, or the URL of an object store such as ``s3://bucket/prefix``; None:
        sessions are not saved.
    snapshot_every : int
        Number of chunks from one snapshot of a running session to the next; 0: snapshots only when the viewer is gone
        or the server stops.
    snapshot_keep_s : float
        Seconds after which a saved session is removed from a folder of snapshots.
    snapshot_key : bytes or None
        A secret of at least 32 bytes: only snapshots that were written with this key are read.
    videos : int
        Number of videos of ``POST /v1/videos`` that may wait, be made or be kept at a time; 0: none.
    video_folder : Path or None
        Folder of the video files; default: a temporary folder.
    picture_hosts : frozenset of str
        Hosts from which a picture is fetched that a request names by its web address.
    log_level : str
        Lowest level of log lines: debug, info, warning or error.

    Raises
    ------
    ValueError
        If a setting is out of range, ``device`` is no name of a device, or other machines can reach the
        address and there is no API key.
    """

    artifact: Path
    device: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    keys: tuple[str, ...] = ()
    allowed_origins: frozenset[str] = field(default_factory=frozenset)
    tls_key: Path | None = None
    tls_certificate: Path | None = None
    root_path: str = ""
    max_sessions: int | None = None
    lease_s: float = 60.0
    opens_per_s: float = 1.0
    queue: int = 16
    snapshots: str | None = None
    snapshot_every: int = 8
    snapshot_keep_s: float = 3600.0
    snapshot_key: bytes | None = field(default=None, repr=False)
    videos: int = 32
    video_folder: Path | None = None
    picture_hosts: frozenset[str] = field(default_factory=frozenset)
    log_level: str = "info"

    def __post_init__(self) -> None:
        try:
            check_device_name(self.device)
        except UsageError:
            raise ValueError(f"--device {self.device}: expected auto, cpu, cuda or cuda:N") from None
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"--port {self.port}: expected 0 to 65535")
        if self.max_sessions is not None and self.max_sessions < 1:
            raise ValueError(f"--max-sessions {self.max_sessions}: expected 1 or more")
        if not 0 < self.opens_per_s < 1e6:
            raise ValueError(f"--opens-per-second {self.opens_per_s}: expected a number above 0")
        if self.videos < 0:
            raise ValueError(f"--videos {self.videos}: expected 0 or more")
        if not 0 < self.lease_s < 86_400:
            raise ValueError(f"--lease {self.lease_s}: expected seconds above 0, at most a day")
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
