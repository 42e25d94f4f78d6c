"""Viewers by the socket, by WebRTC and by SGLang's protocol at once: each sees its own frames, and none waits for one
that stands still; and of those that come and go nothing stays."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
import torch
from websockets.sync.client import connect

pytest.importorskip("aiortc")
pytest.importorskip("msgpack")

from seko_runtime import Pool
from seko_serve.client import AsyncClient
from seko_serve.live.session import LiveSession
from seko_serve.protocol import SUBPROTOCOL, TICKET_PREFIX, Media
from tests.runtime import toy_pool, toy_whole
from tests.runtime.toy import CHANNELS, CHUNK, COLUMNS, ROWS

from .conftest import Running, Starter
from .forked import toy_process
from .processes import free_port
from .realtime_client import opened
from .test_server import PROMPT, http
from .test_webrtc import Player, ask, player

pytestmark = [pytest.mark.slow, pytest.mark.limit_s(540)]
VIEWERS, CHUNKS, FPS = 6, 60, 60
STILL = 30, 50  # chunks of each viewer between which one that stands still gets none
FIRST, EACH = toy_whole.FIRST_FRAMES, toy_whole.CHUNK_VIDEO
FORMS = ("raw", "webp", "jpeg")
DARK, LIGHT, RIPPLE = 48, 208, 16


# -- a toy whose video says of whom it is, and of when --------------------------------------------------------------


def painted(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Latents of which three channels are the bits of the seed, and the fourth counts latent frames."""
    seeds, frames = inputs[:2]
    latents = torch.empty(len(seeds), CHANNELS, CHUNK, ROWS, COLUMNS)
    for channel in range(3):
        latents[:, channel] = (DARK + (LIGHT - DARK) * (seeds >> channel & 1))[:, None, None, None]
    latents[:, 3] = (frames % RIPPLE)[:, :, None, None]
    return [latents]


