"""A cache that lies on the host and comes to the device layer by layer: the same bytes as one that lies there whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime.backends.in_order import InOrderCopies
from seko_runtime.backends.numpy_memory import NumpyMemory
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import ArtifactError, EngineRunError, UsageError
from seko_runtime.executor.layer_visits import device_seat, layer_visits
from seko_runtime.format.manifest import Buffer, Call, FileEntry
from seko_runtime.video.contract import resolve_video, video_contract
from seko_runtime.video.manifest import VideoManifest, parse_video_manifest
from seko_runtime.video.session import Session
from tests.support.rows import rows_of
from tests.support.stacked import stacked_session

from . import toy

CHUNKS = 14  # the ring of 4 frames behind a sink of 1 wraps after the second


def streamed(manifest: VideoManifest, seats: int) -> VideoManifest:
    """The same artifact with its cache on the host."""
    buffers = tuple(
        replace(buffer, device_layers=seats) if buffer.role == "cache" and buffer.row_axis else buffer
        for buffer in manifest.buffers
    )
    return replace(manifest, buffers=buffers)


def open_toy(
    manifest: VideoManifest, memory: Any = None, step: Callable[[list[Any]], list[Any]] | None = None
) -> Session:
    batch, layers = manifest.state_rows, manifest.model["layers"]
    assert isinstance(layers, int)
    return stacked_session(
        manifest,
        {**toy.eager_engines(), **({} if step is None else {"step": step})},
        toy.toy_weights(layers),
        CpuMemory() if memory is None else memory,
        seeds=list(range(batch)),
        text=toy.toy_text(batch),
    )


def life_of(session: Session, batch: int) -> list[bytes]:
    """Chunks and caches of a session with all that may happen to it."""
    out = []
    for number in range(CHUNKS):
        if number == 4:
            session.set_text(toy.toy_text(batch) * 2)
        if number == 6 and batch > 1:
            session.restart_row(1, seed=9)
        if number == 9:
            session.set_text(toy.toy_text(batch) - 1, recache=True)
        if number == 12:
            session.restart_row(0)
        out.append(session.run_chunk().to_host().tobytes())
        out.append(session.cache_sample(1)["kv"].tobytes())
    return out


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("layers", "seats"), [(4, 2), (6, 2), (4, 3), (5, 3), (7, 3), (9, 4), (5, 4), (7, 6)]
)
def test_a_streamed_cache_gives_the_bytes_of_a_resident_one(batch: int, layers: int, seats: int) -> None:
    resident = toy.toy_manifest(batch, layers=layers)
    with open_toy(resident) as session:
        expected = life_of(session, batch)
    memory = Counting()
    with open_toy(streamed(resident, seats), memory) as session:
        assert life_of(session, batch) == expected
    assert len(set(expected)) == len(expected)
    layer_bytes = batch * toy.CACHE * toy.TOKENS * toy.CHANNELS * 4
    assert memory.seats["kv"] == seats * layer_bytes  # and not the model's layers
    assert memory.host == {"kv": (layers - max(0, seats - 3)) * layer_bytes}


@pytest.mark.parametrize("seats", [0, 2])
def test_what_a_chunk_moves_is_each_layer_once_a_pass_and_back_once(seats: int) -> None:
    layers = 4
    memory = Counting()
    with open_toy(streamed(toy.toy_manifest(layers=layers), seats), memory) as session:
        session.run_chunk()
        memory.moved.clear()
        session.run_chunk()
        homes = rows_of(session).device().layers.homes
    if not seats:
        assert not homes
        assert memory.host == {}
        return
    runs = toy.PASSES + 1
    assert memory.moved == {
        "in": layers * runs,
        "out": layers,
    }  # only the last pass's writes are ever read again


def test_a_pass_that_does_not_write_copies_nothing_back() -> None:
    manifest = toy.toy_manifest(layers=4)
    reader = replace(manifest.engines[2], name="reader", mutates=())
    programs = {
        name: tuple(
            replace(call, engine="reader") if call.engine == "step" and "denoise" in name else call
            for call in calls
        )
        for name, calls in manifest.programs.items()
    }
    manifest = streamed(replace(manifest, engines=(*manifest.engines, reader), programs=programs), 2)
    visits = layer_visits(manifest, resolve_video(manifest), video_contract(manifest).units)
    for number in range(toy.PASSES):
        assert [visit.stores for visit in visits["denoise", number].values()] == [()] * 4
    written = [visit.stores for _, visit in sorted(visits["context", 0].items())]
    assert written == [(("kv", n),) for n in range(4)]


def test_each_call_is_preceded_by_the_fetch_of_its_layer_and_the_chunks_end_by_the_first_one() -> None:
    manifest = streamed(toy.toy_manifest(layers=4), 2)
    visits = layer_visits(manifest, resolve_video(manifest), video_contract(manifest).units)
    chunk = [
        visit
        for place in [("denoise", 0), ("denoise", 1), ("context", 0)]
        for _, visit in sorted(visits[place].items())
    ]
    assert [visit.takes for visit in chunk] == [(("kv", n % 4),) for n in range(12)]
    assert [visit.fetches for visit in chunk] == [(("kv", (n + 1) % 4),) for n in range(12)]


@given(st.integers(3, 40), st.integers(2, 39))
def test_neighbours_never_share_a_seat_also_around_the_end(layers: int, seats: int) -> None:
    assume(seats < layers and (seats > 2 or layers % 2 == 0))
    buffer = Buffer("kv", (layers, 6), "float32", "cache", row_axis=1, device_layers=seats)
    places = [device_seat(layer, buffer) for layer in range(layers)]
    assert set(places) == set(range(seats))
    resident, moving = places[: buffer.resident_layers], places[buffer.resident_layers :]
    assert len({*resident}) == len(resident)
    assert not {*resident} & {*moving}
    assert all(seat != other for seat, other in zip(moving, [*moving[1:], moving[0]], strict=True))
    assert buffer.on_device.nbytes + buffer.on_host.nbytes == buffer.nbytes + (seats - len(resident)) * 24


@pytest.mark.parametrize("failing_call", [0, 1, 5, 11])
@pytest.mark.parametrize("failing_chunk", [0, 3])
def test_after_a_failed_chunk_the_same_call_gives_the_same_bytes(
    failing_call: int, failing_chunk: int
) -> None:
    manifest = streamed(toy.toy_manifest(layers=4), 2)
    with open_toy(manifest) as session:
        expected = life_of(session, 1)
    left, real = [-1], toy.Step()

    def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        out = real(*inputs)
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("planted")
        return [out]

    with open_toy(manifest, step=step) as session:
        run = session.run_chunk
        chunk = 0

        def stumbling() -> Any:
            nonlocal chunk
            if chunk == failing_chunk:
                left[0] = failing_call
                with pytest.raises(EngineRunError, match="planted"):
                    run()
            chunk += 1
            left[0] = -1
            return run()

        session.run_chunk = stumbling  # type: ignore[method-assign]
        assert life_of(session, 1) == expected


def test_stale_seats_would_be_seen() -> None:
    """Without any of its copies the streamed cache gives other bytes: the comparison above can fail."""
    manifest = toy.toy_manifest(layers=4)
    with open_toy(manifest) as session:
        expected = life_of(session, 1)
    for direction in ("in", "out"):
        memory = Counting(keep=direction)
        with open_toy(streamed(manifest, 2), memory) as session:
            assert life_of(session, 1) != expected


def test_the_manifest_says_it_and_reads_back() -> None:
    manifest = streamed(toy.toy_manifest(layers=4), 2)
    used = {entry.file for entry in (*manifest.weights, *manifest.engines)}
    manifest = replace(manifest, files=dict.fromkeys(used, FileEntry("0" * 64, 0)))
    document = manifest_json(manifest)
    assert parse_video_manifest(document) == manifest
    assert b'"device_layers": 2' in document
    resident = toy.toy_manifest(layers=4)
    assert manifest.device_pool_bytes * 2 == manifest.workload.kv.pool_bytes == resident.device_pool_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: streamed(m, 1), "device_layers 1, expected 2 to 4"),
        (lambda m: streamed(m, 5), "device_layers 5, expected 2 to 4"),
        (lambda m: streamed(m, 2), "would share a seat"),  # five layers: the last one and the first
        (lambda m: _buffers(m, "text.embeddings", device_layers=2), "only caches with layers"),
        (lambda m: _refs(streamed(m, 3), "denoise", "buffer:kv[0]", "buffer:kv"), "is float32"),
        (lambda m: _also(streamed(m, 3), "begin"), "program begin takes an offloaded cache"),
        (lambda m: _begins_with_another(streamed(m, 3), "denoise_full"), "begin with different layers"),
        (lambda m: _begins_with_another(streamed(m, 3), "context"), "begin with different layers"),
    ],
)
def test_what_cannot_be_streamed_is_refused_before_anything_runs(
    change: Callable[[VideoManifest], VideoManifest], words: str
) -> None:
    manifest = toy.toy_manifest(layers=5)
    resolve_video(streamed(manifest, 3))
    with pytest.raises(ArtifactError, match=words):
        resolve_video(change(manifest))


def test_memory_without_a_queue_of_copies_refuses() -> None:
    with pytest.raises(UsageError, match="rebuild with --backend aoti"):
        open_toy(streamed(toy.toy_manifest(layers=4), 2), NumpyMemory())


class Counting(CpuMemory):
    """CPU memory that notes what was allocated where and how many layers were copied; ``keep`` drops the other way."""

    def __init__(self, keep: str | None = None) -> None:
        super().__init__()
        self.seats: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self.moved: dict[str, int] = {}
        self._keep, self._homes = keep, set[int]()

    def allocate(self, spec: Any) -> torch.Tensor:
        self.seats[spec.name] = spec.nbytes
        return super().allocate(spec)

    def copy_queue(self) -> Any:
        memory = self

        class Queue(InOrderCopies):
            def allocate(self, spec: Any) -> torch.Tensor:
                memory.host[spec.name] = spec.nbytes
                home = CpuMemory.allocate(memory, spec)
                memory._homes.add(home.untyped_storage().data_ptr())
                return home

        return Queue(self)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        ways = {"in": source, "out": target}
        for way, home in ways.items():
            if home.untyped_storage().data_ptr() in self._homes:
                self.moved[way] = self.moved.get(way, 0) + 1
                if self._keep not in (None, way):
                    return
        super().copy(target, source)


def _buffers(manifest: VideoManifest, name: str, **changes: Any) -> VideoManifest:
    buffers = tuple(
        replace(buffer, **changes) if buffer.name == name else buffer for buffer in manifest.buffers
    )
    return replace(manifest, buffers=buffers)


def _refs(manifest: VideoManifest, program: str, old: str, new: str) -> VideoManifest:
    calls = tuple(
        replace(call, inputs=tuple(new if ref == old else ref for ref in call.inputs))
        for call in manifest.programs[program]
    )
    return replace(manifest, programs={**manifest.programs, program: calls})


def _also(manifest: VideoManifest, program: str) -> VideoManifest:
    step = next(call for call in manifest.programs["denoise"] if call.engine == "step")
    load = Call("copy", ("buffer:latents",), ("value:hidden",))
    gain = tuple(ref.replace("[pass]", "[0]") for ref in step.inputs)
    calls = (*manifest.programs[program], load, replace(step, inputs=gain))
    return replace(manifest, programs={**manifest.programs, program: calls})


def _begins_with_another(manifest: VideoManifest, program: str) -> VideoManifest:
    """The manifest with layer 2 called once more, in front of the others."""
    load, *steps = manifest.programs[program]
    return replace(manifest, programs={**manifest.programs, program: (load, steps[2], *steps)})
