"""The directory of a fleet, in memory and in a real Redis server: one lease a session, whoever asks and whenever."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_serve.fleet import directory as directory_module
from seko_serve.fleet.choice import FRESH_S, LOST_S, KnownBoxes, in_order
from seko_serve.fleet.config import FleetConfig, ModelConfig
from seko_serve.fleet.directory import (
    LEASE_S,
    BoxFacts,
    Directory,
    DirectoryError,
    HeldError,
    Lease,
    MemoryDirectory,
    Place,
    TooManyError,
)
from seko_serve.simulation.traffic import COMMANDS

SHORT_MS = 300  # of leases in Redis, whose clock cannot be set
BOX = BoxFacts("box", "ws://box:1", "http://box:1", "group", "model", "digest", 4, 4, 0, 0, True)


class RedisServer:
    """A redis-server of its own, without a file, that may be killed and started again.

    Parameters
    ----------
    folder : Path
        Its folder.
    *options
        Further options of its command line.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self._folder, self._options = folder, options
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        command = [
            "redis-server",
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(self._folder),
        ]
        self._process = subprocess.Popen(
            [*command, "--save", "", "--appendonly", "no", *self._options], stdout=subprocess.DEVNULL
        )
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                assert self._process.poll() is None
                time.sleep(0.01)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    pytest.importorskip("redis", reason="needs seko-serve[ray]")
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server")
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


PassBy = Callable[[], Awaitable[None]]


@pytest.fixture(params=["memory", "redis"])
async def passing(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Directory, PassBy]]:
    """An empty directory, and what waits until unrepeated leases have ended."""
    if request.param == "memory":
        clock = Clock()

        async def pass_by() -> None:
            clock.now += LEASE_S

        yield MemoryDirectory(clock), pass_by
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    from seko_serve.fleet import redis_directory

    monkeypatch.setattr(redis_directory, "_LEASE_MS", SHORT_MS)
    directory = redis_directory.RedisDirectory(server.url, request.node.name)
    yield directory, lambda: asyncio.sleep(1.5 * SHORT_MS / 1000)
    await directory.close()


@pytest.fixture
def directory(passing: tuple[Directory, PassBy]) -> Directory:
    return passing[0]


@pytest.fixture
def pass_by(passing: tuple[Directory, PassBy]) -> PassBy:
    return passing[1]


def place(session: str = "s", tenant: str = "t") -> Place:
    return Place(session, tenant, "model", "digest")


async def test_rows_of_boxes_end_if_they_are_not_repeated(directory: Directory, pass_by: PassBy) -> None:
    assert await directory.boxes() == []
    other = replace(BOX, name="other", free=0, accepts=False)
    for row in (BOX, other):
        await directory.announce(row)
    assert await directory.boxes() == [BOX, other]
    await directory.withdraw("box")
    assert await directory.boxes() == [other]
    await pass_by()
    assert await directory.boxes() == []
    await directory.announce(BOX)
    assert await directory.boxes() == [BOX]


async def test_a_session_has_one_lease_and_each_has_a_higher_number(
    directory: Directory, pass_by: PassBy
) -> None:
    first = await directory.claim(place(), "a", 0)
    assert first.box == "a"
    for box in ("a", "b"):
        with pytest.raises(HeldError):
            await directory.claim(place(), box, 0)
    assert await directory.find("s") == (place(), first)
    assert await directory.renew({place(): first}) == {"s": first}
    await pass_by()
    assert await directory.find("s") == (place(), None)
    assert await directory.renew({place(): first}) == {"s": None}
    second = await directory.claim(place(), "b", 0)
    assert second.fence > first.fence
    assert await directory.renew({place(): first}) == {"s": second}
    await directory.release("s", "t", first)
    assert await directory.find("s") == (place(), second)
    await directory.release("s", "t", second)
    assert await directory.find("s") == (place(), None)
    assert await directory.find("other") == (None, None)


async def test_a_box_whose_lease_another_has_changes_nothing_of_the_session(
    directory: Directory, pass_by: PassBy
) -> None:
    first = await directory.claim(place(), "a", 0)
    await pass_by()
    second = await directory.claim(place(), "b", 0)
    assert await directory.renew({replace(place(), digest="of an earlier build"): first}) == {"s": second}
    assert await directory.find("s") == (place(), second)


async def test_of_claims_at_once_one_succeeds(directory: Directory) -> None:
    claims = [directory.claim(place(), f"box-{number}", 0) for number in range(20)]
    results = await asyncio.gather(*claims, return_exceptions=True)
    (lease,) = [result for result in results if isinstance(result, Lease)]
    assert sum(isinstance(result, HeldError) for result in results) == 19
    assert (await directory.find("s"))[1] == lease


