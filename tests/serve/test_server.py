"""The whole server over loopback: sessions, the stream's order, receipts, pace, resuming, refusals."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import av
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from seko_runtime import Pool
from seko_serve.client import AsyncClient
from seko_serve.errors import ServeError
from seko_serve.http.openings import MAX_OPENING_BYTES
from seko_serve.live import manager
from seko_serve.live.session import MAX_WAITING
from seko_serve.protocol import SUBPROTOCOL, TICKET_PREFIX, Media
from tests.runtime import toy_pool, toy_whole

from .bounded import comes
from .clients import session_of
from .conftest import NewClient, Running, Starter, plain_opener

PROMPT = "a b"


def http(
    url: str, method: str = "GET", table: object = None, key: str = "", queue: str = ""
) -> tuple[int, Any]:
    body = None if table is None else table if isinstance(table, bytes) else json.dumps(table).encode()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    headers |= {"seko-queue": queue} if queue else {}
    try:
        with urlopen(Request(url, body, headers, method=method), timeout=20) as answer:
            content = answer.read()
            return answer.status, json.loads(content) if content[:1] in b"{[" and content else content
    except HTTPError as refused:
        return refused.code, json.loads(refused.read())


async def watch(
    client: AsyncClient, chunks: int, *, acknowledge: bool = True
) -> tuple[list[Media], list[dict[str, Any]]]:
    """Take so many chunks; return media and JSON in the order in which they came."""
    media, messages = [], []
    async for received in client.messages():
        if isinstance(received, Media):
            media.append(received)
            continue
        messages.append(received)
        if received["type"] == "chunk":
            if acknowledge:
                await client.send("ack", chunk=received["chunk"])
            chunks -= 1
            if not chunks:
                break
    return media, messages


def alone(chunks: int, prompts: dict[int, str]) -> np.ndarray:
    """Video frames of the runtime's own session, prompts set before the chunks of these numbers."""
    with toy_pool.open_pool() as pool, pool.open_session(seed=3, prompt=prompts[0]) as session:
        frames = []
        for number in range(chunks):
            if number and number in prompts:
                session.set_prompt(prompts[number])
            frames.append(session.run_chunk().video()[0])
        return np.concatenate(frames)


def pictures(media: list[Media]) -> np.ndarray:
    shape = (toy_whole.HEIGHT, toy_whole.WIDTH, 3)
    return np.stack([np.frombuffer(message.payload, np.uint8).reshape(shape) for message in media])


@pytest.mark.shows("live")
async def test_the_stream_is_that_of_the_runtime_alone_frame_by_frame(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 5)
    await client.close()
    assert [message.serial for message in media] == list(range(len(media)))
    assert [message.first for message in media] == list(range(len(media)))
    assert np.array_equal(pictures(media), alone(5, {0: PROMPT}))


async def test_a_list_of_one_prompt_is_taken_as_the_prompt(server: Running, new_client: NewClient) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompts=[PROMPT], seed=3)
    media, _ = await watch(client, 2)
    assert np.array_equal(pictures(media), alone(2, {0: PROMPT}))
    _, answer = http(f"{server.url}/v1/sessions", "POST", {"prompts": [PROMPT, "b"]})
    assert "control prompt on the session's socket" in answer["error"]["message"]


async def test_the_times_in_fragments_of_mp4_are_those_of_their_messages(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["fmp4"], prompt=PROMPT, fps=7.5)
    media, _ = await watch(client, 3)
    with av.open(io.BytesIO(b"".join(message.payload for message in media))) as container:
        seen = [packet.pts * packet.time_base for packet in container.demux() if packet.size]
    assert [int(time * 1_000_000) for time in seen] == [message.pts_us for message in media]


async def test_a_prompt_has_two_receipts_and_changes_the_chunk_that_it_names(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 2)
    name = await client.send("prompt", text="c a")
    more, messages = await watch(client, 4)
    await client.close()
    kinds = [(message["type"], message.get("id")) for message in messages if message.get("id") == name]
    assert kinds == [("received", name), ("applied", name)]
    (chunk,) = [message["chunk"] for message in messages if message["type"] == "applied"]
    assert np.array_equal(pictures(media + more), alone(6, {0: PROMPT, chunk: "c a"}))


