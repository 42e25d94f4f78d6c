"""The pieces of a pool against those of a batch: the same model, whichever rows a call carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from seko_export.artifact.describe import describe
from seko_export.backends import export_backend
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import dtype_name
from seko_export.errors import UsageError
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.wan.presets import PRESETS
from seko_export.options.declaration import numbers
from seko_export.video import recording as golden
from seko_export.video.calibration import KvStatistics
from seko_export.video.recording import eager_engine, golden_text
from seko_runtime.backends.aoti import torch_memory
from seko_runtime.format.budgets import MAX_BUCKETS
from seko_runtime.format.manifest import Weight
from seko_runtime.video.pool import Pool, Session
from tests.support.asked import resolved
from tests.support.rows import rows_of
from tests.support.stacked import eager_session, open_rows
from tests.support.tolerances import STEP, relative_error

MODEL = replace(
    PRESETS["tiny"].model, layers=1, dim=64, heads=2, ffn_dim=32, text_dim=16, text_tokens=4, freq_dim=16
)
STREAM = StreamConfig(32, 32, chunk_frames=2, sink_frames=1, ring_frames=4)
POOL = PoolConfig(3, (1, 2))


def config_of(scheme: str, pool: PoolConfig | None = POOL, batch: int = 1) -> VideoBuild:
    stream = replace(STREAM, batch=batch)
    return VideoBuild(MODEL, VideoConfig(stream, Schedule.warped(2), scheme, pool=pool), TargetConfig("cpu"))


@pytest.fixture(scope="module", params=["fp32", "fp4", "int8-fp8", "int4-sink"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def weights(scheme: str) -> dict[str, Tensor]:
    """Seeded weights by name, tables for calls of two rows, and the constants of the cache format."""
    config = config_of(scheme)
    generator = torch.Generator().manual_seed(5)
    tensors: dict[str, Tensor] = {}
    for piece in make_pieces(config.as_batch).values():
        for argument in piece.parameters:
            for layer in range(MODEL.layers):
                name = argument.ref.removeprefix("weight:").replace("{layer}", str(layer))
                noise = torch.randn(argument.shape, generator=generator)
                tensors[name] = (1 + 0.1 * noise if len(argument.shape) == 1 else 0.3 * noise).to(
                    argument.dtype
                )
    tensors |= config.workload.schedule.tables(config.as_batch.workload.stream)
    if scheme != "fp32":
        exact = config.as_batch.changed(kv_scheme="fp32")
        statistics = KvStatistics(exact, config.kv)
        golden.run_eager(exact, tensors, golden_text(exact), (0, 1), (0, 2), lambda *_: None, statistics)
        tensors |= statistics.calibrate()
    return tensors


@contextmanager
def eager_pool(config: VideoBuild, weights: Mapping[str, Tensor]) -> Iterator[Pool]:
    engines = {name: eager_engine(piece) for name, piece in make_pieces(config).items()}
    table = tuple(Weight(name, tuple(t.shape), dtype_name(t.dtype)) for name, t in weights.items())
    rows = open_rows(
        describe(config, export_backend("eager"), table, {}),
        engines,
        weights,
        torch_memory(torch.device("cpu")),
    )
    pool = Pool(rows)
    with torch.no_grad():
        try:
            yield pool
        finally:
            for session in pool.sessions:
                session.close()
            pool.close()


def text_of(number: int) -> np.ndarray:
    """A text [1, tokens, text_dim] for each number."""
    shape = (1, MODEL.text_tokens, MODEL.text_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).numpy()


def batch_latents(
    config: VideoBuild, weights: Mapping[str, Tensor], streams: Mapping[int, Session], chunks: int
) -> list[np.ndarray]:
    """What one batch makes of a pool's streams, by their numbers, from the beginning: [B, C, F, h, w] a chunk."""
    with batch_session(config, weights) as batch:
        begin(batch, streams)
        return [batch.run_chunk().to_host() for _ in range(chunks)]


