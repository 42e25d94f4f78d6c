"""The limits that a session's client is told are those that the server enforces."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from seko_serve.client import AsyncClient
from seko_serve.errors import ServeError

from .clients import socket_of
from .conftest import NewClient, Running, Starter, toy_opener
from .test_abuse import refused
from .test_server import PROMPT, http
from .toys import film_opener, talk_opener, world_opener


def told_limits(server: Running) -> dict[str, Any]:
    """The limits that the model tells, which are those of a new session."""
    (model,) = http(f"{server.url}/v1/models")[1]["data"]
    session = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[1]
    assert session["limits"] == model["limits"]
    assert http(f"{server.url}/v1/sessions/{session['id']}", "DELETE")[0] == 204
    return dict(model["limits"])


@pytest.mark.parametrize(
    ("opener", "more"),
    [
        (toy_opener, set()),
        (world_opener, {"poses", "poses_ahead", "steps"}),
        (talk_opener, {"voice_bytes", "voice_s", "audio_bytes", "pcm16_bytes", "held_s"}),
        (film_opener, {"frame_bytes"}),
    ],
)
def test_a_client_is_told_the_limits_of_what_its_model_takes(
    start: Starter, opener: Callable[[], Any], more: set[str]
) -> None:
    of_all = {
        "request_bytes",
        "control_bytes",
        "messages_per_s",
        "messages_at_once",
        "chunks_ahead",
        "buffer_chunks",
    }
    of_video = {"fps", "prompt_letters", "image_bytes", "image_pixels"}
    assert set(told_limits(start(opener))) == of_all | of_video | more


def test_what_is_at_a_limit_opens_a_session_and_what_is_above_does_not(start: Starter) -> None:
    server = start()
    limits = told_limits(server)
    for field, at, above in (
        ("prompt", "a" * limits["prompt_letters"], 413),
        ("fps", limits["fps"], 400),
    ):
        more = at + ("a" if field == "prompt" else 1)
        fields = {"prompt": PROMPT, field: at}
        status, session = http(f"{server.url}/v1/sessions", "POST", fields)
        assert status == 201
        assert http(f"{server.url}/v1/sessions/{session['id']}", "DELETE")[0] == 204
        assert http(f"{server.url}/v1/sessions", "POST", {**fields, field: more})[0] == above
    padding = limits["request_bytes"] - len(json.dumps({"prompt": PROMPT, "x": ""}))
    for letters, status in ((padding, 400), (padding + 1, 413)):  # an unknown field, once the body is read
        table = {"prompt": PROMPT, "x": "a" * letters}
        assert http(f"{server.url}/v1/sessions", "POST", table)[0] == status


async def receipt(client: AsyncClient, name: str) -> str:
    """The first receipt of a control; ServeError if the socket ends with one."""
    async for received in client.messages():
        if isinstance(received, dict) and received.get("id") == name:
            return str(received["type"])
    raise AssertionError("the socket closed")


async def test_messages_at_a_limit_are_taken_and_those_above_are_not(
    start: Starter, new_client: NewClient
) -> None:
    server = start(world_opener)
    limits = told_limits(server)
    client = await new_client(server).open(prompt=PROMPT, codecs=["rgb24"], buffer=limits["buffer_chunks"])
    poses = np.tile(np.eye(4).reshape(-1), (limits["poses"] + 1, 1)).tolist()
    assert await receipt(client, await client.send("poses", poses=poses[:-1])) == "received"
    assert await receipt(client, await client.send("poses", poses=poses)) == "rejected"
    session = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[1]
    hello = json.dumps({"type": "hello", "codecs": ["rgb24"], "buffer": limits["buffer_chunks"] + 1})
    entrance = f"seko.ticket.{session['ticket']}"
    answer = await refused(server, entrance, name=session["id"], hello=hello)
    assert answer == ("bad_request", 1008)


async def test_messages_have_as_many_bytes_as_the_client_is_told(
    start: Starter, new_client: NewClient
) -> None:
    server = start(talk_opener)
    limits = told_limits(server)
    client = await new_client(server).open(prompt=PROMPT, codecs=["rgb24"])
    samples = np.zeros(limits["audio_bytes"] // 2 + 1, np.int16)
    assert await receipt(client, await client.send_audio(samples[:-1])) == "received"
    with pytest.raises(ServeError, match="a binary message has"):
        await receipt(client, await client.send_audio(samples))
    await client.resume()
    control = json.dumps({"type": "ping", "t": 1}).ljust(limits["control_bytes"])
    for sent, kind in ((control, "pong"), (control + " ", "error")):
        await socket_of(client).send(sent)
        async for received in socket_of(client):
            if isinstance(received, str) and (reply := json.loads(received))["type"] in ("pong", "error"):
                break
        assert (reply["type"], reply.get("code")) == (kind, {"pong": None, "error": "too_large"}[kind])
