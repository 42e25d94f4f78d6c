"""Others watch a session by a token: they see what its viewer is sent, and can change nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

import seko_serve.http.access
from seko_serve.client import AsyncClient
from seko_serve.errors import ServeError
from seko_serve.live.watchers import MOST_BEHIND, MOST_WATCHERS, Watchers
from seko_serve.protocol import Entrance, Media, parse_received

from .bounded import LIMIT_S
from .browser import open_page
from .conftest import NewClient, Running, Starter
from .pages import FRAMES, HINT, NEEDS_BROWSER, STATE, begin, play, playing
from .test_server import PROMPT, alone, http, pictures, watch
from .test_speech import opener as speech_opener
from .toys import world_opener

HELLO = {"type": "hello", "codecs": ["rgb24"]}


def token_of(server: Running, session: str) -> str:
    status, answer = http(f"{server.url}/v1/sessions/{session}/watch", "POST")
    assert status == 201
    token: str = answer["watch"]
    return token


def name_of(server: Running) -> str:
    """The id of the only session."""
    (name,) = server.manager.sessions
    return name


@asynccontextmanager
async def watching(
    server: Running, session: str, token: str, hello: dict[str, Any] = HELLO
) -> AsyncIterator[ClientConnection]:
    """A socket that watches a session."""
    url = f"{server.url.replace('http', 'ws')}/v1/sessions/{session}/stream"
    entrance = Entrance(watch=token)
    async with connect(url, subprotocols=[*entrance.subprotocols()]) as socket:  # type: ignore[list-item]
        await socket.send(json.dumps(hello))
        yield socket


async def received(socket: ClientConnection, chunks: int) -> tuple[list[Media], list[dict[str, Any]]]:
    """What a watcher is sent until so many chunks are whole."""
    media, messages = [], []
    async for data in socket:
        content = parse_received(data)
        if isinstance(content, Media):
            media.append(content)
            continue
        messages.append(content)
        chunks -= content["type"] == "chunk"
        if not chunks:
            break
    return media, messages


async def test_a_watcher_sees_what_the_viewer_sees_from_a_key_frame_on(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    before, _ = await watch(client, 2)
    async with watching(server, name_of(server), token_of(server, name_of(server))) as socket:
        ready = json.loads(await socket.recv())
        assert (ready["type"], ready["codec"], ready["resume"]) == ("ready", "rgb24", "")
        own, _ = await watch(client, 3)
        seen, messages = await received(socket, 2)
        assert messages[-1]["type"] == "chunk"
    assert seen
    assert seen[0].key
    by_serial = {media.serial: media.pack() for media in own}
    assert all(media.pack() == by_serial[media.serial] for media in seen if media.serial in by_serial)
    assert len({media.serial for media in seen} & set(by_serial)) > 5
    assert np.array_equal(pictures(before + own), alone(5, {0: PROMPT}))  # and disturbs nothing


async def test_a_watcher_changes_nothing(server: Running, new_client: NewClient) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 1)
    token = token_of(server, name_of(server))
    for control in (
        {"type": "prompt", "id": "1", "text": "c a"},
        {"type": "pause", "id": "1"},
        {"type": "ack", "chunk": 100},
        {"type": "restart", "id": "1"},
    ):
        async with watching(server, name_of(server), token) as socket:
            await socket.send(json.dumps(control))
            with pytest.raises(ServeError) as refused:
                await received(socket, 1 << 20)
            assert refused.value.kind.code == "forbidden"
    async with watching(server, name_of(server), token) as socket:
        await socket.send(json.dumps({"type": "close"}))
        await socket.wait_closed()
    more, _ = await watch(client, 3)
    assert np.array_equal(pictures(media + more), alone(4, {0: PROMPT}))


@pytest.mark.parametrize("entrance", ["resume", "watch"])
async def test_a_token_that_was_not_given_for_watching_opens_nothing(
    server: Running, entrance: str, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    await watch(client, 1)
    token = "a" * 32 if entrance == "watch" else token_of(server, name_of(server))
    url = f"{server.url.replace('http', 'ws')}/v1/sessions/{name_of(server)}/stream"
    offered = Entrance(**{entrance: token}).subprotocols()  # type: ignore[arg-type]
    async with connect(url, subprotocols=[*offered]) as socket:  # type: ignore[list-item]
        with pytest.raises(ServeError) as refused:
            await received(socket, 1 << 20)
        assert refused.value.kind.code == "unauthorized"
    await watch(client, 2)


async def test_a_link_is_given_to_the_owner_alone_and_ends_with_the_session(start: Starter) -> None:
    server = start(keys=("a key of one person", "a key of another person"))
    async with AsyncClient(server.url, "a key of one person") as client:
        await client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        await watch(client, 1)
        url = f"{server.url}/v1/sessions/{name_of(server)}/watch"
        assert http(url, "POST")[0] == 401
        assert http(url, "POST", key="a key of another person")[0] == 404
        token = http(url, "POST", key="a key of one person")[1]["watch"]
        async with watching(server, name_of(server), token) as socket:
            assert json.loads(await socket.recv())["type"] == "ready"
            await client.close()
            with pytest.raises(ServeError) as ended:
                await received(socket, 1 << 20)
            assert not ended.value.kind.retryable


async def test_whoever_does_not_know_the_codec_or_comes_too_many_is_refused(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    await watch(client, 1)
    token = token_of(server, name_of(server))
    async with watching(server, name_of(server), token, {**HELLO, "codecs": ["h264"]}) as socket:
        with pytest.raises(ServeError) as refused:
            await received(socket, 1)
        assert refused.value.kind.code == "unsupported"
    async with AsyncExitStack() as opened:
        for _ in range(MOST_WATCHERS):
            socket = await opened.enter_async_context(watching(server, name_of(server), token))
            assert json.loads(await socket.recv())["type"] == "ready"
        socket = await opened.enter_async_context(watching(server, name_of(server), token))
        with pytest.raises(ServeError) as refused:
            await received(socket, 1)
        assert refused.value.kind.code == "full"
    end = time.monotonic() + LIMIT_S
    while server.manager.sessions[name_of(server)].viewer.watchers.count:
        assert time.monotonic() < end, "watchers who have gone are kept"
        await asyncio.sleep(0.05)


async def test_a_watcher_who_sends_too_much_is_sent_away_alone(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    monkeypatch.setattr(seko_serve.http.access, "MESSAGES", (1e-6, 3.0))
    server = start()
    ping = json.dumps({"type": "ping", "t": 1})
    await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    name = name_of(server)
    token = token_of(server, name)
    async with watching(server, name, token) as loud, watching(server, name, token) as quiet:
        for socket in (loud, quiet):
            assert json.loads(await socket.recv())["type"] == "ready"
        for _ in range(4):
            await loud.send(ping)
        with pytest.raises(ServeError) as refused:
            await received(loud, 1 << 20)
        assert refused.value.kind.code == "too_many_requests"
        await quiet.send(ping)
        async for data in quiet:  # beside frames; a socket that was closed raises here
            if isinstance(data, str) and json.loads(data)["type"] == "pong":
                break


async def test_a_watcher_who_reads_too_slowly_is_sent_away_and_the_others_are_not() -> None:
    watchers = Watchers(asyncio.get_running_loop())
    slow, quick = (watchers.enter("ready", began=False) for _ in range(2))
    watchers.send(b"delta")
    assert await quick.messages() == ["ready"]  # nothing before a key frame
    for number in range(MOST_BEHIND + 2):
        watchers.send(b"key", begins=number == 0)
        assert await quick.messages() == [b"key"]
    assert slow.end is not None
    assert slow.end.retry_after is not None
    assert quick.end is None
    assert not slow.outbox
    assert watchers.count == 1


@NEEDS_BROWSER
def test_a_link_shows_the_video_to_another_person_who_has_no_key(start: Starter) -> None:
    key, server = "a key of one person", start(world_opener, keys=("a key of one person",))
    with open_page(f"{server.url}/") as page, ExitStack() as opened:
        page.until("document.getElementById('key').checkVisibility()")
        page.value(f"document.getElementById('key').value = '{key}', true")
        page.value("document.getElementById('key').dispatchEvent(new Event('change')), true")
        page.until(f"{STATE} === 'Ready'")
        begin(page)
        page.until(f"{FRAMES} > 5 && document.getElementById('share').checkVisibility()")
        page.click("share")
        link = page.until("document.getElementById('link-text').value")
        assert page.value("document.getElementById('link').checkVisibility()")
        assert page.value("document.getElementById('link-near').checkVisibility()")  # as it is at 127.0.0.1
        other = opened.enter_context(open_page(link))
        other.until(f"{FRAMES} > 20 && {STATE} === 'Live'")
        shown = (
            "[...document.querySelectorAll('button, textarea, select')].filter((e) => e.checkVisibility())"
        )
        assert set(other.value(f"{shown}.map((e) => e.id)")) <= {"record", "full"}
        other.key("KeyW", down=True)
        assert other.value("document.querySelectorAll('.held').length") == 0
        assert other.problems == []
        stood = page.value(FRAMES)
        page.until(f"{FRAMES} > {stood} + 20")
        page.click("stop")
        other.until("document.getElementById('notice').checkVisibility()")  # it says that it has ended
        assert other.value(f"{STATE} !== 'Live'")


@NEEDS_BROWSER
def test_a_link_lets_another_person_hear_what_is_spoken(start: Starter) -> None:
    server = start(speech_opener)
    heard = "Number(document.body.dataset.heard || 0) > 0"
    with open_page(f"{server.url}/") as page, ExitStack() as opened:
        page.until("!document.getElementById('text').disabled")
        page.value("document.getElementById('text').focus()")
        page.call("Input.insertText", text="One sentence. And so")
        page.until(f"{heard} && document.getElementById('share').checkVisibility()")
        page.click("share")
        other = opened.enter_context(open_page(page.until("document.getElementById('link-text').value")))
        other.until("document.getElementById('ways').textContent === 'Listen'")
        shown = "[...document.querySelectorAll('#dock button, textarea')].filter((e) => e.checkVisibility())"
        assert set(other.value(f"{shown}.map((e) => e.ariaLabel)")) <= {"Settings"}
        other.value("document.getElementById('ways').firstChild.click(), true")
        other.until(f"{STATE} === 'Listening'")
        page.value("document.getElementById('link').hidden = true")
        page.click("say")
        other.until(heard)
        assert other.problems == page.problems == []
        (session,) = server.manager.sessions.values()
        http(f"{server.url}/v1/sessions/{session.name}", "DELETE")
        other.until("document.getElementById('ways').textContent === 'Try again'")


@NEEDS_BROWSER
def test_who_cannot_watch_yet_is_told_why(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    monkeypatch.setattr("seko_serve.live.watchers.MOST_WATCHERS", 0)
    with open_page(f"{server.url}/") as page:
        play(page)
        name = name_of(server)
        with open_page(f"{server.url}/#watch={name}.{token_of(server, name)}") as other:
            other.until(f"{HINT} === '0 others watch this session. Trying again'")
            monkeypatch.undo()
            other.until(f"{STATE} === 'Live'")


@NEEDS_BROWSER
def test_a_link_is_followed_by_a_page_that_is_open(start: Starter) -> None:
    with playing(start) as (server, _), open_page(f"{server.url}/") as other:
        name = name_of(server)
        other.value(f"location.hash = '#watch={name}.{token_of(server, name)}'")
        other.until(f"document.body?.matches('.watching') && {STATE} === 'Live'")


@NEEDS_BROWSER
def test_who_comes_to_watch_a_session_that_is_paused_is_told(start: Starter) -> None:
    with playing(start) as (server, page):
        page.click("pause")
        page.until(f"{STATE} === 'Paused'")
        name = name_of(server)
        with open_page(f"{server.url}/#watch={name}.{token_of(server, name)}") as other:
            other.until(f"{STATE} === 'Paused'")
            page.click("pause")
            other.until(f"{STATE} === 'Live'")


@NEEDS_BROWSER
def test_a_new_link_is_not_said_to_be_copied(start: Starter) -> None:
    copy, link = "document.getElementById('link-copy')", "document.getElementById('link-text').value"
    with playing(start) as (_, page):
        page.click("share")
        before = page.until(link)
        page.value(f"{copy}.click(), true")
        page.until(f"{copy}.textContent !== 'Copy'")
        page.click("share")
        page.until(f"{link} !== '{before}'")
        assert page.value(f"{copy}.textContent") == "Copy"
