"""Recording goldens: what the eager streams take of the device, and what the exact track's statistics see."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import MachineError
from seko_export.families.layers.pieces import make_buffers, make_pieces
from seko_export.families.layers.weights import model_weights
from seko_export.families.wan.presets import PRESETS
from seko_export.goldens import eager, placement
from seko_export.goldens.placement import BUFFER_SHARE, device_bytes, home_bytes
from seko_export.host.progress import silent
from seko_export.roofline.gpus import GPUS
from seko_export.video import recording as golden
from seko_export.video.plan.memory import weight_bytes
from seko_export.video.recording import placed_buffers
from seko_runtime.backends.in_order import InOrderCopies
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.format.manifest import TensorSpec
from tests.support.tiers import first_is_fast
from tests.truth.eager_stream import random_wan_weights, small_config

SHARES = {"some of them": 0.7, "none": 0.1}  # how much of the exact track's buffers fits on the device
LAYOUTS: dict[str, dict[str, object]] = {
    "a cache a pass": {"pass_caches": True},
    "rings": {"layer_rings": (2, 3, 3)},
    "on the host anyway": {"offload_cache": True, "pass_caches": True},
}
GB = 10**9
CONTEXT = GB  # what CUDA itself takes of a GPU for a process, rounded up


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of a device's tensors that ops made and that are alive, but for those made inside of `apart`."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self.now = self.most = 0
        self._counts, self._known = True, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), count=False)
        result = func(*args, **(kwargs or {}))
        self._see(result, count=self._counts)
        return result

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._counts = False
        yield
        self._counts = True

    def _see(self, tensors: Any, *, count: bool) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != self._device:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            self._known.add(key)
            nbytes = storage.nbytes() * count
            self.now += nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


class TwoMemories(CpuMemory):
    """A device with memory of its own: what a copy queue allocates lies on its host."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def copy_queue(self) -> InOrderCopies:
        live = self._live

        class HostCopies(InOrderCopies):
            def allocate(self, spec: TensorSpec) -> torch.Tensor:
                with live.apart():
                    home: torch.Tensor = super().allocate(spec)
                return home

        return HostCopies(self)


@dataclass(frozen=True)
class Recorded:
    """A record; of each of its tracks the bytes that were alive before it and most in it; the steps of its progress."""

    record: golden.Record
    tracks: list[tuple[int, int]]
    steps: list[str]


def config_of(scheme: str, **layout: object) -> VideoBuild:
    config = small_config(2, 0, 3, scheme=scheme, passes=2, layers=6)
    return config.changed(stream=replace(config.workload.stream, **layout))  # type: ignore[arg-type]


def recorded(config: VideoBuild, room: int | None) -> Recorded:
    """Record goldens where a stream's buffers may take ``room`` bytes of the device."""
    weights, steps = weights_of(config), list[str]()
    tracks: list[tuple[int, int]] = []
    live, run_eager = LiveBytes(), golden.run_eager

    def watched(*args: Any, **options: Any) -> Any:
        gc.collect()
        before = live.most = live.now
        recording = run_eager(*args, **options)
        tracks.append((before, live.most))
        return recording

    with pytest.MonkeyPatch.context() as patch, live:
        patch.setattr(eager, "torch_memory", lambda _: TwoMemories(live))
        patch.setattr(golden, "buffer_room", lambda *_: room)
        patch.setattr(golden, "run_eager", watched)
        record = golden.record(config, weights, lambda step, *_: steps.append(step))
    return Recorded(record, tracks, steps)


def weights_of(config: VideoBuild) -> dict[str, torch.Tensor]:
    weights = dict(model_weights(make_pieces(config), random_wan_weights(config.model)))
    return weights | config.workload.schedule.tables(config.workload.stream)


@cache
def resident(layout: str) -> tuple[VideoBuild, Recorded]:
    """A record whose tracks lie wholly on the device, but for what the artifact has on the host itself."""
    config = config_of("fp4", **LAYOUTS[layout])
    return config, recorded(config, None)


@pytest.mark.parametrize(
    ("layout", "share"),
    first_is_fast(
        [("a cache a pass", "some of them"), ("rings", "none"), ("on the host anyway", "some of them")]
    ),
)
def test_caches_that_exceed_the_device_are_recorded_from_the_host_byte_for_byte(
    layout: str, share: str
) -> None:
    config, with_all = resident(layout)
    whole = device_bytes(make_buffers(config.as_exact))
    room = int(SHARES[share] * whole)
    with_less = recorded(config, room)
    buffers = placed_buffers(config.as_exact, room)
    assert home_bytes(buffers) > 0
    if share == "some of them":
        assert device_bytes(buffers) <= room
    # What the exact track takes beside its buffers is what it was.
    (before, most), (before_all, most_all) = with_less.tracks[0], with_all.tracks[0]
    assert most - before - device_bytes(buffers) <= most_all - before_all - whole
    exact = [step for step in with_less.steps if config.exact_scheme in step]
    assert exact
    assert all(" of its cache on the host" in step for step in exact)
    assert not any(config.exact_scheme in step and "host" in step for step in with_all.steps)

    assert_equal_records(with_less.record, with_all.record)