def batch_session(config: VideoBuild, weights: Mapping[str, Tensor]) -> AbstractContextManager[Session]:
    """A batch that no pool holds, whose rows nobody's streams have begun in yet."""
    rows = config.workload.stream.batch
    text = torch.zeros(rows, *text_of(0).shape[1:])
    return eager_session(
        config, {**weights, **config.workload.schedule.tables(config.workload.stream)}, text, [0] * rows
    )


def begin(batch: Session, streams: Mapping[int, Session]) -> None:
    """Begin streams in a batch, in this order, with the prompts that the pool made of their texts.

    A batch makes its own at once and a pool one by one, so their sums may have another order: they are held to each
    other within rounding here, and what is compared bit for bit begins with the same ones.
    """
    batch.set_text(np.concatenate([text_of(number) for number in streams]))
    live = rows_of(batch).device()
    for place, (number, session) in enumerate(streams.items()):
        for name in live.prompt_buffers:
            own = live.row_of(name, place)
            pools = rows_of(session._pool).device().row_of(name, session._row)
            assert relative_error(pools, own) <= STEP[torch.float32], name
            own.copy_(pools)
        batch.restart_row(place, seed=number)


def test_a_call_of_any_two_rows_gives_the_bytes_of_a_batch_of_two(
    scheme: str, weights: dict[str, Tensor]
) -> None:
    """Rows in any order, past the wrap of the ring, and beside a third session that runs alone between."""
    with eager_pool(config_of(scheme), weights) as pool:
        a, b, c = (pool.open_session(seed=number, text=text_of(number)) for number in (4, 9, 7))
        for chunk in batch_latents(config_of(scheme, None, batch=2), weights, {7: c, 4: a}, 6):
            chunks = pool.run([c, a])
            assert np.array_equal(chunks[0].to_host()[0], chunk[0])
            assert np.array_equal(chunks[1].to_host()[0], chunk[1])
            b.run_chunk()


def test_rows_at_different_chunks_and_buckets_are_streams_of_their_own(
    scheme: str, weights: dict[str, Tensor]
) -> None:
    """Each call has the bytes of a batch of as many rows, to which its streams move with all that they are made of.

    Another number of rows may sum in another order, and then the last bit of a sum moves a code of a lossy format over
    a border, and all that reads it. Float32 is held to streams alone too, within that rounding.
    """
    with eager_pool(config_of(scheme), weights) as pool, ExitStack() as stack:
        sizes = {rows: config_of(scheme, None, batch=rows) for rows in POOL.buckets}
        batches = {rows: stack.enter_context(batch_session(size, weights)) for rows, size in sizes.items()}
        a, b = (pool.open_session(seed=n, text=text_of(n)) for n in (1, 2))
        apart, chunks_of = {}, {a: [], b: []}
        for number, session in ((1, a), (2, b)):
            begin(batches[1], {number: session})
            apart[session] = rows_of(batches[1]).store(0)
        for who in ([a], [a, b], [b, a], [b], [a, b], [a], [b, a], [a, b]):
            alone = rows_of(batches[len(who)])
            for place, session in enumerate(who):
                alone.load(place, apart[session])
            wanted = batches[len(who)].run_chunk().to_host()
            for place, (session, chunk) in enumerate(zip(who, pool.run(who), strict=True)):
                apart[session] = alone.store(place)
                chunks_of[session].append(chunk.to_host())
                assert np.array_equal(chunks_of[session][-1][0], wanted[place])
        if scheme == "fp32":
            for number, session in ((1, a), (2, b)):
                alone = batch_latents(sizes[1], weights, {number: session}, len(chunks_of[session]))
                for latents, expected in zip(chunks_of[session], alone, strict=True):
                    assert (
                        relative_error(torch.from_numpy(latents), torch.from_numpy(expected))
                        <= STEP[torch.float32]
                    )