async def test_a_tenants_sessions_are_counted_over_all_boxes_while_their_leases_live(
    directory: Directory, pass_by: PassBy
) -> None:
    leases = [await directory.claim(place(name), box, 2) for name, box in (("one", "a"), ("two", "b"))]
    with pytest.raises(TooManyError):
        await directory.claim(place("three"), "c", 2)
    await directory.claim(place("three", "another tenant"), "c", 2)
    await directory.release("one", "t", leases[0])
    await directory.claim(place("three of t"), "c", 2)
    with pytest.raises(TooManyError):
        await directory.claim(place("four"), "c", 2)
    await pass_by()
    await directory.claim(place("four"), "c", 2)


async def test_a_video_is_found_at_its_box(directory: Directory) -> None:
    assert await directory.noted("video") is None
    await directory.note("video", "box")
    assert await directory.noted("video") == "box"


async def test_a_shelf_has_so_many_things_by_name(directory: Directory) -> None:
    assert (await directory.labels("s"), await directory.kept("s", "a")) == ({}, None)
    for name, content in (("a", "1"), ("b", "2"), ("a", "3")):
        await directory.keep("s", name, f"label of {content}", content, 2)
    with pytest.raises(TooManyError):
        await directory.keep("s", "c", "label", "4", 2)
    await directory.keep("other", "c", "label", "4", 2)
    assert await directory.labels("s") == {"a": "label of 3", "b": "label of 2"}
    assert [await directory.kept("s", name) for name in "abc"] == ["3", "2", None]
    for _ in range(2):
        await directory.remove("s", "a")
    assert (await directory.labels("s"), await directory.kept("s", "a")) == ({"b": "label of 2"}, None)
    await directory.keep("s", "c", "label", "4", 2)


async def test_a_redis_that_ended_is_a_fault_and_one_that_starts_again_serves_again(
    redis_server: RedisServer,
) -> None:
    from seko_serve.fleet.redis_directory import RedisDirectory

    directory = RedisDirectory(redis_server.url, "restarted")
    lease = await directory.claim(place(), "a", 0)
    redis_server.kill()
    for call in (
        directory.boxes(),
        directory.claim(place("b"), "a", 0),
        directory.renew({place(): lease}),
    ):
        with pytest.raises(DirectoryError):
            await call
    redis_server.start()  # without what it knew
    assert await directory.renew({place(): lease}) == {"s": None}
    assert (await directory.claim(place(), "a", 0)).box == "a"
    await directory.close()


def test_what_redis_refuses_is_told_before_a_fleet_starts(redis_server: RedisServer, tmp_path: Path) -> None:
    from redis import Redis

    from seko_serve.fleet.checks import check

    def sentence(url: str) -> str:
        config = FleetConfig((ModelConfig("none"),), str(tmp_path / "store"), url, port=0)
        with pytest.raises(DirectoryError) as refused:
            check(config, {})
        return str(refused.value)

    where = f"127.0.0.1:{redis_server.port}"
    refuses = f"directory: the Redis server at {where} refuses:"
    assert sentence(f"redis://{where}/99") == f"{refuses} DB index is out of range"
    with Redis.from_url(redis_server.url) as administrator:
        administrator.config_set("requirepass", "hush")
        try:
            sentences = [sentence(f"redis://{password}{where}/0") for password in ("", ":loud@")]
        finally:
            administrator.config_set("requirepass", "")
    assert sentences == [f"{refuses} the password is another one"] * 2


def test_boxes_with_room_come_first_and_what_was_promised_counts() -> None:
    rows = [
        replace(BOX, name="full", free=0, waiting=1),
        replace(BOX, name="queue", free=0, waiting=5),
        replace(BOX, name="half", free=2),
        replace(BOX, name="large", free=3, capacity=16),
        replace(BOX, name="old", free=4, digest="old", group="old"),
        replace(BOX, name="ending", free=4, digest="old", accepts=False),
        replace(BOX, name="other", free=4, model="other"),
    ]

    def names(promised: dict[str, int], **wanted: str) -> list[str]:
        return [box.name for box in in_order(rows, promised, retired={"old"}, **wanted)]

    assert names({}, model="model") == ["half", "large", "full", "queue"]
    assert names({"half": 2}, model="model") == ["large", "half", "full", "queue"]
    assert names({})[0] == "other"
    assert names({}, digest="old") == ["old"]
    assert names({}, digest="none") == []


