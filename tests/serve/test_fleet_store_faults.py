"""A store of snapshots that is full, slow or damaged, below a fleet: what clients see, whose frames go on, what is
left."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from seko_serve.client import AsyncClient
from seko_serve.errors import ServeError
from seko_serve.fleet.box import Box
from seko_serve.fleet.choice import FRESH_S
from seko_serve.fleet.directory import BoxFacts, MemoryDirectory
from seko_serve.live import manager
from seko_serve.protocol import Media
from seko_serve.store.base import Content, StoreError
from seko_serve.store.folder import FolderStore

from .bounded import LIMIT_S, comes
from .clients import session_of, to_the_end, with_tokens_of
from .fleet_soak import PROMPTS, alone
from .fleets import KEYS, Fleet, FleetStarter
from .test_fleet_gateway import ask
from .test_server import pictures, watch

pytest.importorskip("aiohttp", reason="needs seko-serve[ray]")
OTHER = "e" * 64  # digest of another artifact


class Directory(MemoryDirectory):
    """A directory in memory that a test may look into, and have forget everything; while it is `deaf` it hears of no
    box.
    """

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.deaf = False

    async def announce(self, box: BoxFacts) -> None:
        if not self.deaf:
            await super().announce(box)

    def forget(self) -> None:
        for table in (self._boxes, self._leases, self._places):
            table.clear()

    @property
    def leases(self) -> set[str]:
        return set(self._leases)


@pytest.fixture
def directory() -> Directory:
    return Directory()


@pytest.fixture
async def fleet(start_fleet: FleetStarter, directory: Directory) -> Fleet:
    """A gateway with that directory."""
    return await start_fleet(lambda: directory)


ClientOf = Callable[..., AsyncClient]


@pytest.fixture
async def client_of() -> AsyncIterator[ClientOf]:
    """Make clients of an address, with a key; they are dropped at the end of the test."""
    async with AsyncExitStack() as clients:

        def made(url: str, key: str | None = None) -> AsyncClient:
            client = AsyncClient(url, key)
            clients.push_async_callback(client.drop)
            return client

        yield made


async def opened(client: AsyncClient, seed: int) -> AsyncClient:
    return await client.open(codecs=["rgb24"], prompt=PROMPTS[seed], seed=seed)


def check(media: Sequence[Media], seed: int) -> int:
    """Raise an AssertionError unless all frames are those of the undisturbed stream, in an order that goes back at most
    once; return how many came again.
    """
    expected = alone(seed, PROMPTS[seed], max(packet.chunk for packet in media) + 1)
    for packet, shown in zip(media, pictures(list(media)), strict=True):
        assert np.array_equal(shown, expected[packet.first])
    firsts = [packet.first for packet in media]
    assert set(firsts) == set(range(max(firsts) + 1)), "a frame is missing"
    assert sum(after != before + 1 for before, after in itertools.pairwise(firsts)) <= 1
    return len(firsts) - len(set(firsts))


async def saved(folder: Path, client: AsyncClient, media: list[Media]) -> None:
    """Watch until the session has a record."""
    while not list(folder.glob(f"{session_of(client)}.record*")):
        media += (await watch(client, 1))[0]


async def free_rows(box: Box) -> int:
    """Return the free rows of a box's pool."""
    return await box._manager.device.call(lambda pool: pool.free)


@pytest.mark.parametrize("fault", ["snapshot damaged", "snapshot gone", "records damaged"])
async def test_a_damaged_session_ends_with_a_sentence_and_nobody_elses_with_it(
    tmp_path: Path, fault: str, start_fleet: FleetStarter, directory: Directory, client_of: ClientOf
) -> None:
    folder = tmp_path / "store"
    fleet = await start_fleet(lambda: directory, keys=KEYS)
    first = await fleet.box(keys=KEYS)
    damaged, other = (client_of(fleet.url, key) for key in KEYS)
    media: list[Media] = []
    for seed, client in enumerate((damaged, other)):
        media = (await watch(await opened(client, seed), 3))[0]
    second = await fleet.box(keys=KEYS)
    stopping = asyncio.create_task(fleet.stop(first))
    for client in (damaged, other):
        rest, code = await to_the_end(client)
        assert code == "stopping"
    media += rest
    await stopping
    for file in folder.glob(
        f"{session_of(damaged)}.{'record' if fault.startswith('record') else 'snapshot-'}*"
    ):
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        if fault.endswith("gone"):
            file.unlink()
        else:
            file.write_bytes(content)

    for _ in range(3):  # also behind the second process that failed
        with pytest.raises(ServeError, match=r"is damaged|two servers could not continue") as lost:
            await damaged.resume()
        assert (lost.value.kind.code, lost.value.kind.retryable) == ("lost", False)
    await other.resume()
    media += (await watch(other, 3))[0]
    assert check(media, 1) == 0
    assert (second.facts().sessions, second.facts().free) == (1, second.facts().capacity - 1)
    assert await free_rows(second) == second.facts().capacity - 1
    assert directory.leases == {session_of(other)}
    assert (await ask(fleet, f"/v1/sessions/{session_of(damaged)}", key=KEYS[1]))[0] in (404, 410)
    await watch(await opened(damaged, 0), 1)  # its client begins another one


