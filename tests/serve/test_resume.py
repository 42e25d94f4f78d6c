"""Sessions that outlive their socket, their row and their process: not a frame is lost, changed or shown to others."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime import Pool
from seko_runtime.errors import EnvironmentLacksError
from seko_serve.client import AsyncClient
from seko_serve.errors import ServeError
from seko_serve.live.session import Capture, LiveSession
from seko_serve.protocol import Codec, Media
from seko_serve.security.tokens import ResumeTokens
from seko_serve.store.base import StoreError
from seko_serve.store.folder import FolderStore
from seko_serve.store.saved import VAIN_OWNERS, SavedSessions
from tests.runtime import toy_pool

from .bounded import comes
from .clients import session_of, with_tokens_of
from .conftest import NewClient, Running, Starter
from .test_server import PROMPT, alone, http, pictures, watch
from .toys import world_opener


def folder(tmp_path: Path) -> dict[str, Any]:
    """The setting of a store in a folder of the test."""
    return {"snapshots": str(tmp_path / "store")}


async def to_the_end(client: AsyncClient) -> tuple[list[Media], ServeError]:
    """Take what comes until the server ends the socket."""
    media = []
    try:
        async for received in client.messages():
            if isinstance(received, Media):
                media.append(received)
    except ServeError as end:
        return media, end
    raise AssertionError("the socket closed without a word")


async def gone(server: Running, client: AsyncClient) -> None:
    """Wait until the session has no row."""
    manager = server.manager
    while session_of(client) in manager.sessions or manager.admission.running > len(manager.sessions):
        await asyncio.sleep(0.02)


async def idle(server: Running) -> None:
    """Wait until nothing is coded or written."""
    await asyncio.sleep(0.1)
    await comes(lambda: all(session.settled for session in server.manager.sessions.values()))


@pytest.mark.parametrize("watching", [True, False])
async def test_after_a_stop_the_same_token_goes_on_without_a_frame_lost_or_twice(
    start: Starter, tmp_path: Path, watching: bool, new_client: NewClient
) -> None:
    first = start(**folder(tmp_path))
    client = await new_client(first).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 3)
    if watching:
        stopping = asyncio.create_task(asyncio.to_thread(first.stop))
        rest, end = await to_the_end(client)
        media += rest
        assert (end.kind.code, end.kind.close, end.kind.retryable) == ("stopping", 1012, True)
        assert end.retry_after is not None
        await stopping
    else:
        await client.drop()
        await asyncio.to_thread(first.stop)
    second = start(**folder(tmp_path))
    client._url = second.url
    await client.resume()
    more, _ = await watch(client, 3)
    together = media + more
    assert [packet.serial for packet in together] == list(range(len(together)))
    assert np.array_equal(pictures(together), alone(12, {0: PROMPT})[: len(together)])


async def test_keys_that_are_held_stay_held_across_a_stop(
    start: Starter, tmp_path: Path, new_client: NewClient
) -> None:
    first, undisturbed = start(world_opener, **folder(tmp_path)), start(world_opener)

    async def steered(client: AsyncClient) -> list[Media]:
        await client.open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        media, _ = await watch(client, 2, acknowledge=False)  # the next chunk waits for that
        await client.send("keys", held=["KeyW", "KeyL"])
        async for received in client.messages():
            if isinstance(received, dict) and received["type"] == "received":
                break
        await client.send("ack", chunk=1)
        more, _ = await watch(client, 2)
        return media + more

    client = new_client(first)
    media = await steered(client)
    await client.drop()
    await asyncio.to_thread(first.stop)
    client._url = start(world_opener, **folder(tmp_path)).url
    await client.resume()
    media += (await watch(client, 4))[0]
    async with AsyncClient(undisturbed.url) as other:
        expected = await steered(other)
        expected += (await watch(other, 4))[0]
    assert [packet.payload for packet in media[: len(expected)]] == [
        packet.payload for packet in expected[: len(media)]
    ]


async def test_after_a_kill_the_last_snapshot_goes_on_with_the_bytes_of_the_undisturbed_stream(
    start: Starter, tmp_path: Path, new_client: NewClient
) -> None:
    first = start(**folder(tmp_path), snapshot_every=2)
    client = await new_client(first).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 5)
    while len(list((tmp_path / "store").glob("*.record*"))) < 2:
        media += (await watch(client, 1))[0]
    await idle(first)
    shutil.copytree(tmp_path / "store", tmp_path / "left")  # as a process that is killed leaves it
    more, _ = await watch(client, 3)
    media += more
    second = start(snapshots=str(tmp_path / "left"), snapshot_every=2)
    client._url = second.url
    await client.resume()
    again, _ = await watch(client, 6)
    expected = alone(max(media[-1].chunk, again[-1].chunk) + 1, {0: PROMPT})
    for packet in (*media, *again):
        assert np.array_equal(pictures([packet])[0], expected[packet.first])
    assert again[0].serial == media[-1].serial + 1
    assert [packet.serial for packet in again] == list(range(again[0].serial, again[0].serial + len(again)))
    assert again[0].first <= media[-1].first  # what was shown since the snapshot comes again
    assert [packet.discontinuity for packet in again].count(True) == 1
    assert again[0].discontinuity


async def test_h264_begins_with_a_key_frame_after_a_stop(
    start: Starter, tmp_path: Path, new_client: NewClient
) -> None:
    first = start(**folder(tmp_path))
    client = await new_client(first).open(codecs=["h264"], prompt=PROMPT)
    media, _ = await watch(client, 3)
    stopping = asyncio.create_task(asyncio.to_thread(first.stop))
    rest, _ = await to_the_end(client)
    await stopping
    client._url = start(**folder(tmp_path)).url
    await client.resume()
    more, _ = await watch(client, 2)
    assert more[0].key
    assert not any(packet.key for packet in (media + rest)[1:])
    assert more[0].first == (media + rest)[-1].first + 1


async def test_a_viewer_that_is_gone_for_the_lease_frees_its_row_and_can_come_back(
    start: Starter, tmp_path: Path, new_client: NewClient
) -> None:
    server = start(**folder(tmp_path), lease_s=0.3, max_sessions=1)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 2)
    await client.drop()
    await gone(server, client)
    url = f"{server.url}/v1/sessions/{session_of(client)}"
    assert http(url)[1]["state"] == "saved"
    assert http(url, "PATCH", {"paused": True})[0] == 409
    assert http(f"{server.url}/ready")[1]["free"] == 1
    other = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
    with pytest.raises(ServeError, match="no row is free") as full:
        await client.resume()
    assert (full.value.kind.close, full.value.retry_after) == (1013, 1.0)
    await other.close()
    await gone(server, other)
    await client.resume()
    more, _ = await watch(client, 3)
    assert np.array_equal(pictures(media + more), alone(9, {0: PROMPT})[: len(media + more)])


async def test_a_client_that_comes_back_while_its_row_is_freed_keeps_its_place(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    server, freeing, go_on = start(**folder(tmp_path), lease_s=0.3), threading.Event(), threading.Event()
    real = LiveSession.close

    def close(session: LiveSession) -> None:
        freeing.set()
        go_on.wait(30)
        real(session)

    monkeypatch.setattr(LiveSession, "close", close)
    try:
        client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        media, _ = await watch(client, 2)
        await client.drop()
        await asyncio.to_thread(freeing.wait, 30)
        resuming = asyncio.create_task(client.resume())
        await asyncio.sleep(0.2)  # the request has come
        go_on.set()
        await resuming
        more, _ = await watch(client, 2)
        assert np.array_equal(pictures(media + more), alone(9, {0: PROMPT})[: len(media + more)])
        assert list(server.manager.sessions) == [session_of(client)]
        assert server.manager.admission.running == 1
    finally:
        go_on.set()


async def test_what_was_ended_is_saved_nowhere(start: Starter, tmp_path: Path, new_client: NewClient) -> None:
    server = start(**folder(tmp_path), snapshot_every=1, lease_s=0.3)
    closed = await new_client(server).open(prompt=PROMPT)
    await watch(closed, 4)
    await closed.close()
    saved = await new_client(server).open(prompt=PROMPT)
    await watch(saved, 4)
    await saved.drop()
    await gone(server, saved)
    assert http(f"{server.url}/v1/sessions/{session_of(saved)}", "DELETE")[0] == 204
    for client in (closed, saved):
        await gone(server, client)
        assert http(f"{server.url}/v1/sessions/{session_of(client)}")[0] == 404
        with pytest.raises(ServeError, match="no such session"):
            await client.resume()
    await asyncio.to_thread(server.stop)
    assert list((tmp_path / "store").iterdir()) == []


async def test_a_token_opens_its_own_session_alone_and_its_key_must_still_be_one(
    start: Starter, tmp_path: Path, new_client: NewClient
) -> None:
    keys = ("a-key-of-the-first-tenant", "a-key-of-the-second-tenant")
    first = start(**folder(tmp_path), keys=keys)
    clients = []
    for key in keys:
        client = new_client(first)
        client._key = key
        await client.open(prompt=PROMPT)
        await watch(client, 2)
        clients.append(client)
    await asyncio.to_thread(first.stop)
    second = start(**folder(tmp_path), keys=keys[:1])
    for client in clients:
        client._url = second.url
    mine, other = clients
    own = mine._resume
    mine._resume = other._resume
    with pytest.raises(ServeError, match="resume token"):
        await mine.resume()
    mine._resume = own
    await mine.resume()
    await watch(mine, 1)
    with pytest.raises(ServeError, match="key that opened") as refused:
        await other.resume()
    assert refused.value.kind.code == "forbidden"
    stored = b"".join(file.read_bytes() for file in (tmp_path / "store").iterdir())
    for secret in (own, mine._resume, other._resume, *keys, PROMPT):
        assert f'"{secret}"'.encode() not in stored


@pytest.mark.parametrize("keys", [("a-key-of-the-first-tenant", "a-key-of-the-second-tenant"), ()])
async def test_with_a_snapshot_key_nobody_sees_the_frames_of_a_session_whose_files_were_copied_over_his(
    start: Starter, tmp_path: Path, keys: tuple[str, ...], new_client: NewClient
) -> None:
    """Of another tenant, and of another session of the same one."""
    settings = {**folder(tmp_path), "keys": keys, "snapshot_key": b"k" * 32}
    first = start(**settings)
    clients = []
    for number in range(2):
        client = new_client(first)
        client._key = keys[number] if keys else None
        await client.open(prompt=PROMPT, seed=number)
        await watch(client, 2)
        clients.append(client)
    await asyncio.to_thread(first.stop)
    source, goal = (next((tmp_path / "store").glob(f"{session_of(client)}.snapshot-*")) for client in clients)
    shutil.copy(source, goal)
    second = start(**settings)
    for client in clients:
        client._url = second.url
    with pytest.raises(ServeError, match="damaged") as refused:
        await clients[1].resume()
    assert refused.value.kind.code == "lost"
    await clients[0].resume()
    await watch(clients[0], 1)


@pytest.mark.parametrize("fault", ["damaged", "cut", "another artifact", "gone"])
async def test_a_snapshot_that_cannot_be_read_is_lost_and_takes_no_row(
    start: Starter, tmp_path: Path, fault: str, new_client: NewClient
) -> None:
    first = start(**folder(tmp_path))

    def other_digest() -> Any:
        return toy_pool.open_pool(digest="f" * 64)

    client = await new_client(first).open(prompt=PROMPT)
    await watch(client, 2)
    await asyncio.to_thread(first.stop)
    (file,) = (tmp_path / "store").glob("*.snapshot-*")
    content = bytearray(file.read_bytes())
    if fault == "damaged":
        content[-100] ^= 1
        file.write_bytes(content)
    elif fault == "cut":
        file.write_bytes(content[:-1000])
    elif fault == "gone":
        file.unlink()
    second = (
        start(other_digest, **folder(tmp_path)) if fault == "another artifact" else start(**folder(tmp_path))
    )
    client._url = second.url
    with pytest.raises(ServeError) as lost:
        await client.resume()
    assert lost.value.kind.code == "lost"
    assert second.manager.admission.free == second.manager.capacity
    async with AsyncClient(second.url) as other:
        await watch(await other.open(prompt=PROMPT), 1)


@pytest.mark.parametrize("fault", [".record", ".snapshot-", "memory"])
async def test_what_lacks_only_for_a_moment_loses_no_session(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, new_client: NewClient
) -> None:
    server, real = start(**folder(tmp_path), lease_s=0.3), FolderStore.get

    def get(store: FolderStore, name: str) -> Any:
        if fault in name:
            raise StoreError(f"{name} cannot be read: Input/output error")
        return real(store, name)

    def restore(*_: object, **__: object) -> Any:
        raise EnvironmentLacksError("this machine gives no more memory")

    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 2)
    await client.drop()
    await gone(server, client)
    with monkeypatch.context() as patch:
        if fault == "memory":
            patch.setattr(Pool, "restore", restore)
        else:
            patch.setattr(FolderStore, "get", get)
        for _ in range(VAIN_OWNERS + 2):
            with pytest.raises(ServeError) as refused:
                await client.resume()
            assert (refused.value.kind.code, refused.value.kind.retryable) == ("full", True)
            assert refused.value.retry_after is not None
    assert server.manager.admission.running == 0
    await client.resume()
    more, _ = await watch(client, 3)
    assert np.array_equal(pictures(media + more), alone(9, {0: PROMPT})[: len(media + more)])


async def test_a_full_disk_stops_no_stream_and_the_snapshot_before_stays(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    server = start(**folder(tmp_path), snapshot_every=1)
    real, full = FolderStore.put, [False]

    def put(store: FolderStore, name: str, pieces: Any) -> None:
        if full[0]:
            raise StoreError("No space left on device")
        real(store, name, pieces)

    monkeypatch.setattr(FolderStore, "put", put)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 4)
    while not list((tmp_path / "store").glob("*.record*")):
        more, _ = await watch(client, 1)
        media += more
    full[0] = True
    failed = server.manager.device.metrics.snapshots.labels("failed")
    while not failed._value.get():
        more, _ = await watch(client, 1)
        media += more
    assert np.array_equal(pictures(media), alone(media[-1].chunk + 1, {0: PROMPT}))
    assert len(list((tmp_path / "store").glob("*.snapshot-*"))) == 1
    assert await server.manager.saving.find(session_of(client)) is not None


@pytest.mark.parametrize("fault", ["full", "silent"])
async def test_a_client_keeps_its_token_while_the_store_takes_no_other(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, new_client: NewClient
) -> None:
    """Otherwise it would hold one that no later process knows."""
    server, real = start(**folder(tmp_path), snapshot_every=1), FolderStore.put
    failing, answer = [False], threading.Event()

    def put(store: FolderStore, name: str, pieces: Any) -> None:
        if failing[0]:
            if fault == "silent":
                answer.wait()
            raise StoreError("No space left on device")
        real(store, name, pieces)

    monkeypatch.setattr(FolderStore, "put", put)
    monkeypatch.setattr("seko_serve.live.saving.TOKEN_S", 0.1)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    while not list((tmp_path / "store").glob("*.record*")):
        await watch(client, 1)
    await client.drop()
    await idle(server)
    failing[0], held = True, client.ready["resume"]
    for _ in range(2):
        await client.resume()
        await watch(client, 3)
        assert client.ready["resume"] == held
        await client.drop()
    record = SavedSessions(FolderStore(tmp_path / "store")).find(session_of(client))
    assert record is not None
    ResumeTokens(record.tokens).check(held)
    failing[0] = False
    answer.set()
    await client.resume()
    assert client.ready["resume"] != held


async def test_a_session_is_saved_after_a_snapshot_for_which_memory_lacked(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    server, tried, real = start(**folder(tmp_path), snapshot_every=1), [], LiveSession.capture

    def capture(session: LiveSession) -> Capture:
        tried.append(session)
        if len(tried) == 1:
            raise EnvironmentLacksError("this machine gives no more memory")
        return real(session)

    monkeypatch.setattr(LiveSession, "capture", capture)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 12)
    assert len(tried) > 1
    await comes(lambda: list((tmp_path / "store").glob("*.record*")))
    assert np.array_equal(pictures(media), alone(media[-1].chunk + 1, {0: PROMPT}))


async def test_another_socket_with_the_token_takes_over(server: Running, new_client: NewClient) -> None:
    """As a client does whose network was lost without the server's knowledge."""
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 2)
    again = with_tokens_of(client, new_client(server))
    await again.resume()
    more, _ = await watch(again, 3)
    _, end = await to_the_end(client)
    assert end.kind.code == "conflict"
    assert np.array_equal(pictures(media + more), alone(9, {0: PROMPT})[: len(media + more)])
    with pytest.raises(ServeError, match="resume token"):
        await client.resume()


