"""Options of the command line, each by what it does to a server."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from websockets.asyncio.client import connect

import seko_serve.run
from seko_runtime import Pool
from seko_serve.cli import main, parser, settings
from seko_serve.run import Server

from .conftest import toy_opener
from .test_server import PROMPT

KEY = "a-key-of-the-first-tenant"


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Start the server of a command line, over the toy's pool."""

    @contextmanager
    def opened(*_: object) -> Iterator[Pool]:
        with toy_opener() as pool:
            yield pool

    monkeypatch.setattr(seko_serve.run, "pool_of", opened)
    monkeypatch.delenv("SEKO_SERVE_API_KEY", raising=False)

    @contextmanager
    def started(*options: object) -> Iterator[Server]:
        arguments = ["toy", "--port", "0", "--snapshots", "none", *map(str, options)]
        server = seko_serve.run.server(settings(parser().parse_args(arguments)))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        thread.start()
        while not server.started and thread.is_alive():
            thread.join(0.01)
        try:
            assert thread.is_alive()
            yield server
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()

    return started


def port(server: Server) -> int:
    (listener,) = server.servers
    return int(listener.sockets[0].getsockname()[1])


def get(url: str, **headers: str) -> tuple[int, Any]:
    with urlopen(Request(url, headers=headers), timeout=20) as answer:
        return answer.status, json.loads(answer.read())


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a key and a certificate of 127.0.0.1, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    key_file, certificate_file = folder / "key.pem", folder / "certificate.pem"
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    certificate_file.write_bytes(built.public_bytes(serialization.Encoding.PEM))
    return key_file, certificate_file


async def test_tls_for_pages_and_sockets(serve: Callable[..., Any], tmp_path: Path) -> None:
    key_file, certificate_file = certificate(tmp_path)
    trusted = ssl.create_default_context(cafile=str(certificate_file))
    with serve("--ssl-keyfile", key_file, "--ssl-certfile", certificate_file) as server:
        url = f"https://127.0.0.1:{port(server)}"
        with urlopen(f"{url}/health", timeout=20, context=trusted) as answer:
            assert answer.status == 200
        where = f"wss://127.0.0.1:{port(server)}/v1/sessions/x/stream"
        async with connect(where, ssl=trusted, subprotocols=["seko.v1"]) as stream:  # type: ignore[list-item]
            assert json.loads(await stream.recv())["code"] == "unauthorized"
            await stream.wait_closed()
            assert stream.close_code == 1008


