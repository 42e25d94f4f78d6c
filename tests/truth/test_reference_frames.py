"""Reference frames: against a naive model that keeps them in its list, and in sessions whose rows stand apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from seko_export.artifact.describe import describe
from seko_export.artifact.manifest_json import manifest_json
from seko_export.backends import export_backend
from seko_export.config.pool import PoolConfig
from seko_export.config.stream import StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError as BuildUsageError
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import FileEntry
from seko_runtime.video.manifest import parse_video_manifest
from seko_runtime.video.session import Session
from tests.export.test_pool_pieces import eager_pool
from tests.support.rows import rows_of
from tests.support.stacked import eager_session
from tests.support.tiers import first_is_fast
from tests.support.tolerances import STEP, relative_error
from tests.truth.against_naive import hold_to_naive, naive_models
from tests.truth.eager_stream import EagerStream, random_text, random_wan_weights, small_config
from tests.truth.test_pass_caches import session_weights


def config_of(
    chunk: int, sink: int, ring: int, references: int, scheme: str = "fp32", batch: int = 1, **stream: object
) -> VideoBuild:
    """A small build with reference frames."""
    config = small_config(chunk, sink, ring, scheme=scheme, passes=2, layers=4, batch=batch)
    return config.changed(
        stream=dataclasses.replace(config.workload.stream, reference_frames=references, **stream)
    )


def random_reference(config: VideoBuild, seed: int = 4) -> torch.Tensor:
    """Latents [B, C, R, h, w] of the reference frames."""
    s = config.workload.stream
    shape = (s.batch, config.model.in_channels, s.reference_frames, s.latent_height, s.latent_width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(config: VideoBuild) -> dict[str, torch.Tensor]:
    """`session_weights` of one row, with the tables of a call of this build's."""
    stream = dataclasses.replace(config.workload.stream, batch=1)
    tensors = session_weights(config.changed(stream=stream, pool=None))
    return tensors | config.workload.schedule.tables(config.as_batch.workload.stream)


LAYOUTS = [
    (3, 1, 6, 1, {}),
    (2, 0, 5, 3, {}),
    (2, 3, 4, 4, {"window_positions": True}),
    (4, 1, 5, 2, {"window_positions": True}),  # their chunk is filled up with copies
    (1, 2, 4, 2, {"pass_caches": True}),
    (3, 1, 4, 2, {"pass_caches": True}),
    (2, 1, 5, 3, {"layer_rings": (2, 5, 2)}),
]


@pytest.mark.parametrize(("chunk", "sink", "ring", "references", "stream"), LAYOUTS)
def test_a_stream_sees_its_references_past_the_wrap(chunk, sink, ring, references, stream, worst):
    """The naive model takes them as chunks before the stream's; a short last chunk is short there."""
    config = config_of(chunk, sink, ring, references, **stream)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    static = EagerStream(config, weights, text)
    reference = random_reference(config)
    static.write_references(reference)
    naive = naive_models(config, weights, text)
    for model in naive:
        for first in range(-references, 0, chunk):
            part = reference[0][:, references + first :][:, :chunk]
            model.step(part, config.workload.schedule.context_timestep, first, commit=True)
    hold_to_naive(static, naive, worst, "reference frames")
    assert all(c.frame < 0 for model in naive for cached in model.cached for c in cached[:references])


@pytest.mark.parametrize("references", [1, 2])
def test_attention_that_sees_the_whole_chunk_writes_the_same_references(references: int) -> None:
    """8-bit attention has no mask for what fills a chunk up; of references alone it reads nothing in 8 bits."""
    config = config_of(4, 1, 5, references, "fp4", window_positions=True)
    config = config.changed(fused=True)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    streams = []
    for attention in ("torch", "fp8"):
        stream = EagerStream(config.changed(attention=attention), weights, text)
        stream.write_references(random_reference(config))
        streams.append([stream.slot_tokens(0, slot) for slot in range(references)])
    masked, whole = streams
    for wanted, unmasked in zip(masked, whole, strict=True):
        for name, codes in wanted.items():
            assert (codes != unmasked[name]).float().mean() < 1e-3, name
    copy = stream.slot_tokens(0, 3)  # the last one's, which the stream's first chunk writes over
    assert all(torch.equal(codes, copy[name]) for name, codes in whole[-1].items())