async def test_what_a_lost_socket_has_not_acknowledged_stops_no_stream(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 2, acknowledge=False)
    await client.drop()
    await client.resume()
    async for received in client.messages():
        if isinstance(received, Media):
            media.append(received)
        elif received["type"] == "chunk" and received["chunk"] == 3:
            break
    assert np.array_equal(pictures(media), alone(6, {0: PROMPT})[: len(media)])


async def test_a_socket_that_is_lost_before_anything_was_seen_lacks_nothing(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    await comes(lambda: server.manager.sessions[session_of(client)].facts()["chunks"] >= 2)
    await client.drop()
    await client.resume()
    media, _ = await watch(client, 3)
    assert [packet.serial for packet in media] == list(range(len(media)))
    assert np.array_equal(pictures(media), alone(6, {0: PROMPT})[: len(media)])


async def test_a_client_that_comes_back_with_another_codec_is_sent_that_one_alone(
    server: Running, new_client: NewClient
) -> None:
    client = await new_client(server).open(codecs=["h264"], prompt=PROMPT)
    await comes(lambda: server.manager.sessions[session_of(client)].facts()["chunks"] >= 2)
    await client.drop()
    client._hello["codecs"] = ["mjpeg"]
    await client.resume()
    media, messages = await watch(client, 5)
    assert {packet.codec for packet in media} == {Codec.MJPEG}
    chunks = [message["chunk"] for message in messages if message["type"] == "chunk"]
    assert chunks == [*range(5)]  # what each was, and what it followed, is told of all
    assert {2, 3, 4} <= {
        packet.chunk for packet in media
    }  # and what was still to be encoded when it came back
    assert [packet.first for packet in media] == [*range(media[0].first, media[-1].first + 1)]
