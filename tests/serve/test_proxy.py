"""nginx with the configuration of serve/examples, before a server: TLS, sockets, figures closed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

from seko_serve.client import AsyncClient

from .conftest import Starter
from .test_flags import certificate
from .test_server import PROMPT, alone, pictures, watch

NGINX = shutil.which("nginx")
EXAMPLE = Path(__file__).parents[2] / "serve" / "examples" / "nginx.conf"
pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def nginx(folder: Path, server_url: str) -> Iterator[str]:
    """Run nginx with the example's configuration; yield its address."""
    assert NGINX is not None
    key_file, certificate_file = certificate(folder)
    block = EXAMPLE.read_text(encoding="utf-8")
    port = free_port()
    for was, becomes in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/ssl/video.pem", str(certificate_file)),
        ("/etc/ssl/video.key", str(key_file)),
        ("http://127.0.0.1:8000", server_url),
    ):
        assert block.count(was) == 1
        block = block.replace(was, becomes)
    paths = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{paths}{block}}}\n"
    )
    with subprocess.Popen(
        [NGINX, "-c", str(file), "-p", str(folder), "-e", str(folder / "errors")]
    ) as process:
        try:
            while True:
                assert process.poll() is None, (folder / "errors").read_text()
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.02)
            yield f"https://127.0.0.1:{port}"
        finally:
            process.terminate()


async def test_a_stream_through_nginx_is_that_of_the_runtime_alone(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    with nginx(tmp_path, server.url) as url:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        async with AsyncClient(url) as client:
            await client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
            media, _ = await watch(client, 4)
            await client.close()
            assert np.array_equal(pictures(media), alone(4, {0: PROMPT})[: len(media)])
        with pytest.raises(HTTPError, match="403") as refusal:
            urlopen(f"{url}/metrics", timeout=20)
        refusal.value.close()
