"""A sink that averages what leaves the ring (Reward Forcing): against a naive loop, bit by bit in bfloat16, in pools,
and when a chunk is run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from seko_export.config.model import ModelConfig
from seko_export.config.pool import PoolConfig
from seko_export.config.stream import StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import FlatModule
from seko_export.errors import UsageError
from seko_export.families.layers.layer_pieces import SINK_AVERAGE
from seko_export.families.layers.pieces import make_pieces, make_programs
from seko_export.families.layers.sink_average import SinkAverage
from seko_export.families.registry import presets
from seko_export.goldens.eager import Engine
from seko_export.options.declaration import BuildOptions
from seko_export.video.plan.predict import PlanRequest, predict
from seko_export.video.recording import eager_session as raw_session
from seko_kernels.kv_formats import ExactKv
from seko_runtime.errors import EngineRunError
from seko_runtime.errors import UsageError as SessionUsageError
from tests.support.asked import resolved
from tests.support.eager_pool import eager_pool
from tests.support.stacked import eager_session
from tests.support.tiers import first_is_fast
from tests.support.tolerances import STREAM, relative_error
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, same_bytes, small_config
from tests.truth.naive_dit import CachedFrame, ShiftingDit
from tests.truth.naive_loop import NaiveLoop
from tests.truth.test_pass_caches import session_weights

SEED = 5
WEIGHT = 0.2  # far more than Reward Forcing's, so that a fault shows


def config_of(scheme: str = "fp32", chunk: int = 2, ring: int = 4, weight: float = WEIGHT) -> VideoBuild:
    """A small build whose sink averages evicted chunks."""
    config = small_config(chunk, chunk, ring, scheme=scheme, passes=2)
    stream = replace(config.workload.stream, window_positions=True, sink_average=weight)
    return config.changed(stream=stream)


class AveragingDit(ShiftingDit):
    """The naive model whose sink takes a part of each chunk that no longer fits."""

    def make_room(self) -> None:
        """Before a chunk: blend the oldest chunk behind the sink into the sink and drop it, if the cache is full."""
        s, weight = self.stream, self.stream.sink_average
        for layer, cached in enumerate(self.cached):
            if len(cached) < s.sink_frames + s.ring_frames:
                continue
            sink, gone = cached[: s.sink_frames], cached[s.sink_frames :][: s.chunk_frames]
            blended = [
                CachedFrame(
                    old.frame,
                    (1 - weight) * old.k + weight * new.k,
                    (1 - weight) * old.v + weight * new.v,
                )
                for old, new in zip(sink, gone, strict=True)
            ]
            self.cached[layer] = blended + cached[s.sink_frames + s.chunk_frames :]


class AveragingLoop(NaiveLoop):
    """The naive loop over it."""

    naive_dit = AveragingDit

    def made(self, chunk: int, times: Sequence[float]) -> Tensor:
        """Return the latents of the next chunk."""
        assert isinstance(self.dit, AveragingDit)
        self.dit.make_room()
        return self.renoised(chunk, times, [time / 1000 for time in times])


@pytest.mark.shows("sink-average")
@pytest.mark.parametrize(("chunk", "ring"), [(3, 6), (1, 3)])
def test_a_stream_is_the_naive_loop_with_an_averaged_sink(chunk, ring, worst):
    """Past the window and several evictions; over a fixed sink it is another stream, but only once a chunk has left."""
    config = config_of(chunk=chunk, ring=ring)
    wan, text = random_wan_weights(config.model), random_text(config.model, 1)
    times = config.workload.schedule.timesteps
    naive, fixed = AveragingLoop(config, wan, text[0], SEED), NaiveLoop(config, wan, text[0], SEED)
    full = (chunk + ring) // chunk  # number of the first chunk for which another one leaves
    with eager_session(config, session_weights(config), text, [SEED]) as session:
        for number in range(full + 4):
            latents = torch.from_numpy(session.run_chunk().to_host())[0]
            error = relative_error(latents, naive.made(number, times))
            worst("averaged sink, latents", error)
            assert error <= STREAM[torch.float32], number
            other = fixed.renoised(number, times, [time / 1000 for time in times])
            assert (relative_error(latents, other) > 10 * STREAM[torch.float32]) == (number >= full)


MODEL = ModelConfig("tiny", layers=1, dim=64, heads=2, ffn_dim=64)
STREAM_OF_9 = StreamConfig(
    32, 32, chunk_frames=3, sink_frames=3, ring_frames=6, window_positions=True, sink_average=0.001
)


def averaging(dtype: torch.dtype) -> SinkAverage:
    return SinkAverage(MODEL, STREAM_OF_9, ExactKv(MODEL.heads, MODEL.head_dim, dtype, before_rope=True))


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")  # what the compiler imports
@pytest.mark.parametrize("compiled", first_is_fast([False, True]))
def test_bfloat16_is_rounded_twice(compiled: bool) -> None:
    """Bit by bit torch's own bfloat16 arithmetic of the authors' formula, over 50 evictions; one rounding, that of the
    sum alone, gives other bits. The compiler drops casts to bfloat16 and back: not here."""
    s, generator = STREAM_OF_9, torch.Generator().manual_seed(1)
    shape = (s.cache_tokens, MODEL.heads, MODEL.head_dim)
    caches = {side: torch.randn(shape, generator=generator).bfloat16() for side in ("k", "v")}
    caches["k"][:8] *= 2.0**-7  # beside small numbers a thousandth of others counts
    wanted = {side: cache[: 3 * s.frame_tokens].clone() for side, cache in caches.items()}
    once = {side: sink.clone() for side, sink in wanted.items()}
    module: Callable[..., object] = averaging(torch.bfloat16)
    if compiled:
        module = torch.compile(module, fullgraph=True, dynamic=False)
    slot_frames = torch.arange(9).where(torch.arange(9) > 0, 0)
    averaged = torch.zeros(9, dtype=torch.int64)
    with torch.no_grad():
        for eviction in range(50):
            slots = 3 + torch.arange(3) + 3 * (eviction % 2)
            tokens = (slots[:, None] * s.frame_tokens + torch.arange(s.frame_tokens)).flatten()
            for side, cache in caches.items():
                gone = cache[tokens]
                once[side] = (0.999 * once[side].float() + 0.001 * gone.float()).bfloat16()
                wanted[side] = 0.999 * wanted[side] + 0.001 * gone
            numbers = 9 + 3 * eviction + torch.arange(3)
            module(numbers[None], slots[None], slot_frames, averaged, caches, {})
            slot_frames[slots] = numbers
            for cache in caches.values():
                cache[tokens] = torch.randn(cache[tokens].shape, generator=generator).bfloat16()
            for side, cache in caches.items():
                assert same_bytes(cache[: 3 * s.frame_tokens], wanted[side]), (eviction, side)
    assert not all(same_bytes(once[side], wanted[side]) for side in once)


@pytest.mark.parametrize("scheme", ["fp4-sink", "int8-sink", "int8-fp32-sink"])
def test_beside_a_quantised_ring_the_sink_is_averaged_exactly(scheme: str) -> None:
    """Of what the ring's codes say of the evicted frames: bit by bit, and nothing else of the cache changes."""
    config = config_of(scheme)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    stream = EagerStream(config, weights, text)
    s, names = config.workload.stream, config.kv.sink_tensors
    assert names is not None
    for number in range(3):
        stream.run_chunk([2 * number], [SEED])
    before = {name: buffer.clone() for name, buffer in stream.buffers.items() if name.startswith("kv.")}
    stream._stand_at([6])
    slots = stream.buffers["write_slots"][0]
    assert slots.tolist() == [2, 3]
    stream._run(stream.programs["begin"], 0)
    plain = _unrotated(config)
    tokens = (slots[:, None] * s.frame_tokens + torch.arange(s.frame_tokens)).flatten()
    for layer in range(config.model.layers):
        caches = {c.name: before[f"kv.{c.name}"][layer] for c in config.kv.cache_tensors}
        scales = {c.name: stream.weights[f"blocks.{layer}.kv.{c.name}"] for c in config.kv.scale_tensors}
        gone = config.kv.expand(caches, scales, plain, torch.float32)
        for name, window in zip(names, gone, strict=True):
            sink = caches[name][: 2 * s.frame_tokens]
            mixed = (1 - WEIGHT) * sink + WEIGHT * window[tokens]
            now = stream.buffers[f"kv.{name}"][layer]
            assert relative_error(now[: 2 * s.frame_tokens], mixed) < 1e-6
            assert same_bytes(now[2 * s.frame_tokens :], caches[name][2 * s.frame_tokens :])
    for name, buffer in before.items():
        if name.removeprefix("kv.") not in names:
            assert same_bytes(stream.buffers[name], buffer), name


