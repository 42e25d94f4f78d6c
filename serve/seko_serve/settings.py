"""Settings of one server process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Settings:
    """The settings of a server.

    Parameters
    ----------
    artifact : Path
        The artifact's folder.
    device : str
        As `open_artifact` takes it.
    host, port : str, int
        Where it listens; another host than a loopback address needs API keys.
    uds : Path or None
        A Unix socket to listen on instead.
    keys : tuple of str
        API keys; none: anyone who reaches the address may call.
    allowed_origins : frozenset of str
        Origins of pages on other hosts that may open sockets.
    tls_key, tls_certificate : Path or None
        Files for TLS.
    root_path : str
        Path under which a proxy serves it.
    max_sessions : int or None
        Sessions at a time; default: the rows of the artifact.
    lease_s : float
        Seconds that a session outlives its socket.
    opens_per_s : float
        Sessions and videos that a key may open from an address in a second, in the long run; eight times that at once.
    videos : int
        Videos of ``POST /v1/videos`` that may wait, be made or be kept at a time; 0: none.
    video_folder : Path or None
        Where their files lie; default: a temporary folder.
    log_level : str
        debug, info, warning or error.

    Raises
    ------
    ValueError
        If a setting is out of range, or the address is open to others without a key.
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
    videos: int = 32
    video_folder: Path | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
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
        if (self.tls_key is None) != (self.tls_certificate is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile belong together: give both")
        if self.uds is None and self.host not in LOOPBACK and not self.keys:
            raise ValueError(
                f"--host {self.host} is reached by others, and there is no API key: give --api-key-file, or set "
                "SEKO_SERVE_API_KEY"
            )
