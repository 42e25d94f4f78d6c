"""The configuration of a fleet: a YAML file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from seko_runtime.arguments import nearest
from seko_runtime.backends.host import check_device_name
from seko_runtime.errors import UsageError
from seko_serve.security.keys import private_bytes, read_keys
from seko_serve.settings import LOOPBACK, Settings, turn_login

MEMORY = "memory"  # the directory of a fleet on one machine
BOX_OPENS_PER_S = 1000.0  # of a key at a box, where all requests come from gateways


@dataclass(frozen=True)
class ModelConfig:
    """An artifact and its boxes.

    Parameters
    ----------
    artifact : str
        The artifact's folder on each machine, or the artifact's packed tar: a file, or the URL of an object such as
        ``s3://bucket/name.tar``. Another artifact needs another file name or URL.
    boxes : int
        Number of boxes; the smallest number if ``max_boxes`` is set.
    max_boxes : int
        Largest number of boxes, if their number follows the load; 0: the number is always ``boxes``.
    gpus, cpus : float
        GPUs and CPU cores that Ray reserves for each box, on one machine: as many GPUs as the artifact has ranks.
    device : str
        The device; see `open_artifact`.
    retired : bool
        Whether the boxes take no new sessions; their present sessions continue.

    Raises
    ------
    ValueError
        If a field is out of range.
    """

    artifact: str
    boxes: int = 1
    max_boxes: int = 0
    gpus: float = 1.0
    cpus: float = 1.0
    device: str = "auto"
    retired: bool = False

    def __post_init__(self) -> None:
        if self.boxes < 1:
            raise ValueError(f"boxes is {self.boxes}, expected 1 or more")
        for name, amount in (("gpus", self.gpus), ("cpus", self.cpus)):
            if not 0 <= amount < float("inf") or (amount > 1 and amount % 1):
                raise ValueError(f"{name} is {amount:g}, expected a number from 0 to 1 or a whole number")
        if self.max_boxes and self.max_boxes < self.boxes:
            raise ValueError(
                f"max_boxes is {self.max_boxes}, expected boxes ({self.boxes}) or more, or 0 for always {self.boxes}"
            )
        try:
            check_device_name(self.device)
        except UsageError as error:
            raise ValueError(str(error)) from None

    @property
    def scales(self) -> bool:
        """Whether the number of boxes changes with the load."""
        return self.max_boxes > 0

    def check_ranks(self, ranks: int) -> None:
        """Raise a ValueError if the number of GPUs of a box differs from the artifact's number of ranks."""
        if ranks > 1 and self.gpus not in (0, ranks):
            raise ValueError(
                f"gpus is {self.gpus:g}, and the artifact has {ranks} ranks: expected gpus {ranks}"
            )