async def test_a_lost_socket_comes_back_without_a_frame_lost_or_twice(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 2)
    stale = client._resume
    await client.drop()
    await comes(lambda: not http(f"{server.url}/v1/sessions/{session_of(client)}")[1]["attached"])
    await client.resume()
    assert client._resume != stale
    more, _ = await watch(client, 3)
    seen = [message.serial for message in media + more]
    assert seen == list(range(len(seen)))
    together = pictures(media + more)
    assert np.array_equal(together, alone(6, {0: PROMPT})[: len(together)])
    await client.drop()
    client._resume = stale
    await comes(lambda: not http(f"{server.url}/v1/sessions/{session_of(client)}")[1]["attached"])
    with pytest.raises(ServeError, match="resume token"):
        await client.resume()


async def test_rows_are_freed_and_a_full_server_says_when_to_come_back(
    start: Starter, new_client: NewClient
) -> None:
    server = start(max_sessions=2)
    clients = [await new_client(server).open(prompt=PROMPT) for _ in range(2)]
    status, answer = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})
    assert (status, answer["error"]["code"], answer["error"]["retryable"]) == (503, "full", True)
    await clients[0].close()
    status, opened = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})
    assert status == 201
    assert http(f"{server.url}/v1/sessions/{opened['id']}", "DELETE")[0] == 204
    assert http(f"{server.url}/v1/sessions/{opened['id']}")[0] == 404