def streams_of(config: VideoBuild, weights, reference: torch.Tensor, chunks: int) -> list[np.ndarray]:
    """A session's latents, seeds 5 and on."""
    text, seeds = (
        random_text(config.model, config.workload.stream.batch),
        [5 + i for i in range(config.workload.stream.batch)],
    )
    with eager_session(config, weights, text, seeds, reference=reference) as session:
        return [session.run_chunk().to_host() for _ in range(chunks)]


STREAMS = [
    {},
    {"window_positions": True},
    {"offload_cache": True, "pass_caches": True},
]


@pytest.mark.parametrize(
    ("scheme", "stream"),
    first_is_fast([*(("int8-sink", stream) for stream in STREAMS), ("fp32", STREAMS[0])]),
    ids=str,
)
def test_sessions_write_them_and_rows_keep_their_own(scheme, stream):
    """Eager programs by hand give the session's bytes; one row begins anew with others while the other goes on."""
    config = config_of(2, 1, 4, 3, scheme, batch=2, **stream)
    weights, text = weights_of(config), random_text(config.model, 2)
    mine, others = random_reference(config), random_reference(config, 8)
    alone, changed = (streams_of(config, weights, reference, 7) for reference in (mine, others))
    if scheme == "fp32":
        plain = EagerStream(config, random_wan_weights(config.model), text)
        plain.write_references(mine)
        for number, wanted in enumerate(alone):
            plain.run_chunk([2 * number] * 2, [5, 6])
            assert torch.equal(plain.buffers["latents"], torch.from_numpy(wanted))
    for seen, unlike in zip(alone, changed, strict=True):  # else nothing below could fail
        assert relative_error(torch.from_numpy(unlike), torch.from_numpy(seen)) > 1e-3
    with eager_session(config, weights, text, [5, 6], reference=mine) as session:
        for wanted in alone[:3]:
            assert np.array_equal(session.run_chunk().to_host(), wanted)
        session.restart_row(1, reference=others[1].numpy())
        for number in range(2):
            latents = session.run_chunk().to_host()
            assert np.array_equal(latents[0], alone[3 + number][0])
            assert np.array_equal(latents[1], changed[number][1])
        session.restart_row(1)  # which keeps them
        for number in range(2):
            latents = session.run_chunk().to_host()
            assert np.array_equal(latents[0], alone[5 + number][0])
            assert np.array_equal(latents[1], changed[number][1])


@contextmanager
def two_rows_after_three_chunks() -> Iterator[tuple[Session, np.ndarray, list[np.ndarray]]]:
    """A session, its text, and four chunks that it would make from the beginning; three of them it has made."""
    config = config_of(2, 2, 6, 3, batch=2)
    weights, text, reference = weights_of(config), random_text(config.model, 2), random_reference(config)
    wanted = streams_of(config, weights, reference, 4)
    with eager_session(config, weights, text, [5, 6], reference=reference) as session:
        for chunk in wanted[:3]:
            assert np.array_equal(session.run_chunk().to_host(), chunk)
        yield session, text.numpy(), wanted


def test_a_rebuilt_cache_has_them_again():
    """Nothing was evicted yet and the prompt is the same: rebuilt from nothing, the stream goes on as it would."""
    with two_rows_after_three_chunks() as (session, text, wanted):
        for row in range(2):
            rows_of(session).device().clear_cache(row)
        session.set_text(text, recache=True)
        assert np.array_equal(session.run_chunk().to_host(), wanted[3])


def test_a_row_without_a_chunk_has_them_after_others_were_rebuilt():
    """Rebuilding writes into such a row and clears it; its references come back."""
    with two_rows_after_three_chunks() as (session, text, wanted):
        session.restart_row(1)
        session.set_text(text, recache=True)
        latents = session.run_chunk().to_host()
    assert np.array_equal(latents[0], wanted[3][0])
    assert np.array_equal(latents[1], wanted[0][1])