@dataclass(frozen=True)
class FleetConfig:
    """The configuration of a fleet.

    Parameters
    ----------
    models : tuple of ModelConfig
        The artifacts that are served.
    snapshots : str
        Store in which all boxes save sessions: a shared folder, or the URL of an object store.
    directory : str
        ``memory`` for a fleet on one machine, or the URL of a Redis server such as ``redis://10.0.0.5:6379/0``.
    gateways : int
        Number of gateways.
    host, port : str, int
        Address on which Ray's proxies listen for the gateways.
    box_host : str
        Address on which boxes listen. Default: the machine's address, as Ray knows it, or ``127.0.0.1`` if ``host`` is
        a loopback address and there is no API key.
    box_url : str
        Address of a box for the sockets of clients, with ``{host}`` and ``{port}``. Default: the address on which the
        box listens.
    ssl_certfile, ssl_keyfile : str
        Files on each machine with the TLS certificate and key of boxes; empty: boxes use plain HTTP.
    ca_file : str
        File on each machine with the certificates of the authorities that gateways trust for boxes; empty: the
        system's.
    cache : str
        Folder for unpacked artifacts on each machine.
    api_key_file, snapshot_key_file : str
        Files on each machine, as ``seko-serve`` takes them.
    allowed_origins : tuple of str
        Origins of pages that may open sockets; they must include the origin of the gateway's page.
    sessions_per_key : int
        Largest number of sessions of an API key on all boxes; 0: any number.
    opens_per_second : float
        Mean number of sessions and videos that a key may open from an address in a second at each gateway.
    picture_hosts : tuple of str
        Hosts from which a box fetches pictures, as ``seko-serve`` takes them.
    stun, turn : str
        Servers for WebRTC, as ``seko-serve`` takes them.
    shrink_after : float
        Seconds for which a model must have had one box more than needed before a box is ended.
    lease, snapshot_every, queue, videos
        Options of each box, as ``seko-serve`` takes them.

    Raises
    ------
    ValueError
        If a field is out of range.
    """

    models: tuple[ModelConfig, ...]
    snapshots: str
    directory: str = MEMORY
    gateways: int = 1
    host: str = Settings.host
    port: int = Settings.port
    box_host: str = ""
    box_url: str = ""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    ca_file: str = ""
    cache: str = ""
    api_key_file: str = ""
    snapshot_key_file: str = ""
    allowed_origins: tuple[str, ...] = field(default=())
    picture_hosts: tuple[str, ...] = field(default=())
    stun: str = ""
    turn: str = ""
    sessions_per_key: int = 0
    opens_per_second: float = Settings.opens_per_s
    shrink_after: float = 300.0
    lease: float = Settings.lease_s
    snapshot_every: int = Settings.snapshot_every
    queue: int = Settings.queue
    videos: int = Settings.videos

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty, expected one artifact or more")
        if len({model.artifact for model in self.models}) < len(self.models):
            raise ValueError("models has an artifact twice, expected each once")
        if not self.snapshots:
            raise ValueError("snapshots is empty, expected a shared folder or the URL of an object store")
        if self.directory != MEMORY and not self.directory.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(
                f"directory is {self.directory!r}, expected memory or a URL that begins with redis://"
            )
        if self.directory != MEMORY:
            _check_redis_url(self.directory)
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port is {self.port}, expected 0 to 65535")
        if self.box_url:
            _check_box_url(self.box_url)
        if self.gateways < 1:
            raise ValueError(f"gateways is {self.gateways}, expected 1 or more")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ValueError("ssl_certfile and ssl_keyfile belong together: give both")
        if self.sessions_per_key < 0:
            raise ValueError(f"sessions_per_key is {self.sessions_per_key}, expected 0 or more")
        if not 0 <= self.shrink_after < float("inf"):
            raise ValueError(f"shrink_after is {self.shrink_after}, expected a number of seconds from 0 on")
        self._settings(opens_per_s=self.opens_per_second)

    def gateway_settings(self, environment: Mapping[str, str]) -> Settings:
        """Return the settings of a gateway; parameters and errors are those of `box_settings`."""
        settings = self.box_settings(Path(), self.host, environment, "auto")
        return replace(settings, opens_per_s=self.opens_per_second)

    def box_settings(
        self, artifact: Path, host: str, environment: Mapping[str, str], device: str
    ) -> Settings:
        """Return the settings of a box, on the machine whose files it reads.

        Parameters
        ----------
        artifact : Path
            The artifact's folder.
        host : str
            Address to listen on, at any port.
        environment : mapping of str to str
            Environment variables, which may include an API key.
        device : str
            The device.

        Raises
        ------
        ValueError, OSError
            If a setting is out of range, or a file cannot be read.
        """
        return self._settings(
            artifact=artifact,
            device=device,
            host=host,
            keys=self._keys(environment),
            opens_per_s=BOX_OPENS_PER_S,
            turn_login=turn_login(environment),
            snapshot_key=private_bytes(Path(self.snapshot_key_file), "snapshot_key_file")
            if self.snapshot_key_file
            else None,
        )

    def _settings(self, *, artifact: Path = Path(), **others: Any) -> Settings:
        """Return settings for which no file is read; the sentences of errors name fields in place of options."""
        try:
            return Settings(
                artifact,
                port=0,
                allowed_origins=frozenset(self.allowed_origins) | self._own_origins(),
                tls_key=Path(self.ssl_keyfile) if self.ssl_keyfile else None,
                tls_certificate=Path(self.ssl_certfile) if self.ssl_certfile else None,
                lease_s=self.lease,
                queue=self.queue,
                snapshots=self.snapshots,
                snapshot_every=self.snapshot_every,
                videos=self.videos,
                picture_hosts=frozenset(self.picture_hosts),
                stun=self.stun,
                turn=self.turn,
                **others,
            )
        except ValueError as error:  # of an option, whose name is that of a field but for hyphens
            fields_named = re.sub(r"--([a-z-]+)", lambda name: name[1].replace("-", "_"), str(error))
            raise ValueError(fields_named) from None

    def box_address(self, machine: str, environment: Mapping[str, str]) -> str:
        """Return the address on which a box listens.

        Parameters
        ----------
        machine : str
            The machine's address, as Ray knows it.
        environment : mapping of str to str
            The environment, which may have an API key.

        Raises
        ------
        ValueError, OSError
            If the file of API keys cannot be read.
        """
        if self.box_host:
            return self.box_host
        return LOOPBACK[0] if self.host in LOOPBACK and not self._keys(environment) else machine

    def _keys(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        key_file = Path(self.api_key_file) if self.api_key_file else None
        return tuple(read_keys([], key_file, environment))

    def _own_origins(self) -> frozenset[str]:
        """Origins of the gateway's page, if it is on this machine alone; others are configured."""
        if self.host not in LOOPBACK:
            return frozenset()
        return frozenset(f"http://{name}:{self.port}" for name in ("127.0.0.1", "[::1]", "localhost"))

    def group(self, model: ModelConfig) -> str:
        """Return the name of the group of a model's boxes: a hash of the artifact and the settings."""
        relevant = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("models", "gateways", "host", "port", "shrink_after")
        } | {
            name: value
            for name, value in asdict(model).items()
            if name not in ("boxes", "max_boxes", "retired")
        }
        relevant["own_origins"] = sorted(self._own_origins())
        return f"seko-box-{hashlib.sha256(repr(sorted(relevant.items())).encode()).hexdigest()[:12]}"