async def test_a_session_comes_back_at_its_own_artifact_alone_whatever_the_directory_remembers(
    tmp_path: Path, fleet: Fleet, directory: Directory, client_of: ClientOf
) -> None:
    folder = tmp_path / "store"
    first = await fleet.box()
    client = await opened(client_of(fleet.url), 1)
    media = (await watch(client, 3))[0]
    other = await fleet.box(digest=OTHER)
    stopping = asyncio.create_task(fleet.stop(first))
    media += (await to_the_end(client))[0]
    await stopping
    for _ in range(3):
        with pytest.raises(ServeError, match="no box has the session's artifact") as refused:
            await client.resume()
        assert (refused.value.kind.code, refused.value.kind.retryable) == ("full", True)
    directory.deaf = True
    directory.forget()
    await asyncio.sleep(2 * FRESH_S)  # rows that the gateway has just read are used
    with pytest.raises(ServeError, match="no box answers") as refused:
        await client.resume()
    assert refused.value.kind.retryable
    directory.deaf = False
    while not await directory.boxes():
        await asyncio.sleep(0.05)
    for _ in range(3):
        with pytest.raises(ServeError, match="needs another artifact") as refused:
            await client.resume()
        assert (refused.value.kind.code, refused.value.kind.retryable) == ("full", True)
    # One that does not ask the gateway.
    elsewhere = with_tokens_of(client, client_of(other.facts().inside))
    with pytest.raises(ServeError, match="needs another artifact"):
        await elsewhere.resume()
    assert not list(folder.glob("*.owner-*")), "nobody took the session over"
    assert await free_rows(other) == other.facts().capacity

    await fleet.box()
    directory.forget()
    while len(await directory.boxes()) < 2:
        await asyncio.sleep(0.05)
    await client.resume()
    media += (await watch(client, 3))[0]
    assert check(media, 1) == 0


async def test_a_full_store_stops_no_stream_and_a_session_that_must_move_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: Fleet, directory: Directory, client_of: ClientOf
) -> None:
    folder, put, full = tmp_path / "store", FolderStore.put, [False]

    def putting(store: FolderStore, name: str, pieces: Sequence[Content]) -> None:
        if full[0]:
            raise StoreError(f"{name} cannot be written: No space left on device")
        put(store, name, pieces)

    monkeypatch.setattr(FolderStore, "put", putting)
    first = await fleet.box()
    client = await opened(client_of(fleet.url), 1)
    media: list[Media] = []
    await saved(folder, client, media)
    full[0] = True
    before = media[-1].chunk
    media += (await watch(client, 6))[0]
    assert media[-1].chunk == before + 6
    second = await fleet.box()
    newcomer = await opened(client_of(fleet.url), 2)  # which is not saved either
    await watch(newcomer, 2)
    await newcomer.close()
    stopping = asyncio.create_task(fleet.stop(first))
    rest, code = await to_the_end(client)
    media += rest
    await stopping
    assert code == "stopping"
    for _ in range(3):
        with pytest.raises(ServeError, match="store of snapshots takes no file") as refused:
            await client.resume()
        assert (refused.value.kind.code, refused.value.kind.retryable) == ("full", True)
    assert (second.facts().sessions, await free_rows(second)) == (0, second.facts().capacity)
    assert not directory.leases
    full[0] = False
    await client.resume()
    media += (await watch(client, media[-1].chunk + 4))[0]
    assert check(media, 1) > 0, "what was made while the store was full comes again"


async def test_a_snapshot_that_cannot_be_read_for_a_while_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: Fleet, client_of: ClientOf
) -> None:
    folder, get, fails = tmp_path / "store", FolderStore.get, [False]

    def getting(store: FolderStore, name: str) -> Content | None:
        if fails[0] and ".snapshot-" in name:
            raise StoreError(f"{name} cannot be read: TimeoutError")
        return get(store, name)

    monkeypatch.setattr(FolderStore, "get", getting)
    first = await fleet.box()
    client = await opened(client_of(fleet.url), 1)
    media: list[Media] = []
    await saved(folder, client, media)
    boxes = [await fleet.box() for _ in range(3)]
    await fleet.stop(first)
    media += (await to_the_end(client))[0]
    fails[0] = True
    for box in boxes:
        with pytest.raises(ServeError, match="cannot continue now"):
            await box._manager.reenter(session_of(client), client._resume)
    fails[0] = False
    await client.resume()
    media += (await watch(client, 3))[0]
    assert check(media, 1) == 0