def _unrotated(config: VideoBuild) -> dict[str, Tensor]:
    """Tables that turn no key: cosines 1, sines 0."""
    s, pairs = config.workload.stream, config.model.head_dim // 2
    side = 2 * (config.model.head_dim // 6)
    return {
        name: torch.tensor([1.0, 0.0]).expand(*shape, 2).contiguous()
        for name, shape in {
            "slot_rotary": (s.cache_frames, pairs - side),
            "patch_rotary": (s.frame_tokens, side),
        }.items()
    }


def opened(config: VideoBuild) -> tuple[dict[str, Tensor], np.ndarray]:
    single = config.changed(pool=None)
    tables = config.workload.schedule.tables(config.as_batch.workload.stream)
    return session_weights(single) | tables, random_text(config.model, 1).numpy()


def test_a_pools_sessions_at_different_chunks_are_those_alone(tmp_path: Path) -> None:
    """One evicts where the other one does not yet; it is saved, restored, paused, rewound and restarted."""
    config = config_of().changed(pool=PoolConfig(2, (2,)))
    weights, text = opened(config)
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as alone:
        wanted = [alone.run_chunk().to_host() for _ in range(7)]
    with eager_pool(config, weights) as pool, pool.open_session(seed=SEED, text=text) as early:
        chunks = [early.run_chunk().to_host() for _ in range(2)]
        late = pool.open_session(seed=SEED, text=text)
        pairs = [[chunk.to_host() for chunk in pool.run([early, late])] for _ in range(5)]
        late.save(tmp_path / "late")
        late.pause()
        late.resume()
        assert np.array_equal(late.run_chunk().to_host(), wanted[5])
        late.rewind(5)
        assert np.array_equal(late.run_chunk().to_host(), wanted[5])
        assert np.array_equal(late.run_chunk().to_host(), wanted[6])
        late.close()
        with pool.restore(tmp_path / "late") as again:
            assert np.array_equal(again.run_chunk().to_host(), wanted[5])
            again.restart()
            assert all(np.array_equal(again.run_chunk().to_host(), chunk) for chunk in wanted[:4])
    chunks += [pair[0] for pair in pairs]
    assert all(np.array_equal(*both) for both in zip(chunks, wanted, strict=False))
    assert all(np.array_equal(pair[1], wanted[at]) for at, pair in enumerate(pairs))


def test_rows_of_a_batch_may_be_at_different_chunks() -> None:
    """One is restarted, and evicts nothing for its first chunks."""
    alone, both = config_of(), config_of()
    both = both.changed(stream=replace(both.workload.stream, batch=2))
    text = random_text(alone.model, 2)
    wanted = []
    for row in range(2):
        with eager_session(alone, session_weights(alone), text[row : row + 1], [SEED + row]) as session:
            wanted.append([session.run_chunk().to_host()[0] for _ in range(8)])
    weights = session_weights(alone) | both.workload.schedule.tables(both.workload.stream)
    with eager_session(both, weights, text, [SEED, SEED + 1]) as session:
        for number in range(8):
            if number == 4:
                session.restart_row(1)
            made = session.run_chunk().to_host()
            for row, at in enumerate((number, number % 4)):
                error = relative_error(torch.from_numpy(made[row]), torch.from_numpy(wanted[row][at]))
                assert error <= STREAM[torch.float32], (number, row)


@pytest.mark.parametrize(("engine", "calls"), [(SINK_AVERAGE, 1), ("embed", 0), ("head", 1), ("advance", 1)])
def test_a_chunk_that_failed_averages_once(engine: str, calls: int) -> None:
    """Between two layers' averages, behind them, and in passes."""
    config = config_of()
    weights, text = session_weights(config), random_text(config.model, 1)
    with eager_session(config, weights, text, [SEED]) as session:
        wanted = [session.run_chunk().to_host() for _ in range(6)]
    left = [-1]

    def around(inner: Engine) -> Engine:
        def failing(inputs: list[Tensor]) -> Sequence[Tensor]:
            left[0] -= 1
            if left[0] == -1:
                raise RuntimeError("planted")
            return inner(inputs)

        return failing

    left[0] = -2  # not yet
    with raw_session(config, weights, text, [SEED], around={engine: around}) as session:
        chunks = [session.run_chunk().to_host() for _ in range(4)]
        for _ in range(2):
            left[0] = calls
            with pytest.raises(EngineRunError, match="planted"):
                session.run_chunk()
            left[0] = -2
            chunks.append(session.run_chunk().to_host())
    assert all(np.array_equal(*both) for both in zip(chunks, wanted, strict=True))


def test_what_would_need_the_chunks_that_are_gone_is_refused() -> None:
    config = config_of()
    weights, text = session_weights(config), random_text(config.model, 1)
    with eager_session(config, weights, text, [SEED]) as session:
        session.run_chunk()
        with pytest.raises(SessionUsageError, match=r"averages chunks into its sink .* without recache"):
            session.set_text(text.numpy(), recache=True)
        with pytest.raises(SessionUsageError, match="averages evicted chunks into its sink"):
            session.sessions[0].cut(frames=4)


def test_reward_forcings_preset_is_built_and_planned() -> None:
    preset = presets()["reward-forcing-1.3b"]
    assert not preset.missing
    stream = preset.stream
    assert (stream.sink_frames, stream.ring_frames, stream.sink_average) == (3, 6, 0.001)
    assert stream.window_positions
    options = BuildOptions(preset="reward-forcing-1.3b", no_vae=True, no_text=True)
    fixed = replace(options, sink_average=0.0)
    averaged, without = (predict(PlanRequest(build, "h200")) for build in (options, fixed))
    assert 1 < averaged["chunk_s"] / without["chunk_s"] < 1.05
    config = config_of()
    pieces = make_pieces(config)
    begin = make_programs(pieces, config.workload.stream)["begin"]
    assert [call.engine for call in begin] == ["noise", *[SINK_AVERAGE] * config.model.layers]
    assert isinstance(FlatModule(pieces[SINK_AVERAGE]), torch.nn.Module)


@pytest.mark.parametrize(
    ("layout", "kv", "words"),
    [
        ({"sink_average": 1.0}, None, "expected a weight from 0 to below 1"),
        ({"sink_average": -0.1}, None, "expected a weight from 0 to below 1"),
        ({"window_positions": False}, None, "give --window-positions"),
        ({"sink_frames": 1}, None, "as many sink frames as the chunk's 3, not 1"),
        ({"ring_frames": 7}, None, "a ring of whole chunks, not of 7"),
        ({"reference_frames": 3}, None, "leave out --reference-frames"),
        ({"layer_rings": (3, 6)}, None, "leave out --layer-rings"),
        ({"pass_caches": True}, None, "leave out --pass-caches"),
        ({"offload_cache": True}, None, "leave out --offload-cache"),
        ({}, "fp4", "--kv fp4: --sink-average .* an exact sink by -sink"),
        ({}, "int8-bf16", "an exact sink by -sink"),
    ],
)
def test_what_it_does_not_go_with(layout: dict[str, object], kv: str | None, words: str) -> None:
    usual = {"sink_frames": 3, "ring_frames": 6, "window_positions": True, "sink_average": 0.001}
    resolved("tiny", layout=usual)
    with pytest.raises(UsageError, match=words):
        resolved("tiny", kv, layout={**usual, **layout})
