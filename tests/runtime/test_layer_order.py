"""The order of a streamed cache's copies beside the passes: no two accesses race, and each wait is needed."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from seko_runtime.backends import cuda_streams
from seko_runtime.backends.cuda_streams import CudaCopies
from seko_runtime.errors import DeviceMemoryError
from seko_runtime.executor.cache_offload import CacheOffload
from seko_runtime.video.manifest import VideoManifest

from . import toy
from .order_watch import FakeMemory, RaceError, Watch, World
from .test_cache_offload import life_of, open_toy, streamed

SHAPES = [(4, 2), (5, 3)]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Any:
    return request.param


def run(world: World, layers: int, seats: int) -> list[bytes]:
    memory = FakeMemory(world)
    with Watch(world), open_toy(streamed(toy.toy_manifest(2, layers=layers), seats), memory) as session:
        return life_of(session, 2)


def test_no_two_accesses_race_and_the_bytes_are_those_of_a_resident_cache(
    world: World, shape: tuple[int, int]
) -> None:
    with open_toy(toy.toy_manifest(2, layers=shape[0])) as session:
        expected = life_of(session, 2)
    assert run(world, *shape) == expected
    assert not world.locked  # the page-locked memory was given back


def test_a_cache_a_pass_is_ordered_too_and_the_warm_up_leaves_nothing(world: World) -> None:
    """Warming up leaves passes out, so the seats of the last one's cache are not fetched for it."""
    manifest = pass_caches(toy.toy_manifest(2, layers=4))
    lives = []
    for memory in (None, FakeMemory(world)):
        chosen = manifest if memory is None else streamed(manifest, 2)
        with nullcontext() if memory is None else Watch(world), open_toy(chosen, memory) as session:
            lives.append([session.run_chunk().to_host().tobytes() for _ in range(4)])
            session.restart_row(1)
            lives[-1] += [session.run_chunk().to_host().tobytes() for _ in range(4)]
            lives[-1] += [cache.tobytes() for cache in session.cache_sample(1).values()]
    assert lives[0] == lives[1]


def pass_caches(manifest: VideoManifest) -> VideoManifest:
    """The toy with a cache for each denoise pass and no context pass."""
    (cache,) = (buffer for buffer in manifest.buffers if buffer.role == "cache")
    caches = replace(cache, shape=(toy.PASSES, *cache.shape), row_axis=2)
    calls = tuple(
        replace(call, inputs=tuple(ref.replace("buffer:kv[", "buffer:kv[pass][") for ref in call.inputs))
        for call in manifest.programs["denoise"]
    )
    programs = {name: manifest.programs[name] for name in ("prompt", "begin")}
    return toy.changed(
        manifest,
        buffers=(caches, *(buffer for buffer in manifest.buffers if buffer is not cache)),
        kv=replace(manifest.workload.kv, pool_bytes=manifest.workload.kv.pool_bytes * toy.PASSES),
        programs={**programs, "denoise": calls},
    )


def test_a_chunk_waits_on_the_device_alone_and_page_locks_nothing(world: World) -> None:
    memory = FakeMemory(world)
    with Watch(world), open_toy(streamed(toy.toy_manifest(layers=4), 2), memory) as session:
        layer_bytes = toy.CACHE * toy.TOKENS * toy.CHANNELS * 4
        assert list(world.locked.values()) == [(4 * layer_bytes, 0)]
        assert not next(iter(world.locked)) % mmap.PAGESIZE  # no page is locked twice
        world.host_waits = world.device_waits = 0
        for _ in range(2):
            session.run_chunk()
        assert world.device_waits == 0
        assert world.host_waits == 2  # for the block of positions: no event of a stand-in is done by itself
        assert session.stats.graph_launches == session.stats.chunks


def test_the_layer_behind_is_fetched_beside_a_call(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is ordered after the copies that were queued before its own, and not after those beside it."""
    memory = FakeMemory(world)
    beside: list[bool] = []
    before = CacheOffload.before

    def watched(stream: CacheOffload, visit: Any) -> None:
        before(stream, visit)
        copies, main = stream._copies.stream.name, memory.stream.name  # type: ignore[attr-defined]
        beside.append(world.clocks[main].get(copies, 0) < world.clocks[copies][copies])

    monkeypatch.setattr(CacheOffload, "before", watched)
    with Watch(world), open_toy(streamed(toy.toy_manifest(layers=4), 2), memory) as session:
        session.run_chunk()
    assert beside
    assert all(beside)


@pytest.mark.parametrize("forgotten", ["fork", "join", "join at the end", "store order"])
def test_each_wait_that_is_taken_out_is_found(
    world: World, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], forgotten: str
) -> None:
    if forgotten == "fork":  # copies that do not wait for the calls before them

        @contextmanager
        def forked(copies: CudaCopies) -> Iterator[None]:
            with cuda_streams.queued_on(copies._device, copies.stream):
                yield
            copies._copied.record(copies.stream)
            copies._ahead = True

        monkeypatch.setattr(CudaCopies, "forked", forked)
    elif forgotten == "join":
        monkeypatch.setattr(CudaCopies, "join", lambda _: None)
    elif (
        forgotten == "join at the end"
    ):  # of a chunk: then what comes after it does not wait for the last store

        @contextmanager
        def unit(stream: CacheOffload) -> Iterator[None]:
            yield
            with stream._copies.forked():
                stream._copy(stream._unstored)
            stream._unstored = ()
            stream._copies._ahead = False  # type: ignore[attr-defined]

        monkeypatch.setattr(CacheOffload, "unit", unit)
    else:  # a call that waits for the copies beside it only once it has run
        before = CacheOffload.before

        def late(stream: CacheOffload, visit: Any) -> None:
            join, CudaCopies.join = CudaCopies.join, lambda _: None  # type: ignore[method-assign]
            try:
                before(stream, visit)
            finally:
                CudaCopies.join = join  # type: ignore[method-assign]

        monkeypatch.setattr(CacheOffload, "before", late)
    with pytest.raises(RaceError):
        run(world, *shape)


def test_too_little_host_memory_is_said_before_it_is_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_streams, "free_host_bytes", lambda: 100)
    with pytest.raises(DeviceMemoryError, match="bytes of host memory, 100 are free"):
        open_toy(streamed(toy.toy_manifest(layers=4), 2), FakeMemory(world))
    assert not world.locked


def test_memory_that_cannot_be_locked_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object, code: int) -> None:
        raise RuntimeError(f"out of memory ({code})")

    monkeypatch.setattr(type(cuda_streams._cuda), "check_error", refuse)
    with pytest.raises(DeviceMemoryError, match="cannot be page-locked: out of memory"):
        open_toy(streamed(toy.toy_manifest(layers=4), 2), FakeMemory(world))
