"""Faults of one session or one call change no byte of another's stream; the queue over HTTP; a race of everything."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidHandshake

import seko_serve.live.manager
from seko_runtime import Pool
from seko_runtime.errors import (
    DeviceFaultError,
    DeviceMemoryError,
    EngineRunError,
    EnvironmentLacksError,
    RankLostError,
    SekoRuntimeError,
    UsageError,
)
from seko_serve.client import AsyncClient
from seko_serve.errors import ServeError
from seko_serve.live.device import Device, DeviceEndedError
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.media.video import RawEncoder
from seko_serve.protocol import Media
from tests.runtime import toy_pool

from .bounded import comes, until
from .clients import session_of, with_tokens_of
from .conftest import NewClient, Running, Starter, toy_opener
from .test_server import PROMPT, alone, http, pictures, watch


class Fault:
    """A toy pool whose engine of each call fails once when `planted`, or always for a row when it is `broken`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.planted, self.failures = 0, 0
        self.error = error or RuntimeError("planted")
        self.broken: int | None = None
        real = toy_pool.pool_engines()
        self._engines = {f"begin.{b}": self._failing(real[f"begin.{b}"]) for b in toy_pool.BUCKETS}

    def _failing(self, begin: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        def call(inputs: list[Any]) -> list[Any]:
            rows = inputs[-1].tolist()
            if self.planted or self.broken in rows:
                self.planted = max(0, self.planted - 1)
                self.failures += 1
                raise self.error
            return begin(inputs)

        return call

    @contextmanager
    def opener(self) -> Iterator[Pool]:
        with toy_pool.open_pool(engines=self._engines) as pool:
            yield pool


async def watched(clients: list[AsyncClient], chunks: int) -> list[list[Media]]:
    """Take so many chunks of each at the same time."""
    seen = await asyncio.gather(*(watch(client, chunks) for client in clients))
    return [media for media, _ in seen]


async def test_an_engine_that_fails_in_one_call_ends_no_session(
    start: Starter, new_client: NewClient
) -> None:
    fault = Fault()
    server = start(fault.opener)
    clients = [await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3) for _ in range(3)]
    media = await watched(clients, 2)
    fault.planted = 1
    more = await watched(clients, 3)
    assert fault.failures == 1
    expected = alone(6, {0: PROMPT})
    for before, after in zip(media, more, strict=True):
        assert np.array_equal(pictures(before + after), expected[: len(before + after)])


async def test_an_engine_that_fails_for_one_row_ends_its_session_alone(
    start: Starter, new_client: NewClient
) -> None:
    fault = Fault()
    server = start(fault.opener)
    clients = [await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3) for _ in range(3)]
    media = await watched(clients, 2)
    fault.broken = 1
    broken, *others = clients[1], clients[0], clients[2]

    async def ends() -> ServeError:
        with pytest.raises(ServeError) as end:
            await watch(broken, 9)
        return end.value

    end, *more = await asyncio.gather(ends(), *(watch(client, 3) for client in others))
    assert (end.kind.code, end.kind.close) == ("internal", 1011)
    expected = alone(6, {0: PROMPT})
    for before, (after, _) in zip((media[0], media[2]), more, strict=True):
        assert np.array_equal(pictures(before + after), expected[: len(before + after)])


async def test_a_server_that_loses_its_device_ends_and_its_clients_may_resume(
    start: Starter, new_client: NewClient
) -> None:
    fault = Fault(DeviceFaultError("planted"))
    server = start(fault.opener)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    await watch(client, 2)
    fault.planted = 1
    with pytest.raises(ServeError) as end:
        await watch(client, 9)
    assert (end.value.kind.code, end.value.kind.close) == ("stopping", 1012)
    await asyncio.to_thread(server.wait)


