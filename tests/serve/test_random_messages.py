"""Random messages on a stream's socket: each is answered or ends the socket by name, and nothing else happens."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

import seko_serve.http.access
from seko_serve.errors import KINDS, ServeError
from seko_serve.protocol import CONTROLS

from .clients import socket_of
from .conftest import NewClient, Starter
from .test_server import PROMPT, alone, pictures, watch
from .test_watching import figures

CLOSES = {kind.close for kind in KINDS.values()} | {1002, 1007, 1009}
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner)
)
NAMES = sorted({name for shape in CONTROLS.values() for name, _ in (*shape.required, *shape.optional)})
CONTROL = st.builds(
    lambda kind, fields: json.dumps({**fields, "type": kind}),
    st.sampled_from([kind for kind in CONTROLS if kind != "close"]) | st.text(max_size=8),
    st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), VALUES, max_size=4),
)
MESSAGE = st.binary(max_size=300) | st.text(max_size=300) | CONTROL


def messages(count: int) -> list[str | bytes]:
    """Return random messages. They are drawn before a server runs: its pings draw of Python's own generator."""
    drawn: list[str | bytes] = []

    @settings(
        max_examples=count,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    @given(MESSAGE)
    def draw(message: str | bytes) -> None:
        drawn.append(message)

    draw()
    return drawn


@pytest.mark.limit_s(600)
@pytest.mark.parametrize("cases", [30, pytest.param(500, marks=pytest.mark.slow)])
async def test_random_messages_are_answered_or_end_their_socket(
    start: Starter, monkeypatch: pytest.MonkeyPatch, cases: int, new_client: NewClient
) -> None:
    for rate in ("SOCKETS", "MESSAGES"):
        monkeypatch.setattr(seko_serve.http.access, rate, (1e6, 1e6))
    drawn = messages(cases)
    server = start()
    viewer, hostile = new_client(server), new_client(server)

    async def exchange(message: str | bytes) -> None:
        with suppress(ConnectionClosed):
            await socket_of(hostile).send(message)
            await socket_of(hostile).send(json.dumps({"type": "ping", "t": 0}))
        with suppress(ServeError):  # its code is that of the socket's close, and is counted
            async for answer in hostile.messages():
                if isinstance(answer, dict) and answer["type"] == "pong":
                    return
        with suppress(ConnectionClosed):
            async for _ in socket_of(hostile):
                pass
        assert socket_of(hostile).close_code in CLOSES
        while True:
            with suppress(ServeError):  # its first socket is not gone yet
                await hostile.resume()
                return

    await viewer.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    await hostile.open(codecs=["rgb24"], prompt=PROMPT)
    media, _ = await watch(viewer, 2)
    for message in drawn:
        try:
            await asyncio.wait_for(exchange(message), 30)
        except Exception as error:
            raise AssertionError(f"the message {message!r}") from error
    counted = figures(server.url)
    seen: Any = pictures(media + (await watch(viewer, 3))[0])
    assert np.array_equal(seen, alone(9, {0: PROMPT})[: len(seen)])
    assert counted["seko_serve_refused_total code=internal"] == 0
    assert counted["seko_serve_refused_total code=bad_request"] > 0
