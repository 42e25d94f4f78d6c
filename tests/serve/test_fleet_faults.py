"""Boxes that are killed or paused, and sessions that kill them: streams go on with their bytes, and none runs twice."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path

import pytest

from seko_serve.errors import ServeError
from seko_serve.live.pace import CREDIT

from .box_fleet import BoxFleet, fleet
from .fleet_soak import (
    doubles,
    holder,
    more,
    moved,
    nothing_left,
    number,
    resumed,
    rows,
    saved_chunks,
    soak,
)
from .test_fleet_directory import RedisServer, redis_server
from .test_server import http, watch
from .toy_box import POISON, SENT, SLOW, STUCK

pytestmark = [pytest.mark.slow, pytest.mark.quiet, pytest.mark.limit_s(300)]
__all__ = ["fleet", "redis_server"]


async def test_boxes_that_are_killed_at_random_cost_viewers_a_moment(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    counts = await soak(redis_server.url, tmp_path / "store", kills=5)
    assert counts["resumes"] > 0
    assert counts["double"] == 0


def line(t: float, epoch: int, process: int, session: str = "s") -> str:
    return json.dumps({"t": t, "process": process, "session": session, "epoch": epoch, "chunk": 0})


def test_chunks_that_two_boxes_send_at_a_time_are_counted() -> None:
    apart = [line(0, 0, 7), line(1, 0, 7), line(2, 1, 8), line(4, 2, 7), line(3, 1, 8), line(2, 0, 9, "t")]
    assert doubles(apart) == 0
    assert doubles([*apart, line(2.5, 0, 7)]) == 1, "its first owner, when the second one has it"
    assert doubles([*apart, line(2.5, 1, 9), line(5, 2, 9)]) == 2, "two that take themselves for one owner"


async def snapshots_written(inside: str) -> float:
    """Wait until a box writes no snapshot; return how many it has written."""
    while True:
        text = (await asyncio.to_thread(http, f"{inside}/metrics"))[1].decode()
        counts = {
            step: re.search(rf'^seko_serve_snapshot_seconds_count{{step="{step}"}} (\S+)$', text, re.M)
            for step in ("capture", "write")
        }
        taken, written = (0.0 if count is None else float(count[1]) for count in counts.values())
        if taken == written:
            return written
        await asyncio.sleep(0.02)


async def test_behind_the_last_snapshot_there_are_no_more_chunks_than_from_one_to_the_next(
    redis_server: RedisServer, tmp_path: Path, fleet: BoxFleet
) -> None:
    folder, directory, every = tmp_path / "store", redis_server.url, 3
    first = await fleet.box(every)
    (inside,) = [row.inside for row in await rows(directory) if number(row.name) == first.pid]
    viewer = await fleet.viewer(0, saved=True)
    viewer.media += (await watch(viewer.client, CREDIT, acknowledge=False))[0]
    await snapshots_written(inside)
    behind = []
    for shown in range(3 * every):  # each chunk that was shown allows one more
        await viewer.client.send("ack", chunk=shown)
        viewer.media += (await watch(viewer.client, 1, acknowledge=False))[0]
        await snapshots_written(inside)
        if chunks := viewer.media[-1].chunk + 1 if list(folder.glob("*.record*")) else 0:
            behind.append(chunks - saved_chunks(folder, viewer.session))
    assert set(behind) == set(range(1, every + 1))
    assert await snapshots_written(inside) > 1
    while behind[-1] < every:
        shown += 1
        await viewer.client.send("ack", chunk=shown)
        viewer.media += (await watch(viewer.client, 1, acknowledge=False))[0]
        await snapshots_written(inside)
        behind.append(viewer.media[-1].chunk + 1 - saved_chunks(folder, viewer.session))
    first.kill()
    await fleet.box(every)
    await moved(viewer)
    assert viewer.again == [every]
    await fleet.end(viewer)


async def test_a_session_whose_box_is_killed_before_its_first_snapshot_is_gone(
    redis_server: RedisServer, fleet: BoxFleet
) -> None:
    directory = redis_server.url
    first = await fleet.box(1000)
    viewer = await fleet.viewer(0)
    await more(viewer)
    await fleet.box()
    first.kill()
    with pytest.raises(ServeError, match="there is no such session") as gone:
        await moved(viewer)
    assert (gone.value.kind.code, gone.value.kind.retryable) == ("not_found", False)
    viewer.check()
    again = await fleet.viewer(0)
    await more(again)
    await fleet.end(again)
    await nothing_left(directory)


async def test_behind_a_slow_store_all_chunks_since_the_last_snapshot_that_it_has_come_again(
    redis_server: RedisServer, tmp_path: Path, fleet: BoxFleet
) -> None:
    folder, directory = tmp_path / "store", redis_server.url
    boxes = [await fleet.box(1, desk=tmp_path) for _ in range(2)]
    viewer = await fleet.viewer(0, saved=True)
    await viewer.watch(lambda: bool(list(folder.glob("*.record*"))))
    (tmp_path / SLOW).touch()
    shown = viewer.media[-1].chunk
    await viewer.watch(lambda: viewer.media[-1].chunk > shown + 12)  # some snapshots later
    killed = await holder(directory, viewer.session)
    next(box for box in boxes if box.pid == killed).kill()
    await moved(viewer)
    assert len(viewer.again) == 1
    await fleet.end(viewer)
    await nothing_left(directory)


async def test_a_box_that_stops_ends_although_the_store_never_answers(
    redis_server: RedisServer, tmp_path: Path, fleet: BoxFleet
) -> None:
    folder, directory = tmp_path / "store", redis_server.url
    first = await fleet.box(1, desk=tmp_path, patience=0.5)
    viewer = await fleet.viewer(0)
    await viewer.watch(lambda: bool(list(folder.glob("*.record*"))))
    (tmp_path / STUCK).touch()
    await more(viewer, 12)  # one snapshot is being written, and no other is taken
    second = await fleet.box(1)
    first.send_signal(signal.SIGTERM)
    await moved(viewer)
    assert await holder(directory, viewer.session) == second.pid
    await asyncio.to_thread(first.wait)
    assert first.returncode != -signal.SIGKILL
    await fleet.end(viewer)
    await nothing_left(directory)


async def test_a_session_that_kills_each_box_that_continues_it_is_stopped_after_two(
    redis_server: RedisServer, tmp_path: Path, fleet: BoxFleet
) -> None:
    folder, directory = tmp_path / "store", redis_server.url
    first = await fleet.box(desk=tmp_path)
    poison = await fleet.viewer(0)
    await poison.watch(lambda: bool(list(folder.glob("*.record*"))))
    others = [await fleet.box(desk=tmp_path) for _ in range(4)]
    first.kill()
    first.wait()
    (tmp_path / f"{POISON}{poison.session}").touch()
    bystander = await fleet.viewer(1, saved=True)
    await bystander.watch(lambda: len({file.name[:16] for file in folder.glob("*.record*")}) > 1)
    watching = asyncio.create_task(more(bystander, 100))
    with pytest.raises(ServeError, match="two servers could not continue the session") as end:
        await moved(poison)
    assert (end.value.kind.code, end.value.kind.retryable) == ("lost", False)
    with pytest.raises(ServeError, match="two servers could not continue the session"):
        await poison.client.resume()
    await watching
    ended = [box.returncode for box in others if box.poll() is not None]
    assert ended == [-signal.SIGKILL] * 2
    await fleet.end(bystander)
    await nothing_left(directory)
    assert doubles((tmp_path / SENT).read_text().splitlines()) == 0


@pytest.mark.parametrize("saves", [True, False], ids=["saved in time", "never saved"])
async def test_a_session_that_follows_such_a_session_twice_ends_with_it_unless_it_was_saved_meanwhile(
    redis_server: RedisServer, tmp_path: Path, saves: bool, fleet: BoxFleet
) -> None:
    folder, directory = tmp_path / "store", redis_server.url
    first = await fleet.box()
    poison, beside = await fleet.viewer(0), await fleet.viewer(1)
    for viewer in (poison, beside):
        await viewer.watch(lambda viewer=viewer: bool(list(folder.glob(f"{viewer.session}.record*"))))  # type: ignore[misc]
    (tmp_path / f"{POISON}{poison.session}").touch()
    first.kill()
    first.wait()
    for _ in range(2):
        snapshots = set(folder.glob(f"{beside.session}.snapshot-*"))
        box = await fleet.box(1 if saves else 1000, desk=tmp_path)
        await moved(beside)
        if saves:
            await beside.watch(
                lambda old=snapshots: old.isdisjoint(folder.glob(f"{beside.session}.snapshot-*"))
            )
        coming = asyncio.create_task(resumed(poison.client))
        await asyncio.to_thread(box.wait)
        coming.cancel()
        assert box.returncode == -signal.SIGKILL
    await fleet.box()
    for viewer in (poison,) if saves else (poison, beside):
        with pytest.raises(ServeError, match="two servers could not continue the session") as end:
            await moved(viewer)
        assert (end.value.kind.code, end.value.kind.retryable) == ("lost", False)
    if saves:
        await moved(beside)
        await fleet.end(beside)
    await nothing_left(directory)


async def test_a_paused_box_that_wakes_up_continues_no_session_and_saves_none(
    redis_server: RedisServer, fleet: BoxFleet
) -> None:
    directory = redis_server.url
    first = await fleet.box(1)
    viewer = await fleet.viewer(0)
    await viewer.watch(lambda: len(viewer.media) > 6)
    second = await fleet.box(1)
    first.send_signal(signal.SIGSTOP)
    await viewer.client.drop()
    await moved(viewer)
    assert await holder(directory, viewer.session) == second.pid
    first.send_signal(signal.SIGCONT)
    while {row.sessions for row in await rows(directory) if number(row.name) == first.pid} != {0}:
        await asyncio.sleep(0.1)
    count = len(viewer.media)
    await viewer.watch(lambda: len(viewer.media) > count + 6)
    assert await holder(directory, viewer.session) == second.pid
    second.kill()  # what the first one saved after it woke up would be read now
    await moved(viewer)
    assert await holder(directory, viewer.session) == first.pid
    await fleet.end(viewer)