async def test_an_ended_session_is_freed_without_the_garbage_collector(
    start: Starter, new_client: NewClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the encoder of its video and the frames that it kept: a collection of all objects comes once in minutes."""
    monkeypatch.setattr(manager, "REAP_S", 0.01)  # so that it was looked at
    server = start()
    gc.collect()
    gc.disable()
    try:
        client = await new_client(server).open(codecs=["h264"], prompt=PROMPT)
        ended = [*map(weakref.ref, server.manager.sessions.values())]
        await watch(client, 2)
        await asyncio.sleep(0.1)
        await client.close()
        await comes(lambda: ended[0]() is None)
    finally:
        gc.enable()


async def test_an_artifact_without_sessions_serves_one_viewer_after_another(
    start: Starter, new_client: NewClient
) -> None:
    server = start(plain_opener)
    seen = []
    for _ in range(2):
        client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        assert http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[0] == 503
        media, _ = await watch(client, 4)
        await client.close()
        seen.append(pictures(media))
        await comes(lambda: not http(f"{server.url}/v1/sessions")[1]["data"])
    assert np.array_equal(*seen)


async def test_a_session_whose_viewer_is_gone_ends_with_its_lease(
    start: Starter, new_client: NewClient
) -> None:
    server = start(lease_s=0.5)
    client = await new_client(server).open(prompt=PROMPT)
    await watch(client, 1)
    await client.drop()
    await comes(lambda: not http(f"{server.url}/v1/sessions")[1]["data"])
    with pytest.raises(ServeError, match="no such session"):
        await client.resume()


@pytest.mark.parametrize("lease_s", [3600.0, 0.2])
async def test_a_ticket_lives_as_long_as_its_session_waits_for_its_viewer(
    start: Starter, lease_s: float
) -> None:
    server = start(lease_s=lease_s)
    opened = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[1]
    assert (opened["ticket_s"], opened["lease_s"]) == (lease_s, lease_s)
    protocols = [Subprotocol(SUBPROTOCOL), Subprotocol(TICKET_PREFIX + opened["ticket"])]
    if lease_s < 1:
        await comes(lambda: not http(f"{server.url}/v1/sessions")[1]["data"])
    url = f"{server.url.replace('http', 'ws')}/v1/sessions/{opened['id']}/stream"
    async with connect(url, subprotocols=protocols) as stream:
        with suppress(ConnectionClosed):  # by a refusal, which is read next
            await stream.send('{"type": "hello", "codecs": ["rgb24"]}')
        first = json.loads(await stream.recv())
    assert first["type"] == ("ready" if lease_s > 1 else "error")
    assert lease_s > 1 or first["code"] == "unauthorized"


def test_keys_are_asked_for_and_tenants_do_not_see_each_other(start: Starter) -> None:
    first, second = "a-key-of-the-first-tenant", "a-key-of-the-second-tenant"
    server = start(keys=(first, second))
    assert http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[0] == 401
    assert http(f"{server.url}/v1/models")[0] == 401
    status, opened = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT}, first)
    assert status == 201
    url = f"{server.url}/v1/sessions/{opened['id']}"
    assert http(url, key=first)[0] == 200
    for method in ("GET", "PATCH", "DELETE"):
        assert http(url, method, {} if method == "PATCH" else None, second)[0] == 404
    assert http(f"{server.url}/v1/sessions", key=second)[1]["data"] == []


def test_a_change_that_is_refused_changes_nothing(start: Starter) -> None:
    server = start()
    opened = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[1]
    url = f"{server.url}/v1/sessions/{opened['id']}"
    for _ in range(MAX_WAITING + 1):  # a prompt that was taken would fill the queue of controls
        assert http(url, "PATCH", {"prompt": PROMPT, "paused": 1})[0] == 400
    assert http(url, "PATCH", {"recache": True})[0] == 400
    assert http(url, "PATCH", {"prompt": PROMPT, "paused": True})[1]["state"] == "paused"


async def test_a_paused_session_says_so_to_a_new_socket_and_a_change_by_http_has_no_receipts(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
    await watch(client, 1)
    url = f"{server.url}/v1/sessions/{session_of(client)}"
    assert http(url, "PATCH", {"prompt": "a blue ring", "paused": True})[0] == 200
    await client.drop()
    await comes(lambda: not http(url)[1]["attached"])
    session = server.manager.sessions[session_of(client)]
    # chunks that were made before the pause are sent before the receipts of what ends it
    await comes(lambda: session.pending is None and session.facts()["chunks"] == session.made_chunks)
    await client.resume()
    played, told = "", []
    async for received in client.messages():
        if isinstance(received, Media):
            continue
        told.append(received)
        if received == {"type": "state", "paused": True}:
            played = await client.send("play")
        elif received["type"] == "chunk":
            await client.send("ack", chunk=received["chunk"])
            if played and received["chunk"] >= 4:
                break
    receipts = [message for message in told if message["type"] in ("received", "applied")]
    assert [message["type"] for message in receipts] == ["received", "applied"]
    assert {message["id"] for message in receipts} == {played}
    after = told[told.index(receipts[1]) :]
    following = [message["chunk"] for message in after if message["type"] == "chunk"]
    assert receipts[1]["chunk"] == following[0]


@contextmanager
def uncut_opener() -> Iterator[Pool]:
    """A pool that refuses a prompt of too many tokens."""
    with toy_pool.open_pool(cuts_prompts=False) as pool:
        yield pool


def test_a_prompt_of_too_many_tokens_is_refused_when_it_is_sent(start: Starter) -> None:
    server = start(uncut_opener)
    url, long = f"{server.url}/v1/sessions", {"prompt": "a red disc bounces drifts"}
    refused = http(url, "POST", long)
    assert refused[0] == 400
    assert "6 tokens, this artifact takes 5" in refused[1]["error"]["message"]
    opened = http(url, "POST", {"prompt": PROMPT})[1]
    (session,) = server.manager.sessions.values()
    assert http(f"{url}/{opened['id']}", "PATCH", {**long, "paused": True}) == refused
    assert http(f"{server.url}/v1/videos", "POST", long) == refused
    assert http(f"{server.url}/v1/videos")[1]["data"] == []
    assert (session.facts()["state"], list(session._waiting)) == ("running", [])
    assert http(f"{url}/{opened['id']}", "PATCH", {"prompt": "a red disc"})[0] == 200


@pytest.mark.parametrize(
    ("table", "status", "code"),
    [
        ({}, 400, "bad_request"),
        ({"prompt": 1}, 400, "bad_request"),
        ({"prompts": PROMPT}, 400, "bad_request"),
        ({"prompts": []}, 400, "bad_request"),
        ({"prompts": [1]}, 400, "bad_request"),
        ({"prompts": [PROMPT], "prompt": PROMPT}, 400, "bad_request"),
        ({"prompts": [PROMPT, PROMPT]}, 415, "unsupported"),
        ({"prompts": ["x" * 5_000]}, 413, "too_large"),
        ({"prompt": PROMPT, "seed": 1.5}, 400, "bad_request"),
        ({"prompt": PROMPT, "seed": 1 << 62}, 400, "bad_request"),
        ({"prompt": PROMPT, "fps": 0}, 400, "bad_request"),
        ({"prompt": PROMPT, "more": 1}, 400, "bad_request"),
        ({"prompt": PROMPT, "model": "other"}, 404, "not_found"),
        ({"prompt": "x" * 5_000}, 413, "too_large"),
        (b"[1]", 400, "bad_request"),
        (b"{", 400, "bad_request"),
        (b" " * (MAX_OPENING_BYTES + 1), 413, "too_large"),
    ],
)
def test_what_cannot_be_opened_is_refused_and_takes_no_row(
    start: Starter, table: object, status: int, code: str
) -> None:
    server = start()
    answered, answer = http(f"{server.url}/v1/sessions", "POST", table)
    assert (answered, answer["error"]["code"]) == (status, code)
    assert http(f"{server.url}/ready")[1]["free"] == server.manager.capacity


async def test_sockets_without_a_ticket_hello_or_codec_are_told_and_closed(server: Running) -> None:
    async def refused(entrance: list[str], first: str, name: str) -> tuple[dict[str, Any], int]:
        from websockets.asyncio.client import connect

        url = f"{server.url.replace('http', 'ws')}/v1/sessions/{name}/stream"
        async with connect(url, subprotocols=["seko.v1", *entrance]) as socket:  # type: ignore[list-item]
            with suppress(ConnectionClosed):  # a refusal, which is read next
                await socket.send(first)
            error = json.loads(await socket.recv())
            await socket.wait_closed()
            return error, socket.close_code or 0

    hello = json.dumps({"type": "hello", "codecs": ["h264"]})
    error, code = await refused(["seko.ticket.x"], hello, "nothing")
    assert (error["type"], error["code"], code) == ("error", "unauthorized", 1008)
    for first, expected in (
        ('{"type": "ack", "chunk": 1}', "bad_request"),
        ("{", "bad_request"),
        (json.dumps({"type": "hello", "codecs": ["av1"]}), "unsupported"),
    ):
        _, opened = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})
        error, code = await refused([f"seko.ticket.{opened['ticket']}"], first, opened["id"])
        assert (error["code"], code) == (expected, 1008)
        http(f"{server.url}/v1/sessions/{opened['id']}", "DELETE")


def test_answers_carry_the_policy_that_keeps_other_sites_out(start: Starter) -> None:
    server = start()
    with urlopen(f"{server.url}/", timeout=20) as answer:
        assert b"<title>" in answer.read()
        policy = answer.headers["content-security-policy"].split("; ")
        own = urlsplit(server.url).netloc
        assert {"default-src 'self'", f"connect-src 'self' ws://{own} wss://{own}"} <= set(policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("host", ["[::1]:8000", "a; script-src *", "*", "a b", ""])
def test_a_host_that_is_no_source_of_a_policy_adds_none(start: Starter, host: str) -> None:
    server = start(keys=("a-key-of-32-letters-and-no-fewer",))
    with urlopen(Request(f"{server.url}/", headers={"host": host}), timeout=20) as answer:
        assert "; connect-src 'self'; " in answer.headers["content-security-policy"]