def test_a_call_with_an_empty_place_leaves_every_other_session_as_it_was(
    scheme: str, weights: dict[str, Tensor]
) -> None:
    """A call of three in one of four places."""
    config = config_of(scheme, PoolConfig(5, (1, 4)))
    tables = config.workload.schedule.tables(config.as_batch.workload.stream)
    with eager_pool(config, {**weights, **tables}) as pool:
        sessions = [pool.open_session(seed=n, text=text_of(n)) for n in range(5)]
        pool.run(sessions[:4])
        sessions[4].run_chunk()
        live = rows_of(pool).device()
        idle = {row: {name: t.clone() for name, t in live.tensors(row).items()} for row in (1, 4)}
        pool.run([sessions[0], sessions[3], sessions[2]])
        for row, state in idle.items():
            for name, tensor in live.tensors(row).items():
                assert torch.equal(tensor, state[name]), name


def test_slots_that_hold_nothing_yet_may_hold_nan(scheme: str, weights: dict[str, Tensor]) -> None:
    """Of a quantised cache the scale byte that is e4m3's NaN."""
    filler = {"kv.k": float("nan"), "kv.v": float("nan"), "kv.k_scales": 0x7F, "kv.v_scales": 0x7F}
    with eager_pool(config_of(scheme), weights) as pool:
        session = pool.open_session(seed=3, text=text_of(3))
        wanted = batch_latents(config_of(scheme, None), weights, {3: session}, 3)
        state = rows_of(pool).device().tensors(0)
        for chunk in wanted:
            filled = rows_of(pool).streams.clocks.ring.valid_frames(
                rows_of(pool).streams.clocks.state(0).first
            )
            for tensor in config_of(scheme).kv.cache_tensors:
                before = STREAM.sink_frames * (tensor.part == "ring")
                if (name := f"kv.{tensor.name}") in filler:
                    state[name][:, STREAM.frame_tokens * (filled - before) :] = filler[name]
            assert np.array_equal(session.run_chunk().to_host(), chunk)


@pytest.mark.parametrize(
    ("batch", "sessions", "words"),
    [
        ("x", None, "expected whole numbers"),
        ("1,2", None, "give --sessions N beside them"),
        ("1,", 4, "expected whole numbers"),
        ("2,1", 4, "rising sizes"),
        ("1,8", 4, "from 1 to 4"),
        ("0,1", 4, "rising sizes"),
        (",".join(map(str, range(1, MAX_BUCKETS + 2))), MAX_BUCKETS + 1, f"at most {MAX_BUCKETS}"),
        (None, 0, "at least 1"),
    ],
)
def test_rows_that_cannot_be(batch: str | None, sessions: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolved("tiny", batch=None if batch is None else numbers("--batch", batch), sessions=sessions)


def test_a_backend_that_has_no_pools_says_so() -> None:
    pytest.importorskip("onnxruntime")
    from seko_export.backends.onnx import BACKEND

    BACKEND.check_build(config_of("fp32", None))
    with pytest.raises(UsageError, match="has no pools yet"):
        BACKEND.check_build(config_of("fp32"))


def test_what_the_options_mean() -> None:
    def planned(batch: str | None, sessions: int | None) -> VideoBuild:
        sizes = None if batch is None else numbers("--batch", batch)
        return resolved("tiny", batch=sizes, sessions=sessions).config

    assert (planned(None, None).workload.stream.batch, planned("3", None).workload.stream.batch) == (1, 3)
    assert planned(None, 3).workload.pool == PoolConfig(3, (1, 2))
    assert planned("2", 3).workload.pool == PoolConfig(3, (2,))
    config = planned("1,4", 9)
    assert (
        config.workload.rows,
        config.workload.state_rows,
        config.workload.call_rows,
        config.as_batch.workload.stream.batch,
    ) == (9, 10, 4, 4)
