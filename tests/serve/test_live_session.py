"""A live session on the device's thread: what it asks the pool for."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from seko_runtime.controls.recording import as_json
from seko_runtime.errors import DeviceMemoryError, UsageError
from seko_runtime.sessions.scheduler import Waiting, next_call
from seko_runtime.sessions.session import PendingResult
from seko_serve.errors import ServeError
from seko_serve.live.device import Device
from seko_serve.live.encoding import MadeChunk
from seko_serve.live.manager import SessionManager
from seko_serve.live.pace import Pace
from seko_serve.live.session import Capture, LiveSession
from seko_serve.live.viewer import Viewer
from seko_serve.live.workload import ServedPool
from seko_serve.metrics import Metrics
from seko_serve.protocol import Codec, Control
from seko_serve.settings import Settings
from seko_serve.store.folder import FolderStore
from seko_serve.store.saved import SavedSessions
from seko_serve.video.content import VideoContent
from seko_serve.video.opening import Opening
from tests.runtime import toy_pool

from .bounded import comes
from .conftest import toy_opener
from .toys import world_opener


class Row:
    """Notes what the pool is asked for."""

    def __init__(self) -> None:
        self.dues: list[float] = []

    def request_chunk(self, due: float) -> PendingResult:
        self.dues.append(due)
        return PendingResult(None, due, due, 0)  # until it plays, a chunk is due when it is first asked for


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveSession]:
    """A session whose row notes what it is asked for, and whose chunks are never encoded."""
    loop, content = asyncio.new_event_loop(), VideoContent(toy_pool.pool_manifest(), Opening("a b", 0, 16.0))
    with ThreadPoolExecutor(1) as workers:
        session = LiveSession("x", "y", content, loop, workers, lambda: None, Metrics())
        session.row = Row()
        monkeypatch.setattr(session._encoder, "_encode_all", lambda: None)
        yield session
    loop.close()


def test_a_newcomer_is_served_beside_viewers_whose_chunks_are_always_late(session: LiveSession) -> None:
    """A call takes three times as long as a chunk plays, and carries one session."""
    call_s, row = 3.0, cast("Row", session.row)
    late = [Pace(1.0), Pace(1.0)]
    for pace in late:
        pace.count_chunk(1, 0.0)
    now, served = 10.0, []
    for _ in range(8):
        session.request(now)
        dues = [*(pace.due(now) for pace in late), row.dues[-1]]
        call = next_call([Waiting(due) for due in dues], {None: {1: call_s}}, now)
        assert call is not None
        now += call_s
        served += call.sessions
        for number in call.sessions:
            if number < len(late):
                late[number].count_chunk(1, now)
            else:
                session.accept_chunk(object())
    assert sorted(served[:3]) == [0, 1, 2]
    assert served.count(2) > 1


def test_with_a_lead_a_chunk_begins_that_long_before_a_player_needs_it(
    session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve frames at 16 a second, shown from second 100 on."""
    now = [100.0]
    monkeypatch.setattr("seko_serve.live.session.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(session.viewer, "takes", lambda _: True)
    device = Device(lambda: pytest.fail("opened"))
    device.add(session)
    session.viewer.detached_at = None
    assert session.ready()  # nothing plays yet
    session.viewer._pace.count_chunk(12, now[0])
    session._chunks_made = 1
    assert session.ready()
    assert device._patience(now[0]) is None
    session._lead_s = 0.25
    for now[0], ready, patience in ((100.0, False, 0.5), (100.375, False, 0.125), (100.5, True, None)):
        assert session.ready() is ready
        assert device._patience(now[0]) == patience
    now[0] = 100.375
    session.viewer.stop_clock()
    assert session.ready()


@pytest.mark.parametrize("lacking", ["input", "acknowledgement"])
def test_only_a_due_time_to_come_counts_while_the_next_chunk_waits_for_its_viewer(
    lacking: str, session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A viewer who does not answer would else keep videos and voices from being made."""
    now = [100.0]
    monkeypatch.setattr("seko_serve.live.session.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(session.content, "starved", lambda: lacking == "input")
    monkeypatch.setattr(session.viewer, "takes", lambda _: lacking != "acknowledgement")
    device = Device(lambda: pytest.fail("opened"))
    device.add(session)
    session.viewer.detached_at = None
    session.viewer._pace.count_chunk(16, now[0])
    session._chunks_made = 1
    now[0] = 100.5
    assert device._dues() == [101.0]
    now[0] = 101.5
    assert device._dues() == []
    lacking = ""
    assert device._dues() == [101.0]  # the device alone is behind


@pytest.mark.parametrize(("came", "late"), [(101.5, False), (100.5, True)])
def test_a_chunk_is_late_by_what_the_server_took_and_not_by_its_viewers_silence(
    came: float, late: bool, session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the chunk lacked comes after, or before, all earlier frames have been shown."""
    now, starved = [100.0], [True]
    for module in ("session", "viewer"):
        clock = SimpleNamespace(monotonic=lambda: now[0])
        monkeypatch.setattr(f"seko_serve.live.{module}.time", clock)
    monkeypatch.setattr(session.content, "starved", lambda: starved[0])
    monkeypatch.setattr(session.content, "apply", lambda *_: starved.clear() or starved.append(False))
    session.viewer.count(16)
    session._chunks_made = 1
    session.viewer.acknowledge(0)
    now[0] = came
    session.control(Control("restart", "1", {}))
    now[0] = 102.0
    session.request(now[0])
    assert (session.viewer.count(16).lateness > 0) is late


class BeginsMeanwhile:
    """A stream whose next chunk may begin right after the device's thread has looked whether it is ready."""

    row = pending = trace = None

    def __init__(self) -> None:
        self.looks, self.begin, self.requested = 0, time.monotonic() + 3600, threading.Event()

    def ready(self) -> bool:
        self.looks += 1
        early = time.monotonic() < self.begin
        if self.looks == 2:  # the look of a thread that waits if nothing is ready
            self.begin = time.monotonic()
        return not early and not self.requested.is_set()

    def request(self, _: float) -> None:
        self.requested.set()

    def next_due(self) -> None:
        return None

    def next_begin(self) -> float:
        return self.begin


async def test_a_chunk_that_may_begin_while_the_device_looks_is_not_waited_for() -> None:
    device, stream = Device(toy_opener), BeginsMeanwhile()
    await device.start()
    await device.call(lambda _: device.add(stream))  # type: ignore[arg-type]
    assert await asyncio.to_thread(stream.requested.wait, 30)
    await device.stop()


async def test_an_opening_that_is_given_up_while_it_gets_a_row_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = SessionManager(Settings(Path("toy")), Device(toy_opener))
    await manager.start()
    begun, given_up, take_row = threading.Event(), threading.Event(), manager._take_row

    def slow(session: LiveSession, pool: ServedPool) -> None:
        begun.set()
        given_up.wait()
        take_row(session, pool)

    monkeypatch.setattr(manager, "_take_row", slow)
    opening = asyncio.create_task(manager.open("y", Opening("a b", 0, 16.0)))
    assert await asyncio.to_thread(begun.wait, 30)
    opening.cancel()
    await asyncio.sleep(0)
    given_up.set()
    await asyncio.wait({opening})
    assert opening.cancelled()
    assert await manager.call(lambda pool: pool.free) == manager.capacity
    await manager.stop()


async def test_a_server_that_is_closed_while_a_session_gets_its_lease_does_not_open_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a box that the scaler has found empty, and ends."""
    manager = SessionManager(Settings(Path("toy")), Device(toy_opener))
    await manager.start()

    async def claim(*_: object) -> None:
        manager.closed = True

    monkeypatch.setattr(manager._leases, "claim", claim)
    with pytest.raises(ServeError, match="takes no new session"):
        await manager.open("y", Opening("a b", 0, 16.0))
    assert manager.admission.running == 0
    await manager.stop()


async def test_a_session_whose_saving_is_given_up_while_it_is_captured_can_be_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As by a server that stops while it saves a session that nobody watches any more."""
    manager = SessionManager(Settings(Path("toy"), snapshots=str(tmp_path / "store")), Device(toy_opener))
    await manager.start()
    session = await manager.open("y", Opening("a b", 0, 16.0))
    await manager.saving.token(session)
    begun, given_up, capture = threading.Event(), threading.Event(), session.capture

    def slow() -> Capture:
        begun.set()
        given_up.wait()
        return capture()

    monkeypatch.setattr(session, "capture", slow)
    saving = asyncio.create_task(manager._park(session))
    assert await asyncio.to_thread(begun.wait, 30)
    saving.cancel()
    await asyncio.sleep(0)
    given_up.set()
    await asyncio.wait({saving})
    assert saving.cancelled()
    await manager.call(lambda _: None)
    assert session.settled
    await manager.stop()


@pytest.mark.parametrize("stops", [False, True])
async def test_a_session_for_which_the_store_does_not_answer_keeps_no_other_from_being_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stops: bool
) -> None:
    """Neither where their viewers are gone, nor where the server stops."""
    real, answer, stuck = FolderStore.put, threading.Event(), threading.Event()
    silent: list[str] = []

    def put(store: FolderStore, name: str, pieces: Any) -> None:
        if name.startswith(tuple(silent)):
            stuck.set()
            answer.wait()
        real(store, name, pieces)

    monkeypatch.setattr(FolderStore, "put", put)
    monkeypatch.setattr("seko_serve.live.manager.REAP_S", 0.01)
    try:
        settings = Settings(Path("toy"), snapshots=str(tmp_path / "store"))
        manager = SessionManager(settings, Device(toy_opener))
        await manager.start()
        sessions = [await manager.open("y", Opening("a b", number, 16.0)) for number in range(3)]
        silent.append(sessions[0].name)
        for session in sessions:
            await manager.saving.token(session)
        if not stops:
            monkeypatch.setattr(manager, "_lease_s", lambda _: 0.0)
        ending = asyncio.create_task(manager.stop() if stops else asyncio.sleep(0))
        assert await asyncio.to_thread(stuck.wait, 30)
        store = SavedSessions(FolderStore(tmp_path / "store"))
        async with asyncio.timeout(30):
            await comes(lambda: None not in [store.find(session.name) for session in sessions[1:]])
            await comes(lambda: stops or len(manager.sessions) <= 1)
        assert store.find(sessions[0].name) is None
        answer.set()
        await ending
        await manager.stop()
    finally:
        answer.set()


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UsageError("no such key"), "bad_request", "no such key"),
        (DeviceMemoryError("cuda:0 has 3 bytes"), "exhausted", "the server's machine lacks what this needs"),
    ],
)
def test_a_control_that_the_server_cannot_apply_is_not_the_clients_fault(
    error: Exception, code: str, words: str, session: LiveSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []

    def apply(*_: object) -> None:
        raise error

    monkeypatch.setattr(session.content, "apply", apply)
    monkeypatch.setattr(session.viewer, "tell", lambda text: told.append(json.loads(text)))
    session.control(Control("restart", "7", {}))
    session.request(0.0)
    (rejected,) = [line for line in told if line["type"] == "rejected"]
    assert (rejected["id"], rejected["code"]) == ("7", code)
    assert rejected["message"].startswith(words)


def test_a_chunk_that_cannot_be_encoded_leaves_the_row_to_the_devices_thread() -> None:
    """Which may be in a call with it."""
    loop, content = asyncio.new_event_loop(), VideoContent(toy_pool.pool_manifest(), Opening("a b", 0, 16.0))
    with ThreadPoolExecutor(1) as workers:
        session = LiveSession("x", "y", content, loop, workers, lambda: None, Metrics())
        session.row = row = cast("Any", Row())
        session._encoder.add(MadeChunk(0, cast("Any", None), ()))  # None cannot be read
    loop.close()
    assert session.end is not None
    assert session.row is row


def steered(control: Control | None, *, asked: bool = False, saved: bool = False) -> list[np.ndarray]:
    """Video frames of two chunks of a stream behind two others, with a control between; ``asked``: the first of the
    two was requested before the control came, ``saved``: and the session was saved and loaded in between."""
    with world_opener() as pool:
        content = VideoContent(pool.manifest, Opening("a b c", 3, 4.0))
        row = content.open(pool, "name", "tenant")

        def next_frames() -> np.ndarray:
            content.ask(row, 0.0)
            ((_, chunk),) = pool.serve_next()
            content.accept_chunk(chunk)
            return np.asarray(chunk.video()[0])

        content.apply(row, Control("keys", "1", {"held": ["KeyW"]}))
        for _ in range(2):
            next_frames()
        if asked:
            content.ask(row, 0.0)
        if saved:
            state = json.loads(json.dumps(as_json(content.state())))
            content = VideoContent(pool.manifest, content.opening)
            content.load(row, state)
        if control is not None:
            content.apply(row, control)
        frames = [next_frames() for _ in range(2)]
        row.close()
        return frames


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(
    "control",
    [
        None,
        Control("keys", "2", {"held": ["KeyD"]}),
        Control("poses", "2", {"poses": [np.eye(4).ravel().tolist()] * 4}),
        Control("restart", "2", {}),
    ],
)
def test_a_control_changes_the_next_chunk_whether_or_not_that_was_requested(
    control: Control | None, saved: bool
) -> None:
    expected = steered(control)
    assert (control is None) == np.array_equal(expected[0], steered(None)[0])
    for got, wanted in zip(steered(control, asked=True, saved=saved), expected, strict=True):
        assert np.array_equal(got, wanted)


def test_a_chunk_that_was_under_way_when_a_socket_was_lost_starts_no_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The viewer is back after a minute, and the next chunk is not a minute late."""
    loop, now = asyncio.new_event_loop(), [100.0]
    monkeypatch.setattr("seko_serve.live.viewer.time", SimpleNamespace(monotonic=lambda: now[0]))
    viewer = Viewer(16.0, loop)
    first = viewer.enter()
    viewer.attach(first, lambda: "ready", None, 1, ())
    viewer.count(12)
    viewer.leave(first)
    viewer.count(12)
    now[0] += 60.0
    second = viewer.enter()
    viewer.attach(second, lambda: "ready", -1, 1, ())
    assert not viewer.plays
    assert viewer.count(12).lateness == 0
    assert viewer.counts()["late_chunks"] == 0
    loop.close()


def test_a_socket_that_lost_its_session_before_its_hello_changes_no_codec(session: LiveSession) -> None:
    slow, quick = session.viewer.enter(), session.viewer.enter()
    session.attach(quick, lambda: "ready", None, 1, (Codec.MJPEG,))
    hello = Control("hello", "", {"codecs": ("mjpeg", "rgb24")})
    watcher = session.watch(hello, repr)
    with pytest.raises(ServeError, match="took over"):
        session.attach(slow, lambda: "ready", -1, 1, (Codec.RGB24,))
    assert watcher.end is None
    session.watch(hello, repr)
    assert cast("VideoContent", session.content).frames.codec is Codec.MJPEG


def test_frames_are_timed_by_a_rate_that_is_no_whole_number() -> None:
    with world_opener() as pool:
        content = VideoContent(pool.manifest, Opening("a b c", 3, 12.5))
        row = content.open(pool, "name", "tenant")
        content.attach((Codec.RGB24,))
        content.ask(row, 0.0)
        ((_, chunk),) = pool.serve_next()
        piece = content.accept_chunk(chunk)
        piece.read()
        times = [media.pts_us for media in piece.encode(0, 100)]
        assert times[:3] == [8_000_000, 8_080_000, 8_160_000]
        row.close()