async def test_a_store_that_does_not_answer_delays_no_stream_and_no_drain_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: Fleet, directory: Directory, client_of: ClientOf
) -> None:
    folder, put, answers = tmp_path / "store", FolderStore.put, threading.Event()
    answers.set()

    def putting(store: FolderStore, name: str, pieces: Sequence[Content]) -> None:
        if ".snapshot-" in name:
            assert answers.wait(LIMIT_S)
        put(store, name, pieces)

    monkeypatch.setattr(FolderStore, "put", putting)
    monkeypatch.setattr(manager, "DRAIN_S", 0.5)
    try:
        first = await fleet.box()
        client = await opened(client_of(fleet.url), 1)
        media: list[Media] = []
        await saved(folder, client, media)
        answers.clear()
        before = media[-1].chunk
        media += (await watch(client, 6))[0]
        assert media[-1].chunk == before + 6
        second = await fleet.box()
        stopping = asyncio.create_task(fleet.stop(first))
        rest, code = await to_the_end(client)
        media += rest
        assert code == "stopping"
        assert not stopping.done(), "it waits for its snapshot"
        await comes(lambda: not directory.leases)
        await client.resume()
        assert second.facts().sessions == 1
        media += (await watch(client, media[-1].chunk + 4))[0]
        answers.set()  # what the first box writes now, nobody reads
        await stopping
        await client.drop()
        await client.resume()
        media += (await watch(client, 3))[0]
        assert check(media, 1) > 0
        assert not list(folder.glob(".writing-*"))
        await fleet.stop(second)
        names = {file.name for file in folder.glob("*.snapshot-*")}
        record = await asyncio.to_thread(second._manager.saving._saved.find, session_of(client))  # type: ignore[union-attr]
        assert record is not None
        assert names == {record.snapshot}, "a snapshot that no record names"
    finally:
        answers.set()


async def test_a_store_that_does_not_answer_keeps_no_viewer_out_and_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: Fleet, client_of: ClientOf
) -> None:
    folder, put, answers = tmp_path / "store", FolderStore.put, threading.Event()
    answers.set()

    def putting(store: FolderStore, name: str, pieces: Sequence[Content]) -> None:
        assert answers.wait(LIMIT_S)
        put(store, name, pieces)

    monkeypatch.setattr(FolderStore, "put", putting)
    try:
        box = await fleet.box()
        clients = [await opened(client_of(fleet.url), seed) for seed in (0, 1, 2)]
        media: list[list[Media]] = [[], [], []]
        for client, own in zip(clients, media, strict=True):
            await saved(folder, client, own)
        stays, closes, leaves = clients
        media[0] += (await watch(stays, 1))[0]
        answers.clear()
        await leaves.drop()
        parked = box._manager.sessions[session_of(leaves)]
        monkeypatch.setattr(box._manager, "_lease_s", lambda of: 0.0 if of is parked else LIMIT_S)
        await comes(lambda: parked._on_hold)
        closing = asyncio.create_task(ask(fleet, f"/v1/sessions/{session_of(closes)}", "DELETE"))
        await comes(lambda: session_of(closes) not in box._manager.sessions)
        await stays.drop()
        await stays.resume()
        media[0] += (await watch(stays, media[0][-1].chunk + 4))[0]
        assert check(media[0], 0) == 0
        assert session_of(leaves) in box._manager.sessions
        answers.set()
        await closing
        await comes(lambda: len(box._manager.sessions) <= 1)
    finally:
        answers.set()


async def test_no_row_and_no_lease_is_left_of_sessions_that_nobody_comes_back_to(
    tmp_path: Path, fleet: Fleet, directory: Directory, client_of: ClientOf
) -> None:
    folder = tmp_path / "store"
    boxes = [await fleet.box(lease_s=0.3) for _ in range(2)]
    closed, dropped, moved = (client_of(fleet.url) for _ in range(3))
    for seed, client in enumerate((closed, dropped, moved)):
        await watch(await opened(client, seed), 2)
    status, never = await ask(fleet, "/v1/sessions", "POST", {"prompt": "a b"})
    assert status == 201
    (holder,) = [box for box in boxes if session_of(moved) in box._manager.sessions]
    boxes = [box for box in boxes if box is not holder] + [await fleet.box(lease_s=0.3)]
    await fleet.stop(holder)
    if session_of(dropped) not in boxes[0]._manager.sessions:
        await dropped.resume()
    await dropped.drop()
    await moved.resume()
    await moved.drop()
    if session_of(closed) not in boxes[0]._manager.sessions:
        await closed.resume()
    await closed.close()
    while directory.leases or any(box.facts().sessions for box in boxes):
        await asyncio.sleep(0.05)
    for box in boxes:
        assert (await free_rows(box), box.facts().free) == (box.facts().capacity,) * 2
    assert (await ask(fleet, "/v1/sessions"))[1]["data"] == []
    files = {file.name[:16] for file in folder.glob("*.snapshot-*")}
    assert files == {session_of(dropped), session_of(moved)}, "those whose clients may come back"
    assert (await ask(fleet, f"/v1/sessions/{never['id']}"))[0] == 404