@pytest.mark.parametrize("layout", first_is_fast(LAYOUTS))
def test_a_track_has_given_its_memory_back_before_the_next_one_begins(layout: str) -> None:
    """What is alive then is what was recorded: samples of the caches, latents, scales."""
    config, recording = resident(layout)
    record, least = recording.record, device_bytes(make_buffers(config.changed(kv_scheme="fp4")))
    recorded_bytes = sum(
        chunk.latents.nbytes + sum(t.nbytes for t in chunk.cache.values()) for chunk in record.exact.values()
    )
    assert len(recording.tracks) == 3
    begun = [before - recording.tracks[0][0] for before, _ in recording.tracks]
    assert all(now < recordings * recorded_bytes + least / 4 for recordings, now in enumerate(begun))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_too_and_the_device_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("fp4", pass_caches=True).changed(device="cuda")
    records = []
    for room in (None, 0):
        monkeypatch.setattr(golden, "buffer_room", lambda *_, room=room: room)
        records.append(golden.record(config, weights_of(config), silent))
        reserved = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == reserved
    assert_equal_records(*records)


def assert_equal_records(ours: golden.Record, theirs: golden.Record) -> None:
    assert (ours.seeds, ours.bounds) == (theirs.seeds, theirs.bounds)
    assert ours.error_vs_exact == theirs.error_vs_exact
    assert equal_tensors(ours.scales, theirs.scales)
    for chunks, wanted in ((ours.chunks, theirs.chunks), (ours.exact, theirs.exact)):
        assert chunks.keys() == wanted.keys() != set()
        for number, chunk in wanted.items():
            assert torch.equal(chunks[number].latents, chunk.latents)
            assert equal_tensors(chunks[number].cache, chunk.cache)


def equal_tensors(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    """Whether both have the same names and numbers."""
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == their.dtype and torch.equal(ours[name], their) for name, their in theirs.items()
    )


def test_14b_with_fp4_and_a_cache_a_pass_is_recorded_on_one_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 480x832 and 34,320 tokens; the ops of a layer run on the meta device, so their sizes are true ones."""
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 50 * GB)
    stream = replace(PRESETS["wan-14b"].stream, sink_frames=1, pass_caches=True)
    config = VideoBuild(
        PRESETS["wan-14b"].model, VideoConfig(stream, Schedule.warped(), "fp4"), TargetConfig("cuda")
    )
    resident = CONTEXT + sum(weight_bytes(config, make_pieces(config)).values())
    free = GPUS["h200"].memory_bytes - resident
    assert device_bytes(make_buffers(config.as_exact)) > free  # so the device alone is too small
    scratch = layer_scratch(config.as_exact)
    for others in (0, 10 * GB):  # what the engines' compilers hold when the track begins
        room = int(BUFFER_SHARE * (free - others))
        exact = placed_buffers(config.as_exact, room)
        assert resident + device_bytes(exact) + scratch + others < 135 * GB
        assert home_bytes(exact) < 43 * GB  # of 128 beside the GPU: checkpoint and compilers are there too
        assert placed_buffers(config, room) == make_buffers(config)
    assert resident + device_bytes(make_buffers(config)) < 65 * GB


def layer_scratch(config: VideoBuild) -> int:
    """Return the most bytes that a layer's ops have alive, beside what it is given.

    Of the attention its result: a GPU's keeps no scores.
    """
    most, live = 0, LiveBytes("meta")
    for name in ("block", "block_full"):
        piece = make_pieces(config)[name]
        inputs = piece.example_inputs("meta")
        attention = mock.patch("torch.nn.functional.scaled_dot_product_attention", scoreless)
        with live, torch.no_grad(), attention:
            golden.eager_engine(piece)([*inputs])
        most = max(most, live.most)
    assert most > math.prod(piece.outputs[0].shape)
    return most


def scoreless(q: torch.Tensor, *_: torch.Tensor, **__: object) -> torch.Tensor:
    return torch.empty_like(q)


def test_caches_for_which_the_host_has_no_room_are_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = config_of("fp4", pass_caches=True).as_exact
    whole = device_bytes(make_buffers(exact))
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 1000)
    assert placed_buffers(exact, whole) == make_buffers(exact)
    with pytest.raises(
        MachineError, match=r"fp32 cache .* must lie on the host, where 0\.0 GB are free; end other"
    ):
        placed_buffers(exact, whole - 1)


def test_on_a_cpu_nothing_is_moved() -> None:
    exact = config_of("fp4", pass_caches=True).as_exact
    room = placement.buffer_room(exact, CpuMemory())
    assert placed_buffers(exact, room) == make_buffers(exact)


def test_what_a_session_runs_at_its_beginning_is_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where sessions run their programs once before they capture them."""
    config = config_of("fp4")
    cold = golden.record(config, weights_of(config), silent).scales
    monkeypatch.setattr(CpuMemory, "warm_up_runs", 1)
    assert equal_tensors(golden.record(config, weights_of(config), silent).scales, cold)
