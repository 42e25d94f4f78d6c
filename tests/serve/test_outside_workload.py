"""A workload that a distribution from outside brings is served like our own: sessions, routes, page and document."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from openapi_spec_validator import validate

from seko_runtime.errors import ArtifactError
from seko_serve.http.openapi import document
from seko_serve.live.workload import check_served
from seko_serve.protocol import Media
from tests.support.entry_points import installing
from tests.toy_workload import model
from tests.toy_workload.test_toy_workload import alone, open_pool
from tests.toy_workload.workload import ToyPool

from .conftest import NewClient, Starter
from .test_server import http

WORDS = (4, 5, 6, 7, 8)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a distribution that brings the toy to the server."""
    with installing(tmp_path, monkeypatch, "seko.served") as install:
        install("toys", **{model.KIND: "tests.toy_workload.served:WORKLOAD"})
        yield


@contextmanager
def opener() -> Iterator[ToyPool]:
    with open_pool() as pool:
        yield pool


@pytest.mark.usefixtures("toy")
async def test_its_sessions_are_served(start: Starter, new_client: NewClient) -> None:
    server = start(opener)
    wanted = np.rint(np.clip(np.concatenate(alone(WORDS)), -1, 1) * 32767)
    client = await new_client(server).open(audio=["pcm"], buffer=8, words=WORDS)
    heard = b""
    async for received in client.messages():
        if isinstance(received, Media):
            heard += received.payload
            if len(heard) >= 2 * len(wanted):
                break
        elif received["type"] == "chunk":
            await client.send("ack", chunk=received["chunk"])
    assert np.abs(np.frombuffer(heard, "<i2") - wanted).max() <= 1
    await client.close()


@pytest.mark.usefixtures("toy")
def test_its_facts_routes_page_and_document_are_the_servers(start: Starter) -> None:
    server = start(opener)
    (described,) = http(f"{server.url}/v1/models")[1]["data"]
    assert described["takes"] == {"words": True}
    assert described["limits"]["words"] == model.LENGTHS[-1]
    assert http(f"{server.url}/v1/toy")[1] == {"words": model.LENGTHS[-1]}
    with urlopen(server.url, timeout=20) as answer:
        page = answer.read().decode()
    assert "<title>The toy</title>" in page
    assert 'src="page/toy-speech.js"' in page
    for name in ("toy-speech.js", "frame.js", "video.js"):
        with urlopen(f"{server.url}/page/{name}", timeout=20) as answer:
            assert answer.headers.get_content_type() == "text/javascript"
    table = document()
    validate(table)
    assert "/v1/toy" in table["paths"]
    assert "words" in table["components"]["schemas"]["SessionRequest"]["properties"]


def test_one_that_nobody_brings_is_refused() -> None:
    manifest = replace(model.manifest(), name="toy")
    with pytest.raises(ArtifactError, match="served workload 'toy-speech' is not known: expected one of"):
        check_served(manifest)