@pytest.mark.parametrize(
    ("scheme", "buckets"),
    first_is_fast([("fp32", (1, 2)), ("fp4", (2,))]),
    ids=str,
)
def test_sessions_of_a_pool_have_their_own(scheme, buckets, tmp_path: Path):
    """Beside each other, in rows that cross, after a row was another's, moved to the host, and from a file.

    Each is held to its row of a batch of two, and called at that place: so in calls of two every byte is the batch's.
    Where float32 is called alone it may sum in another order; codes of a lossy format would then fall otherwise.
    """
    config = config_of(2, 1, 4, 3, scheme, batch=2)
    single = dataclasses.replace(config.workload.stream, batch=1)
    pooled = config.changed(stream=single, pool=PoolConfig(2, buckets))
    weights, text = weights_of(config), random_text(config.model, 2)
    mine, others = random_reference(config), random_reference(config, 8)
    bound = STEP[torch.float32] if 1 in buckets else 0.0

    with eager_pool(pooled, weights) as pool:

        def opened(place: int, reference: torch.Tensor) -> Session:
            opening = {"text": text[[place]].numpy(), "reference": reference[place].numpy()}
            return pool.open_session(seed=5 + place, **opening)

        def hold(*asked: tuple[Session, np.ndarray]) -> None:
            for place, chunk in enumerate(pool.run([session for session, _ in asked])):
                found, expected = (
                    torch.from_numpy(chunk.to_host()[0]),
                    torch.from_numpy(asked[place][1][place]),
                )
                assert relative_error(found, expected) <= bound

        def of_batch(reference: torch.Tensor, chunks: int) -> list[np.ndarray]:
            """A batch makes its prompts at once, a pool one by one: it gets the pool's."""
            with eager_session(config, weights, text, [5, 6], reference=reference) as batch:
                live, pooled = rows_of(batch).device(), rows_of(pool).device()
                for name in live.prompt_buffers:
                    for row, session in enumerate((a, b)):
                        live.row_of(name, row).copy_(pooled.row_of(name, session._row))
                return [batch.run_chunk().to_host() for _ in range(chunks)]

        with pytest.raises(UsageError, match="3 reference frames, found none"):
            pool.open_session(seed=5, text=text[:1].numpy())
        b, a = opened(1, mine), opened(0, mine)
        wanted, unlike = of_batch(mine, 8), of_batch(others, 1)
        for number in range(3):
            hold((a, wanted[number]), (b, wanted[number]))
        a.pause()
        other = opened(0, others)  # in the row that was a's
        hold((other, unlike[0]), (b, wanted[3]))
        b.save(tmp_path / "b")
        b.close()
        a.resume()  # in the row that was b's
        other.close()
        again = pool.restore(tmp_path / "b")
        for number in range(3, 7):
            hold((a, wanted[number]), (again, wanted[number + 1]))
        a.restart()
        hold((a, wanted[0]))


def test_what_is_no_reference_is_refused():
    config = config_of(2, 1, 4, 2)
    weights, text, reference = session_weights(config), random_text(config.model, 1), random_reference(config)
    for odd, words in (
        (reference[:, :, :1], "expected float32"),
        (reference.double(), "float64"),
        (reference * float("nan"), "not finite"),
        (torch.zeros(2, 64, 96, 3, dtype=torch.uint8), "encodes no pictures"),
    ):
        with (
            pytest.raises(UsageError, match=words),
            eager_session(config, weights, text, [5], reference=odd),
        ):
            pass
    none = config.changed(stream=dataclasses.replace(config.workload.stream, reference_frames=0))
    with (
        pytest.raises(UsageError, match="no reference frames"),
        eager_session(none, weights, text, [5], reference=reference),
    ):
        pass
    with pytest.raises(BuildUsageError, match="reference_frames must be at least 0"):
        StreamConfig(64, 96, 2, 1, 4, reference_frames=-1)


def test_the_manifest_says_so():
    config = config_of(2, 1, 4, 2)
    manifest = describe(config, export_backend("eager"), (), {})
    files = {engine.file: FileEntry("0" * 64, 1) for engine in manifest.engines}
    manifest = dataclasses.replace(manifest, backend="aoti", files=files)
    assert parse_video_manifest(manifest_json(manifest)).workload.stream == manifest.workload.stream
    assert manifest.workload.stream.cache_frames == 7