def _check_box_url(url: str) -> None:
    """Raise a ValueError if ``box_url`` is no address for sockets, or has other fields than ``{host}`` and
    ``{port}``."""
    try:
        filled = url.format(host="host", port=1)
    except (KeyError, IndexError, ValueError, AttributeError):
        filled = ""
    if not filled.startswith(("ws://", "wss://")):
        raise ValueError(
            f"box_url is {url!r}, expected an address such as wss://{{host}}.example.org:{{port}}"
        )


def _check_redis_url(url: str) -> None:
    """Raise a ValueError, without a password, if the URL of a Redis server has an impossible port or another path than
    the number of a database, in whose place the client's library would take database 0."""
    parts, example = urlsplit(url), "expected a URL such as redis://10.0.0.5:6379/0"
    try:
        valid = parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"directory has a port that is no number from 1 to 65535, {example}")
    if parts.scheme != "unix" and not re.fullmatch("/?|/[0-9]+", parts.path):
        raise ValueError(f"directory ends in a path that is no number of a database, {example}")


def read_config(file: Path) -> FleetConfig:
    """Return the configuration in a file.

    Raises
    ------
    ValueError
        If the file is no YAML, or a field is unknown, missing, there twice, of another type, or out of range; the
        message names the file and the field.
    OSError
        If the file cannot be read.
    """
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # has no types
        """A loader that refuses a field that a table has twice; YAML's own takes the last one."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: dict[str, int] = {}
            for key, _ in node.value:
                name, line = str(key.value), key.start_mark.line + 1
                if name in seen:
                    raise ValueError(
                        f"{file.name} has the field {name!r} twice, in lines {seen[name]} and {line}"
                    )
                seen[name] = line
            table: dict[Any, Any] = super().construct_mapping(node, deep)
            return table

    try:
        table = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file.name} is no YAML: {str(error).splitlines()[0]}") from None
    config = _read(FleetConfig, table, file.name)
    assert isinstance(config, FleetConfig)
    return config


def _read(kind: type[Any], table: object, where: str) -> Any:
    """Return a dataclass that is filled from a table of the file; errors begin with ``where``."""
    if not isinstance(table, dict):
        raise ValueError(f"{where} is no table of fields and values")
    hints, values = get_type_hints(kind), {}
    unknown = set(table) - set(hints)
    if unknown:
        name = sorted(map(str, unknown))[0]
        raise ValueError(f"{where} has the unknown field {name!r}{nearest(name, hints)}")
    for entry in fields(kind):
        if entry.name in table:
            values[entry.name] = _value(hints[entry.name], table[entry.name], f"{where}: {entry.name}")
        elif entry.default is MISSING:
            raise ValueError(f"{where} lacks the field {entry.name!r}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _value(hint: Any, value: object, name: str) -> object:
    if hint in (tuple[str, ...], tuple[ModelConfig, ...]):
        if not isinstance(value, list):
            raise ValueError(f"{name} is no list")
        if hint == tuple[str, ...]:
            return tuple(_value(str, item, name) for item in value)
        return tuple(_read(ModelConfig, item, f"{name}[{number}]") for number, item in enumerate(value))
    right = isinstance(value, int | float if hint is float else hint) and isinstance(value, bool) == (
        hint is bool
    )
    if not right:
        raise ValueError(f"{name} is {value!r}, expected a value of type {hint.__name__}")
    return value