def shown(inputs: list[torch.Tensor], *, first: bool) -> list[torch.Tensor]:
    """Frames of one colour each, and caches that hold nothing."""
    (latents,) = inputs[:1]
    colours = (latents[:3, :, 0, 0] + latents[3, :, 0, 0]).T.to(torch.uint8)  # [F, 3]
    counts = torch.tensor([1 if first and not frame else EACH // CHUNK for frame in range(CHUNK)])
    frames = colours.repeat_interleave(counts, 0)[:, None, None]
    caches = torch.zeros(2, ROWS, COLUMNS, CHANNELS), torch.zeros(1, 1, 1, CHANNELS)
    return [frames.expand(-1, toy_whole.HEIGHT, toy_whole.WIDTH, -1).contiguous(), *caches]


def unchanged(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [inputs[0]]


ENGINES: dict[str, Callable[[list[Any]], list[Any]]] = {
    **{f"begin.{rows}": painted for rows in toy_pool.BUCKETS},
    **{f"{name}.{rows}": unchanged for name in ("step", "step_full") for rows in toy_pool.BUCKETS},
    "vae_decode_first": lambda inputs: shown(inputs, first=True),
    "vae_decode": lambda inputs: shown(inputs, first=False),
}


@contextmanager
def opener() -> Iterator[Pool]:
    with toy_pool.open_pool(VIEWERS + 2, engines=ENGINES) as pool:
        yield pool


def colours_of(frames: Any) -> np.ndarray:
    """The mean colour of each frame, [N, 3]."""
    return np.asarray(frames, np.float64).reshape(len(frames), -1, 3).mean(1)


def owners_of(frames: Any) -> set[int]:
    """The seeds of which frames are: which of their channels are light."""
    light = colours_of(frames) > (DARK + LIGHT + RIPPLE) / 2
    return set((light * (1, 2, 4)).sum(1).tolist())


def alone(seed: int) -> np.ndarray:
    """The colours of a stream's frames, by the runtime alone."""
    with opener() as pool, pool.open_session(seed=seed, prompt="a") as session:
        return np.concatenate([colours_of(session.run_chunk().video()[0]) for _ in range(CHUNKS)])


# -- viewers --------------------------------------------------------------------------------------------------------


class Seen:
    """What one viewer has seen."""

    def __init__(self, seed: int) -> None:
        self.seed, self.chunks, self.exact = seed, 0, False
        self.colours: list[np.ndarray] = []

    def add(self, frames: Any) -> None:
        assert owners_of(frames) == {self.seed}
        self.colours += [*colours_of(frames)]


async def by_socket(server: Running, seen: Seen) -> None:
    seen.exact = True
    async with AsyncClient(server.url) as client:
        await client.open(codecs=["rgb24"], prompt="a", seed=seen.seed, fps=FPS)
        shape = 1, toy_whole.HEIGHT, toy_whole.WIDTH, 3
        async for received in client.messages():
            if isinstance(received, Media):
                seen.add(np.frombuffer(received.payload, np.uint8).reshape(shape))
            elif received["type"] == "chunk":
                seen.chunks += 1
                if seen.chunks == CHUNKS:
                    return
                await asyncio.sleep(received["frames"] / FPS)
                await client.send("ack", chunk=received["chunk"])


async def by_webrtc(server: Running, seen: Seen) -> None:
    one = Player()
    try:
        await one.watch(server, f"/v1/whep?prompt=a&seed={seen.seed}&fps={FPS}")
        watching = asyncio.create_task(frames_of(one, seen))
        while seen.chunks < CHUNKS:
            await one.until("chunk")
            seen.chunks += 1
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert len(seen.colours) > CHUNKS  # of eight frames a chunk some are left out
    finally:
        await one.rtc.close()


async def frames_of(one: Player, seen: Seen) -> None:
    while True:
        seen.add([(await one.track.recv()).to_ndarray(format="rgb24")])


async def by_sglang(server: Running, seen: Seen, form: str) -> None:
    def watch() -> None:
        with opened(server.url) as client:
            client.init(prompt="a", seed=seen.seed, fps=FPS, realtime_output_format=form, max_chunks=CHUNKS)
            for _ in range(CHUNKS):
                seen.add(client.chunk()[0])
                seen.chunks += 1
            assert client.end()[0] == 1000

    seen.exact = form == "raw"
    await asyncio.to_thread(watch)


@contextmanager
def standing_still(server: Running) -> Iterator[list[LiveSession]]:
    """Two viewers that take nothing more: one of the socket that shows nothing, one of SGLang's that reads nothing."""
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    address = urlsplit(server.url)
    with socket.socket() as narrow:
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect((address.hostname, address.port))
        with opened(server.url, sock=narrow) as client:
            client.init(prompt="a", fps=FPS)
            client.chunk()
            yield [*server.manager.sessions.values()]


@asynccontextmanager
async def showing_nothing(server: Running) -> AsyncIterator[None]:
    async with AsyncClient(server.url) as client:
        await client.open(codecs=["rgb24"], prompt="a", fps=FPS)
        yield


async def until_each_has(seen: list[Seen], chunks: int, watching: set[asyncio.Task[None]]) -> None:
    while min(one.chunks for one in seen) < chunks:
        done, _ = await asyncio.wait(watching, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()


@pytest.mark.shows("live")
async def test_each_sees_its_own_frames_while_two_others_stand_still(start: Starter) -> None:
    server, seen = start(opener), [Seen(seed) for seed in range(VIEWERS)]
    async with showing_nothing(server):
        with standing_still(server) as still:
            forms = itertools.cycle(FORMS)
            ways = [
                *(by_socket(server, one) for one in seen[:2]),
                by_webrtc(server, seen[2]),
                *(by_sglang(server, one, next(forms)) for one in seen[3:]),
            ]
            watching = {asyncio.create_task(way) for way in ways}
            await until_each_has(seen, STILL[0], watching)
            made = [session.made_chunks for session in still]
            assert max(made) < STILL[0]
            await until_each_has(seen, STILL[1], watching)
            assert [session.made_chunks for session in still] == made
            await asyncio.gather(*watching)
    assert sum(one.chunks for one in seen) == VIEWERS * CHUNKS
    for one in seen:
        wanted = alone(one.seed)
        if one.exact:
            assert np.array_equal(one.colours, wanted)


# -- who comes and goes ---------------------------------------------------------------------------------------------

AT_ONCE = 4
# A session's encoder of H.264 alone has 100 KB even for so small frames. What allocators keep for the next session is
# less.
GROWN_BYTES_A_JOIN = 64 << 10
SOCKETS_AN_ADDRESS = 20  # fewer than a server takes of one at once


class ToyServer(NamedTuple):
    """A server's process: its address and its number."""

    url: str
    process: int

    def held_bytes(self) -> int:
        """Bytes of memory that the process has for itself once its garbage is collected."""
        os.kill(self.process, signal.SIGUSR1)
        assert http(f"{self.url}/v1/sessions")[1]["data"] == []  # answered behind the collection
        lines = Path(f"/proc/{self.process}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.fixture(scope="module")
def toy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyServer]:
    port = free_port()
    with toy_process(port, tmp_path_factory.mktemp("store"), 8, 1e5) as server:
        yield ToyServer(f"http://127.0.0.1:{port}", server.pid)


def join_by_socket(url: str, source: tuple[str, int]) -> None:
    status, session = http(f"{url}/v1/sessions", "POST", {"prompt": PROMPT})
    assert status == 201, session
    names = [SUBPROTOCOL, TICKET_PREFIX + session["ticket"]]
    address = url.replace("http", "ws", 1) + session["url"]
    with connect(address, subprotocols=names, source_address=source) as client:  # type: ignore[arg-type]
        client.send(json.dumps({"type": "hello", "codecs": ["h264"]}))
        kinds = (json.loads(told)["type"] for told in client if isinstance(told, str))
        assert "chunk" in kinds
        client.send(json.dumps({"type": "close"}))
        assert "end" in kinds


def join_by_sglang(url: str, source: tuple[str, int]) -> None:
    with opened(url, source_address=source) as client:
        client.init(prompt=PROMPT, realtime_output_format="webp", max_chunks=1)
        client.chunk()
        assert client.end()[0] == 1000


def join_by_webrtc(url: str, _: tuple[str, int]) -> None:
    async def join() -> None:
        async with player() as one:
            await one.watch(SimpleNamespace(url=url), f"/v1/whep?prompt={quote(PROMPT)}")
            await one.until("chunk")
            assert (await asyncio.to_thread(ask, url + one.place, "DELETE"))[0] == 200

    asyncio.run(join())


def source_of(number: int) -> tuple[str, int]:
    """Return the address from which a viewer comes: a server limits how many of one do."""
    return f"127.0.1.{1 + number // SOCKETS_AN_ADDRESS}", 0


@pytest.mark.parametrize(
    ("join", "warm", "joins"),
    [(join_by_socket, 60, 80), (join_by_sglang, 20, 80), (join_by_webrtc, 100, 60)],
)
def test_nothing_stays_of_those_that_come_and_go(
    join: Callable[[str, tuple[str, int]], None], warm: int, joins: int, toy_server: ToyServer
) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        held = []
        for numbers in (range(warm), range(warm, warm + joins)):
            deque(pool.map(lambda number: join(toy_server.url, source_of(number)), numbers), 0)
            held.append(toy_server.held_bytes())
    assert held[1] - held[0] < joins * GROWN_BYTES_A_JOIN