def test_a_device_that_is_lost_at_an_opening_is_not_the_clients_fault(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()

    def lose(*_: object, **__: object) -> None:
        raise RankLostError("planted")

    monkeypatch.setattr(Pool, "open_session", lose)
    status, answer = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})
    assert (status, answer["error"]["code"]) == (503, "stopping")
    server.wait()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EnvironmentLacksError, 503, "exhausted"),
        (DeviceMemoryError, 503, "exhausted"),
        (EngineRunError, 500, "internal"),
    ],
)
def test_what_the_server_lacks_at_an_opening_is_not_the_clients_fault(
    start: Starter, monkeypatch: pytest.MonkeyPatch, error: type[SekoRuntimeError], status: int, code: str
) -> None:
    server = start()

    def lack(*_: object, **__: object) -> None:
        raise error("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Pool, "open_session", lack)
        got, answer = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})
        assert (got, answer["error"]["code"]) == (status, code)
        assert "planted" not in str(answer)
    assert server.manager.admission.running == 0
    assert http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[0] == 201


async def test_a_library_that_a_prompt_needs_is_named_and_not_asked_for_again(
    server: Running, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    """Of a server that runs: it was there when the server started, or `check_served` would have ended it."""
    monkeypatch.setitem(sys.modules, "ftfy", None)
    status, answer = http(f"{server.url}/v1/sessions", "POST", {"prompt": "a caf\u00e9 & a disc"})
    assert (status, answer["error"]["code"]) == (501, "not_installed")
    assert answer["error"]["retryable"] is False
    assert "pip install ftfy" in answer["error"]["message"]
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    number = await client.send("prompt", text="a caf\u00e9")
    async for answer in client.messages():
        if isinstance(answer, Media):
            continue
        if answer["type"] == "chunk":  # so that the next one is made, with the prompt, however late that came
            await client.send("ack", chunk=answer["chunk"])
        if answer["type"] == "rejected":
            assert (answer["id"], answer["code"]) == (number, "not_installed")
            return


class HeldCall:
    """A call that keeps the device's thread until it is released."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self, _: object) -> None:
        self.begun.set()
        assert self.end.wait(30)


async def test_calls_to_which_a_device_does_not_come_are_refused() -> None:
    device, held = Device(toy_opener), HeldCall()
    await device.start()
    first = asyncio.create_task(device.call(held))
    assert await asyncio.to_thread(held.begun.wait, 30)
    second = asyncio.create_task(device.call(lambda _: None))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(device.stop())
    await asyncio.sleep(0)
    held.end.set()
    with pytest.raises(DeviceEndedError):
        await asyncio.wait_for(second, 30)
    await asyncio.gather(first, stopping)


async def test_calls_behind_one_that_loses_the_device_are_refused() -> None:
    device, held = Device(toy_opener), HeldCall()
    await device.start()

    def lose(_: object) -> None:
        raise DeviceFaultError("planted")

    calls = [asyncio.create_task(device.call(held))]
    assert await asyncio.to_thread(held.begun.wait, 30)
    calls += [asyncio.create_task(device.call(work)) for work in (lose, lambda _: None)]
    await asyncio.sleep(0)
    held.end.set()
    results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    assert [type(result) for result in results] == [type(None), DeviceFaultError, DeviceEndedError]
    await device.stop()
    assert device.lost


async def test_work_in_parts_gives_way_to_calls_and_ends_with_its_caller() -> None:
    """Works run one after another; one that is left, or fails, leaves the device to the next."""
    seen: list[str] = []

    def work(name: str, parts: int) -> Callable[[object], Generator[None, None, str]]:
        def begin(_: object) -> Generator[None, None, str]:
            try:
                for _part in range(parts):
                    seen.append(name)
                    yield
            finally:
                seen.append(f"{name} over")
            if name == "c":
                raise UsageError("planted")
            return name

        return begin

    device = Device(toy_opener)
    await device.start()
    endless = asyncio.create_task(device.in_parts(work("a", 1 << 40)))
    while not seen:
        await device.call(lambda _: None)
    second = asyncio.create_task(device.in_parts(work("b", 2)))
    await device.call(lambda _: None)
    assert set(seen) == {"a"}
    endless.cancel()
    assert await asyncio.wait_for(second, 30) == "b"
    with pytest.raises(UsageError, match="planted"):
        await asyncio.wait_for(device.in_parts(work("c", 1)), 30)
    assert [name for name in seen if name != "a"] == ["a over", "b", "b", "b over", "c", "c over"]
    left = asyncio.create_task(device.in_parts(work("d", 1 << 40)))
    await device.call(lambda _: None)
    await device.stop()
    with pytest.raises(DeviceEndedError):
        await left


async def test_a_device_that_is_lost_while_a_session_is_restored_ends_the_server(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    server = start(snapshots=str(tmp_path / "store"), lease_s=0.2)

    def lose(*_: object, **__: object) -> None:
        raise DeviceFaultError("planted")

    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    await watch(client, 2)
    await client.drop()
    await comes(lambda: not server.manager.sessions)
    monkeypatch.setattr(Pool, "restore", lose)
    with pytest.raises(ServeError) as end:
        await client.resume()
    assert end.value.kind.code == "stopping"
    await asyncio.to_thread(server.wait)


def test_a_session_that_cannot_be_ended_keeps_no_other(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seko_serve.live.manager, "REAP_S", 0.02)
    stuck: list[str] = []
    park = SessionManager._park

    async def fail_for_the_first(this: SessionManager, session: LiveSession) -> None:
        if not stuck:
            stuck.append(session.name)
        if session.name == stuck[0]:
            raise OSError("planted")
        await park(this, session)

    monkeypatch.setattr(SessionManager, "_park", fail_for_the_first)
    server = start(lease_s=0.05)
    opened = [http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[1]["id"] for _ in range(2)]
    until(lambda: set(server.manager.sessions) == set(stuck))
    assert stuck[0] in opened


async def test_an_encoder_that_fails_ends_its_session_alone(
    server: Running, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    failing = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    other = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(other, 1)
    encoder = server.manager.sessions[session_of(failing)].content.frames  # type: ignore[attr-defined]
    real = RawEncoder._encode

    def encode(this: RawEncoder, frame: Any, key: bool) -> Any:
        if this is encoder:
            raise RuntimeError("planted")
        return real(this, frame, key)

    monkeypatch.setattr(RawEncoder, "_encode", encode)
    with pytest.raises(ServeError) as end:
        await watch(failing, 9)
    assert end.value.kind.code == "internal"
    more, _ = await watch(other, 4)
    assert np.array_equal(pictures(media + more), alone(9, {0: PROMPT})[: len(media + more)])
    await comes(lambda: session_of(failing) not in server.manager.sessions)
    async with asyncio.timeout(30):  # its row is freed a moment later
        await comes(lambda: server.manager.admission.free == server.manager.capacity - 1)


async def test_a_clock_that_is_set_back_stops_nothing(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    server = start(lease_s=0.3)
    real, offset = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() - offset[0])
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media, _ = await watch(client, 2)
    offset[0] = 86_400.0
    more, _ = await watch(client, 2)
    assert np.array_equal(pictures(media + more), alone(4, {0: PROMPT})[: len(media + more)])
    await (await new_client(server).open(prompt=PROMPT)).drop()
    await client.drop()
    await comes(lambda: not server.manager.sessions)  # leases end as before


async def test_a_client_waits_in_the_queue_and_begins_when_a_row_is_free(
    start: Starter, new_client: NewClient
) -> None:
    server = start(max_sessions=1)
    first = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
    waiting = asyncio.create_task(new_client(server).open(codecs=["rgb24"], prompt=PROMPT, wait=True))
    await comes(lambda: server.manager.admission.waiting)
    status, answer = await asyncio.to_thread(http, f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})
    assert (status, answer["error"]["waiting"]) == (503, 1)
    assert "queue_token" not in answer["error"]
    assert http(f"{server.url}/v1/queue")[0] == 404
    await first.close()
    await watch(await waiting, 2)
    assert not server.manager.admission.waiting


def test_sessions_whose_chunks_would_not_fit_are_refused(start: Starter) -> None:
    server = start()
    server.manager.device.fixed = {1: 0.4, 2: 0.7, 4: 1.3}
    period = server.manager.device.manifest.workload.video.chunk_frames  # type: ignore[union-attr]
    fps = period / 0.8
    for status in (201, 201, 503):
        code, answer = http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT, "fps": fps})
        assert code == status
    assert answer["error"]["code"] == "full"


async def test_eight_tasks_that_race_on_one_session_leave_a_server_that_serves(
    start: Starter, tmp_path: Any, new_client: NewClient
) -> None:
    """Sockets with the newest tokens that anybody saw, controls, requests and deletes, in an order that changes."""
    server = start(snapshots=str(tmp_path / "store"), snapshot_every=1, lease_s=0.2, max_sessions=3)

    async def story(choose: random.Random) -> None:
        client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        newest = [client._resume]
        url = f"{server.url}/v1/sessions/{session_of(client)}"
        over = asyncio.Event()

        async def sockets() -> None:
            while not over.is_set():
                async with AsyncClient(server.url) as again:
                    with_tokens_of(client, again, newest[0])
                    with suppress(ServeError, ConnectionClosed, InvalidHandshake, OSError):
                        await again.resume()
                        newest[0] = again._resume
                        await again.send(choose.choice(["pause", "play", "restart"]))
                        await asyncio.wait_for(watch(again, choose.randrange(1, 4)), 0.5)
                await asyncio.sleep(choose.random() / 20)

        async def requests() -> None:
            while not over.is_set():
                method, table = choose.choice(
                    [("GET", None), ("PATCH", {"paused": False}), ("PATCH", {"prompt": "c a"})]
                )
                status, _ = await asyncio.to_thread(http, url, method, table)
                assert status in (200, 404, 409)
                await asyncio.sleep(choose.random() / 20)

        async def delete() -> None:
            await asyncio.sleep(choose.random())
            assert (await asyncio.to_thread(http, url, "DELETE"))[0] in (204, 404)
            over.set()

        async with asyncio.TaskGroup() as tasks:
            for work in (sockets, sockets, sockets, requests, requests, requests, delete, delete):
                tasks.create_task(work())
        await comes(lambda: session_of(client) not in server.manager.sessions)
        assert (await asyncio.to_thread(http, url))[0] == 404

    bystander = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    seen: list[Media] = []
    for seed in range(3):
        racing = asyncio.create_task(story(random.Random(seed)))
        while not racing.done():
            seen += (await watch(bystander, 1))[0]
        await racing
    assert np.array_equal(pictures(seen), alone(seen[-1].chunk + 1, {0: PROMPT}))
    assert server.manager.admission.free == 2
    assert list((tmp_path / "store").glob("*.record*"))  # the bystander's alone
    assert {file.name[:16] for file in (tmp_path / "store").glob("*.*")} == {session_of(bystander)}


class Gate:
    """A toy pool whose calls wait for permits, once it is closed."""

    def __init__(self) -> None:
        self.closed, self.waits = False, 0
        self._permits = threading.Semaphore(0)
        real = toy_pool.pool_engines()
        self._engines = {f"begin.{b}": self._waiting(real[f"begin.{b}"]) for b in toy_pool.BUCKETS}

    def _waiting(self, begin: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        def call(inputs: list[Any]) -> list[Any]:
            if self.closed:
                self.waits += 1
                self._permits.acquire(timeout=30)
                self.waits -= 1
            return begin(inputs)

        return call

    def let(self, calls: int = 1) -> None:
        """Let so many calls go on."""
        self._permits.release(calls)

    def open(self) -> None:
        """Let all calls go on."""
        self.closed = False
        self.let(100)

    @contextmanager
    def opener(self) -> Iterator[Pool]:
        with toy_pool.open_pool(engines=self._engines) as pool:
            yield pool


async def test_a_chunk_is_sent_while_the_next_one_is_made(start: Starter, new_client: NewClient) -> None:
    gate = Gate()
    server = start(gate.opener)
    gate.closed = True
    gate.let()
    try:
        client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
        media, _ = await watch(client, 1)  # the second chunk's call waits
        assert gate.closed
        gate.open()
        more, _ = await watch(client, 2)
        assert np.array_equal(pictures(media + more), alone(3, {0: PROMPT})[: len(media + more)])
    finally:
        gate.open()


def test_a_session_opens_between_two_calls_of_the_device(
    start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it needs of the device's thread is asked for once: a second request would wait for another call."""
    server, asked = start(), []
    real = Device.call

    def call(this: Device, work: Any) -> Any:
        asked.append(work)
        return real(this, work)

    monkeypatch.setattr(Device, "call", call)
    assert http(f"{server.url}/v1/sessions", "POST", {"prompt": PROMPT})[0] == 201
    assert len(asked) == 1


class Halt:
    """An encoder that waits before a frame of each stream until it is told to go on."""

    def __init__(self, patch: pytest.MonkeyPatch, frame: int) -> None:
        self.go_on = threading.Event()
        real = RawEncoder._encode

        def encode(this: RawEncoder, picture: Any, key: bool) -> Any:
            if this._number == frame:
                self.go_on.wait(30)
            return real(this, picture, key)

        patch.setattr(RawEncoder, "_encode", encode)


async def frames_of(client: AsyncClient, count: int) -> list[Media]:
    """The next media messages, unacknowledged."""
    media: list[Media] = []
    async for received in client.messages():
        media += [received] if isinstance(received, Media) else []
        if len(media) == count:
            break
    return media


async def test_a_frame_is_sent_before_the_next_one_is_encoded(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    server, halt = start(), Halt(monkeypatch, 1)
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media = await frames_of(client, 1)
    assert not halt.go_on.is_set()
    halt.go_on.set()
    media += (await watch(client, 3))[0]
    assert np.array_equal(pictures(media), alone(3, {0: PROMPT})[: len(media)])


async def test_a_socket_that_is_lost_within_a_chunk_lacks_no_frame_and_gets_none_twice(
    start: Starter, monkeypatch: pytest.MonkeyPatch, new_client: NewClient
) -> None:
    halt = Halt(monkeypatch, 2)
    server = start()
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT, seed=3)
    media = await frames_of(client, 2)
    await client.drop()
    await client.resume()  # it has all frames that were sent, of a chunk that has more
    await client.drop()
    session = server.manager.sessions[session_of(client)]
    halt.go_on.set()
    await comes(lambda: not len(session._encoder))
    for _ in range(2):  # the frames that it lacks stay for a socket that is lost again
        await client.resume()
        await client.drop()
    await client.resume()
    media += (await watch(client, 3))[0]
    assert [frame.serial for frame in media] == list(range(len(media)))
    assert np.array_equal(pictures(media), alone(3, {0: PROMPT})[: len(media)])


async def test_a_client_that_dies_while_much_waits_for_it_is_sent_nothing_more(
    server: Running, caplog: pytest.LogCaptureFixture, new_client: NewClient
) -> None:
    """asyncio warns of each write to a connection that it knows to be lost; a dying browser made hundreds of lines."""
    client = await new_client(server).open(codecs=["rgb24"], prompt=PROMPT)
    await watch(client, 1)
    (session,) = server.manager.sessions.values()
    viewer, died = session.viewer, threading.Event()
    raw = client._socket.transport.get_extra_info("socket")  # type: ignore[union-attr]

    def die() -> None:  # in one step of the server's loop, so that it cannot have noticed
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client._socket.transport.abort()  # type: ignore[union-attr]
        died.wait(5)
        with viewer._lock:
            viewer._deliver(["{}"] * 50)

    session.viewer._loop.call_soon_threadsafe(die)
    await asyncio.sleep(0.2)
    died.set()
    await comes(lambda: viewer.detached_at is not None)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