def test_a_socket_file_in_place_of_a_port(serve: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with serve("--uds", path), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: my.example\r\nConnection: close\r\n\r\n")
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 200")
    assert not path.exists()
    with serve("--uds", path):
        path.unlink()
        path.touch()  # another's
    assert path.exists()


def test_a_proxy_serves_it_below_a_path(serve: Callable[..., Any]) -> None:
    with serve("--root-path", "/seko") as server:
        url = f"http://127.0.0.1:{port(server)}"
        assert get(f"{url}/health")[0] == 200  # as the proxy asks, which has taken the path away
        assert get(f"{url}/openapi.json")[1]["servers"] == [{"url": "/seko"}]
        with urlopen(f"{url}/", timeout=20) as answer:
            page = answer.read().decode()
        with urlopen(f"{url}/page/video.js", timeout=20) as answer:
            assert answer.status == 200
        assert 'src="/' not in page
        assert 'href="/' not in page


def test_keys_open_an_address_of_the_network(
    serve: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["toy", "--host", "0.0.0.0"]) == 2
    assert "--api-key-file" in capsys.readouterr().err
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    with serve("--host", "0.0.0.0", "--api-key-file", keys) as server:
        url = f"http://127.0.0.1:{port(server)}/v1/models"
        assert get(url, authorization=f"Bearer {KEY}", host="my.example")[0] == 200


def test_numbers_reach_the_server(serve: Callable[..., Any]) -> None:
    options = (
        "--max-sessions",
        1,
        "--lease",
        7,
        "--opens-per-second",
        1e-5,
        "--allowed-origins",
        "https://a.example",
    )
    with serve(*options) as server:
        url = f"http://127.0.0.1:{port(server)}"
        assert get(f"{url}/ready")[1]["capacity"] == 1
        headers = {"origin": "https://a.example", "content-type": "application/json"}
        body = json.dumps({"prompt": PROMPT}).encode()
        with urlopen(Request(f"{url}/v1/sessions", body, headers), timeout=20) as answer:
            assert json.loads(answer.read())["lease_s"] == 7


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--device", "gpu"], "--device gpu: expected auto, cpu, cuda or cuda:N"),
        (["--lease", "0"], "--lease"),
        (["--max-sessions", "0"], "--max-sessions"),
        (["--videos", "-1"], "--videos"),
        (["--picture-hosts", "https://a.example"], "--picture-hosts"),
        (["--picture-hosts", "a@b.example"], "--picture-hosts"),
        (["--opens-per-second", "0"], "--opens-per-second"),
        (["--lead", "0"], "--lead 0.0: expected seconds above 0"),
        (["--queue", "-1"], "--queue"),
        (["--stun", "turn:a.example"], "--stun turn:a.example"),
        (["--turn", "a.example:3478"], "--turn a.example:3478"),
        (["--ssl-keyfile", __file__], "--ssl-certfile"),
        (["--ssl-keyfile", "/nowhere/key", "--ssl-certfile", __file__], "--ssl-keyfile /nowhere/key"),
        (["--ssl-keyfile", __file__, "--ssl-certfile", "/nowhere/it"], "--ssl-certfile /nowhere/it"),
        (["--uds", "/nowhere/socket"], "no folder /nowhere"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
        (["--lease", "nan"], "--lease"),
        (["--allowed-origins", "video.example.org"], "video.example.org"),
        (["--root-path", "seko"], "expected a path such as /seko"),
        (["--root-path", "/seko/"], "expected a path such as /seko"),
        (["--root-path", "//seko"], "expected a path such as /seko"),
        (["--root-path", "/seko?a"], "expected a path such as /seko"),
        (["--ssl-keyfile", __file__, "--ssl-certfile", __file__], "are no certificate and its key"),
    ],
)
def test_options_that_cannot_be_are_named(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["toy", *options]) == 2
    printed = capsys.readouterr().err
    assert named in printed
    assert printed.count("\n") == 1
    assert "Errno" not in printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: artifact; see `seko-serve --help`"),
        (["toy", "--prot", "1"], "unrecognized arguments: --prot 1; see `seko-serve --help`"),
        (["toy", "--port", "x"], "argument --port: invalid int value: 'x'; see `seko-serve --help`"),
        (["load"], "the following arguments are required: url; see `seko-serve load --help`"),
        (["fleet"], "the following arguments are required: config; see `seko-serve fleet --help`"),
        (["simulate"], "the following arguments are required: times; see `seko-serve simulate --help`"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"seko-serve: {sentence}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["simulate", "/nowhere/times.json"], "/nowhere/times.json was not found; check the path"),
        (["simulate", "http://127.0.0.1:1/metrics"], "http://127.0.0.1:1/metrics: Connection refused"),
    ],
)
def test_a_file_or_address_that_is_not_there_is_named(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("simpy", reason="needs seko-serve[simulate]")
    assert main(arguments) == 3
    assert capsys.readouterr().err == f"seko-serve: {sentence}\n"


@pytest.mark.parametrize(
    ("package", "command", "lacking", "extra"),
    [
        *(
            (package, [], f"the package {package} is not installed", "./serve")
            for package in ("av", "uvicorn", "websockets")
        ),
        ("simpy", ["simulate"], "a simulation needs SimPy", "'./serve[simulate]'"),
        pytest.param(
            *("ray", ["fleet"], "a fleet needs Ray Serve", "'./serve[ray]'"),
            marks=pytest.mark.skipif(find_spec("yaml") is None, reason="needs seko-serve[ray]"),
        ),
    ],
)
def test_a_library_that_is_not_installed_is_named(
    package: str, command: list[str], lacking: str, extra: str, tmp_path: Path
) -> None:
    """In a process of its own, where the library cannot be imported."""
    file = tmp_path / "fleet.yaml"
    file.write_text("models: [{artifact: a}]\nsnapshots: s\n")
    program = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "from seko_serve.cli import main; sys.exit(main(sys.argv[2:]))"
    )
    words = [sys.executable, "-c", program, package, *command, str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == f"seko-serve: {lacking}; in Seko's folder, pip install ./runtime {extra}\n"


@pytest.mark.usefixtures("_own_log", "serve")
def test_a_folder_of_videos_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    folder = tmp_path / "file" / "videos"
    assert main(["toy", "--port", "0", "--snapshots", "none", "--video-folder", str(folder)]) == 3
    message = capsys.readouterr().err.splitlines()[-1]
    assert (
        message == f"seko-serve: --video-folder {folder} cannot be made: Not a directory; give another folder"
    )


@pytest.fixture
def _own_log() -> Iterator[None]:
    """Give the root logger back as it was."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("_own_log")
@pytest.mark.parametrize(("name", "named"), [("nothing", "nothing"), ("", "manifest.json")])
def test_an_artifact_that_is_not_there_ends_it_with_a_sentence(
    name: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--port", "0", "--snapshots", "none", "--log-level", "error"]
    assert main([str(tmp_path / name), *options]) == 3
    assert logging.getLogger().level == logging.ERROR
    printed = capsys.readouterr().err
    assert named in printed
    assert "Traceback" not in printed


@pytest.mark.usefixtures("_own_log")
@pytest.mark.parametrize("url", ["s3://", "store://bucket"])
def test_a_url_that_is_no_object_store_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([__file__, "--port", "0", "--snapshots", url]) == 3
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"seko-serve: --snapshots: {url} is no object store, expected one such as s3://BUCKET/PREFIX; "
        "give another place, or none"
    )


@pytest.mark.usefixtures("_own_log")
@pytest.mark.parametrize("early", [True, False], ids=["before the artifact is opened", "meanwhile"])
def test_a_port_that_is_taken_ends_it_with_a_sentence(
    early: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = []

    def opener(*_: object) -> AbstractContextManager[Pool]:
        opened.append(True)
        return toy_opener()

    monkeypatch.setattr(seko_serve.run, "pool_of", opener)
    if not early:
        monkeypatch.setattr(seko_serve.run, "_check_address", lambda _: asyncio.sleep(0))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert main(["toy", "--port", str(number), "--snapshots", "none"]) == 3
    assert opened == ([] if early else [True])
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"seko-serve: http://127.0.0.1:{number}/ cannot be listened on: Address already in use; "
        "choose another --host or --port"
    )


@pytest.mark.usefixtures("_own_log")
@pytest.mark.parametrize(
    ("host", "reason"),
    [("192.0.2.1", "Cannot assign requested address"), ("no.invalid", "Name or service not known")],
)
def test_an_address_of_another_machine_ends_it_with_a_sentence(
    host: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    assert main(["toy", "--host", host, "--port", "0", "--api-key-file", str(keys)]) == 3
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"seko-serve: http://{host}:0/ cannot be listened on: {reason}; choose another --host or --port"
    )


@pytest.mark.usefixtures("_own_log")
@pytest.mark.parametrize("early", [True, False], ids=["before the artifact is opened", "meanwhile"])
def test_a_socket_file_of_a_running_server_is_left_alone(
    early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "socket"
    monkeypatch.setattr(seko_serve.run, "pool_of", lambda *_: toy_opener())
    if not early:
        monkeypatch.setattr(seko_serve.run, "_check_address", lambda _: asyncio.sleep(0))
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(file))
        taken.listen()
        assert main(["toy", "--uds", str(file), "--snapshots", "none"]) == 3
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(file))
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"seko-serve: unix:{file} cannot be listened on: Address already in use; choose another --uds"
    )


@pytest.mark.usefixtures("_own_log")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_file_in_place_of_a_socket_file_is_left_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(seko_serve.run, "pool_of", lambda *_: pytest.fail("the artifact was opened"))
    path = tmp_path / "socket"
    if kind == "file":
        path.write_text("a file")
    else:
        path.mkdir()
    assert main(["toy", "--uds", str(path), "--snapshots", "none"]) == 3
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"seko-serve: unix:{path} cannot be listened on: File exists; choose another --uds"
    )
    assert path.read_text() == "a file" if kind == "file" else path.is_dir()


@pytest.mark.parametrize(("soft", "hard", "allowed"), [(64, 100, 100), (64, 5_000, 4_096), (64, 64, 64)])
def test_a_server_takes_as_many_connections_as_the_system_allows(soft: int, hard: int, allowed: int) -> None:
    code = (
        "import resource, seko_serve.run as run; limit = resource.RLIMIT_NOFILE;"
        f"resource.setrlimit(limit, ({soft}, {hard})); run._allow_connections(); print(*resource.getrlimit(limit))"
    )
    limits = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert limits.split() == [str(allowed), str(hard)]


def test_an_interrupt_while_libraries_are_read_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seko_serve.run, "serve", interrupted)
    assert main(["toy"]) == 130
    assert capsys.readouterr().err == "seko-serve: interrupted\n"