def test_gateways_spread_sessions_over_boxes_by_their_free_rows() -> None:
    rows = [
        replace(BOX, name="most", free=3),
        replace(BOX, name="less", free=1),
        replace(BOX, name="full", free=0),
        replace(BOX, name="promised", free=1),
    ]
    dice = Random(0)
    orders = [[box.name for box in in_order(rows, {"promised": 1}, dice=dice)] for _ in range(4000)]
    assert {tuple(order[2:]) for order in orders} == {("full", "promised")}
    assert sum(order[0] == "most" for order in orders) / 4000 == pytest.approx(3 / 4, abs=0.03)


def test_what_was_sent_to_a_box_counts_until_its_row_does() -> None:
    known = KnownBoxes()
    assert known.stale(0.0)
    known.update([BOX, replace(BOX, name="other")], 0.0)
    assert not known.stale(FRESH_S)
    assert known.stale(FRESH_S + 0.01)
    for name in (BOX.name, "other", "other"):
        known.sent(name, 1.0)
    assert known.promised(1.0) == {BOX.name: 1, "other": 2}
    known.update([BOX, replace(BOX, name="other", free=0)], 1.5)
    assert known.promised(1.5) == {BOX.name: 1}
    assert known.promised(1.0 + 2 * directory_module.BEAT_S) == {BOX.name: 0}
    known.remove(BOX.name)
    assert [row.name for row in known.rows] == ["other"]


def test_a_model_whose_boxes_went_while_they_accepted_is_lost_for_a_while() -> None:
    known = KnownBoxes()
    other, third = replace(BOX, name="b", model="other"), replace(BOX, name="c", model="third")
    known.update([BOX, other, third], 0.0)
    known.update([BOX, other, replace(third, accepts=False)], 1.0)
    assert known.lost(1.0) == []
    known.update([BOX], 2.0)
    assert known.lost(2.0) == [other]  # the third ended as it said
    assert known.lost(1.0 + LOST_S) == []
    known.update([BOX, replace(other, name="d")], 3.0)
    assert known.lost(3.0) == []


async def test_the_simulation_counts_the_commands_that_redis_gets(redis_server: RedisServer) -> None:
    import redis

    from seko_serve.fleet.redis_directory import RedisDirectory

    directory, watcher = RedisDirectory(redis_server.url, "counted"), redis.Redis(port=redis_server.port)
    await directory.claim(place("warm"), "a", 0)  # scripts are loaded
    lease = Lease("a", 1)
    await directory.renew({place("warm"): lease})
    await directory.release("warm", "t", lease)
    calls = {
        "announce": lambda: directory.announce(BOX),
        "boxes": directory.boxes,
        "claim": lambda: directory.claim(place("one"), "a", 0),
        "renewals": lambda: directory.renew({place("one"): lease, place("warm"): lease}),
        "find": lambda: directory.find("one"),
        "release": lambda: directory.release("one", "t", lease),
        "withdraw": lambda: directory.withdraw(BOX.name),
    }
    counts = {}
    with watcher.monitor() as monitor:
        for name, call in calls.items():
            await call()
            watcher.echo("end")
            counts[name] = sum(
                command["client_type"] != "lua" and not command["command"].startswith("HELLO")
                for command in _until_echo(monitor.listen())
            )
    await directory.close()
    watcher.close()
    assert counts.pop("renewals") == COMMANDS["renewals"] + 2 * COMMANDS["renew"]
    assert counts == {name: count for name, count in COMMANDS.items() if not name.startswith("renew")}


def _until_echo(heard: Iterator[Any]) -> Iterator[Any]:
    for command in heard:
        if command["command"].startswith("ECHO"):
            return
        yield command


def test_a_lease_outlives_two_lost_repetitions() -> None:
    assert directory_module.LEASE_S >= 3 * directory_module.BEAT_S


@given(
    st.lists(
        st.tuples(st.sampled_from(["old", "new"]), st.integers(0, 4), st.integers(0, 3), st.booleans()),
        max_size=8,
    ),
    st.integers(0, 99),
)
def test_in_a_roll_out_new_sessions_go_to_the_new_artifact_and_old_ones_to_the_old(
    boxes: list[tuple[str, int, int, bool]], seed: int
) -> None:
    """Whatever is free, full or ending, no session is sent to a box of the other artifact."""
    rows = [
        replace(BOX, name=str(number), digest=name, group=name, free=free, waiting=waiting, accepts=accepts)
        for number, (name, free, waiting, accepts) in enumerate(boxes)
    ]
    for wanted, digest in (("new", None), ("old", "old"), ("new", "new")):
        order = in_order(rows, {"0": 2}, digest=digest, retired={"old"}, dice=Random(seed))
        assert {box.name for box in order} == {
            box.name for box in rows if box.digest == wanted and box.accepts
        }
