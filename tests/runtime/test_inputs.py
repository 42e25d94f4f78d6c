"""What the caller gives: checked, by row of a pool, held, kept for rebuilt caches, in snapshots, shared by nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seko_runtime.controls.voice import NORMALISED, WINDOW
from seko_runtime.errors import ManifestError, UsageError
from seko_runtime.format.manifest import Buffer, InputSpec
from seko_runtime.sessions.snapshot import read_snapshot
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.pool import Pool, Session
from tests.support.rows import rows_of
from tests.support.stacked import stacked_session

from . import toy, toy_pool, toy_whole
from .toy_inputs import CHANNELS, INPUTS, RUNS, input_engines, input_manifest, open_pool
from .toy_whole import WordIds

PAST_THE_WRAP = 2 * toy.CACHE // toy.CHUNK


def camera(number: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(CHANNELS).astype(np.float32)


def begun(pool: Pool, number: int = 0) -> Session:
    return pool.open_session(
        seed=number, text=toy.toy_text(), inputs={"place": camera(100 + number)}, name=f"stream {number}"
    )


def inputs_of(stream: int, chunk: int) -> dict[str, Any]:
    """Other inputs for each stream and chunk; some are left out in some chunks."""
    inputs: dict[str, Any] = {"camera": camera(10 * stream + chunk)}
    if chunk % 3 == 1:
        inputs["zoom"] = np.array(0.1 * (stream + chunk), np.float32)
    if chunk % 2:
        inputs |= {"key": np.array(chunk), "gain": np.full((RUNS, 2), [[0.1]] * RUNS, np.float32) * chunk}
    return inputs


def alone(number: int, chunks: int) -> list[bytes]:
    with open_pool() as pool, begun(pool, number) as session:
        return [session.run_chunk(inputs_of(number, chunk)).to_host().tobytes() for chunk in range(chunks)]


def test_rows_of_a_call_have_inputs_of_their_own_past_the_wrap() -> None:
    wanted = [alone(number, PAST_THE_WRAP) for number in range(2)]
    assert all(chunk_bytes != other for chunk_bytes, other in zip(*wanted, strict=True))
    with open_pool() as pool:
        sessions = [begun(pool, number) for number in range(2)]
        for chunk in range(PAST_THE_WRAP):
            results = pool.run(sessions, [inputs_of(number, chunk) for number in range(2)])
            assert [chunk.to_host().tobytes() for chunk in results] == [chunks[chunk] for chunks in wanted]
        for session in sessions:
            session.close()


@pytest.mark.parametrize("name", [spec.name for spec in INPUTS])
def test_every_input_is_seen_by_the_model(name: str) -> None:
    spec = next(spec for spec in INPUTS if spec.name == name)
    value = np.ones(spec.shape, np.int64 if spec.dtype == "int64" else np.float32)
    latents = []
    for change in ({}, {name: value}):
        with open_pool() as pool, begun(pool) as session:
            if spec.per == "session" and change:
                session.set_inputs(change)
                change = {}
            inputs: Mapping[str, object] = {"camera": np.zeros(CHANNELS, np.float32), **change}
            latents.append(session.run_chunk(inputs).to_host())
    assert not np.array_equal(*latents)


def test_what_is_held_stays_and_what_is_not_is_zeros() -> None:
    def stream(*inputs: dict[str, Any]) -> bytes:
        with open_pool() as pool, begun(pool) as session:
            chunks = [session.run_chunk({"camera": camera(1), **values}).to_host() for values in inputs]
            return chunks[-1].tobytes()

    zoom, key = {"zoom": np.array(0.3, np.float32)}, {"key": np.array(3)}
    assert stream(zoom, {}) == stream(zoom, zoom) != stream(zoom, {"zoom": np.array(0, np.float32)})
    assert stream({}) == stream({"zoom": np.array(0, np.float32)})  # zeros before the first
    assert stream(key, {}) == stream(key, {"key": np.array(0)}) != stream(key, key)


def test_an_array_may_change_once_the_call_is_back() -> None:
    wanted = alone(0, 1)
    with open_pool() as pool, begun(pool) as session:
        inputs = inputs_of(0, 0)
        chunk = session.run_chunk(inputs)
        inputs["camera"][:] = 9
        assert chunk.to_host().tobytes() == wanted[0]
        session.set_text(toy.toy_text(), recache=True)  # keeps what the chunk saw, not the caller's array
        after = session.run_chunk(inputs_of(0, 1)).to_host()
    with open_pool() as pool, begun(pool) as session:
        session.run_chunk(inputs_of(0, 0))
        session.set_text(toy.toy_text(), recache=True)
        assert np.array_equal(session.run_chunk(inputs_of(0, 1)).to_host(), after)


@pytest.mark.parametrize("chunks", [1, 3, PAST_THE_WRAP])
def test_a_rebuilt_cache_sees_what_each_kept_chunk_saw(chunks: int) -> None:
    """With the same prompt a rebuild writes what was there, but for what the context pass sees of evicted frames."""

    def cache(*, change: bool, rebuild: bool) -> dict[str, np.ndarray]:
        with open_pool() as pool, begun(pool) as session:
            for chunk in range(chunks):
                inputs = inputs_of(0, chunk)
                if change:  # another camera in the chunks that are still kept
                    inputs["camera"] = inputs["camera"] + 1
                session.run_chunk(inputs)
            if rebuild:
                session.set_text(toy.toy_text(), recache=True)
            return rows_of(pool).cache_sample(1)

    rebuilt, as_made = cache(change=False, rebuild=True), cache(change=False, rebuild=False)
    if chunks * toy.CHUNK <= toy.CACHE:  # nothing was evicted: the same frames in the same slots
        assert all(np.array_equal(rebuilt[name], as_made[name]) for name in as_made)
    other = cache(change=True, rebuild=True)
    assert any(not np.array_equal(rebuilt[name], other[name]) for name in rebuilt)


def test_a_pause_and_a_snapshot_hold_what_was_given(tmp_path: Path) -> None:
    wanted = alone(0, 6)
    with open_pool() as pool:
        session, beside = begun(pool), begun(pool, 7)
        for chunk in range(3):
            session.run_chunk(inputs_of(0, chunk))
        session.pause()
        beside.run_chunk(inputs_of(7, 0))
        taker = begun(pool, 8)  # of the row that is free now
        taker.run_chunk(inputs_of(8, 1))
        session.resume()
        assert session.run_chunk(inputs_of(0, 3)).to_host().tobytes() == wanted[3]
        session.save(tmp_path / "snapshot")
        for opened in (session, beside, taker):
            opened.close()
    with open_pool() as pool, pool.restore(tmp_path / "snapshot") as session:
        # chunk 4 gives the zoom anew; chunk 5 holds it, and the rebuild sees chunks of before the snapshot
        session.set_text(toy.toy_text(), recache=True)
        after = [session.run_chunk(inputs_of(0, chunk)).to_host().tobytes() for chunk in (4, 5)]
    with open_pool() as pool, begun(pool) as session:
        for chunk in range(4):
            session.run_chunk(inputs_of(0, chunk))
        session.set_text(toy.toy_text(), recache=True)
        assert [session.run_chunk(inputs_of(0, chunk)).to_host().tobytes() for chunk in (4, 5)] == after


def test_what_a_snapshot_says_of_inputs_is_no_copy_of_the_stream(tmp_path: Path) -> None:
    """Ranks are sent both, and each had got the caches of all."""
    with open_pool() as pool, begun(pool) as session:
        session.save(tmp_path / "session")
        rows = rows_of(pool)
        state = read_snapshot(tmp_path / "session", pool._digests, rows.layout(), rows.form)
        assert not rows.device().tensors(0).keys() & state.arrays.keys()
        assert rows.streams.inputs.layout().keys() == state.arrays.keys()


def test_a_restarted_row_and_a_new_owner_hold_nothing() -> None:
    plain = {"camera": camera(3)}
    with open_pool() as pool, begun(pool) as session:
        wanted = session.run_chunk(plain).to_host().tobytes()
    with open_pool() as pool:
        session = begun(pool)
        for chunk in range(3):
            session.run_chunk(inputs_of(0, chunk))
        session.restart()
        assert session.run_chunk(plain).to_host().tobytes() == wanted
        session.run_chunk(inputs_of(0, 1))
        session.close()
        with begun(pool) as session:
            assert session.run_chunk(plain).to_host().tobytes() == wanted


def test_a_refused_chunk_changes_nothing() -> None:
    wanted = alone(0, 3)
    with open_pool() as pool, begun(pool) as session:
        for chunk in range(3):
            with pytest.raises(UsageError):
                session.run_chunk({**inputs_of(0, chunk), "zoom": np.array(5, np.float32), "none": 1})
            assert session.run_chunk(inputs_of(0, chunk)).to_host().tobytes() == wanted[chunk]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (None, "input 'camera' is required for every chunk"),
        ({"camera": camera(0), "lens": camera(0)}, "input 'lens' does not exist"),
        ({"camera": camera(0), "place": camera(0)}, r"input 'place' is per session: set_inputs\(\) takes it"),
        ({"camera": camera(0).astype(np.float64)}, r"is float64 \[4\], expected float32 \[4\] or \[1, 4\]"),
        ({"camera": camera(0)[:3]}, r"is float32 \[3\], expected float32 \[4\]"),
        ({"camera": camera(0) * np.nan}, "not finite"),
        ({"camera": [[1.0], [2.0, 3.0]]}, "is no array"),
        ([camera(0)], "expected a mapping"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_there_is(inputs: Any, words: str) -> None:
    with open_pool() as pool, begun(pool) as session, pytest.raises(UsageError, match=words) as refused:
        session.run_chunk(inputs)
    if "'" in words:
        assert "camera (float32 [4], per chunk, required), zoom (bfloat16 [], per chunk, hold)" in str(
            refused.value
        )


@pytest.mark.parametrize("inputs", [5, [5, None], [{}], [{}] * 3])
def test_what_are_no_inputs_of_a_call_is_refused_beside_a_voice_too(inputs: Any) -> None:
    spec = InputSpec("audio", (1, toy.CHUNK, WINDOW), "float32", "input.audio", "chunk", kind=NORMALISED)
    taken = Buffer("input.audio", (2, *spec.shape), "float32", "host")
    base = toy_whole.whole_manifest(2)
    manifest = replace(base, inputs=(spec,), buffers=(*base.buffers, taken))
    with toy_whole.open_whole(2, manifest=manifest) as session:
        for _ in range(2):
            with pytest.raises(UsageError, match=r"expected a mapping|expected one mapping each"):
                session.run_chunk(inputs)
            session.take("voice", {"samples": np.zeros(WINDOW, np.float32), "at": 0, "last": True})
        assert session.run_chunk().to_host().any()


def test_a_session_begins_with_what_is_required_per_session() -> None:
    with open_pool() as pool:
        with pytest.raises(UsageError, match="input 'place' is required per session"):
            pool.open_session(text=toy.toy_text())
        with pytest.raises(UsageError, match=r"'camera' is per chunk: run_chunk\(\) takes it"):
            pool.open_session(text=toy.toy_text(), inputs={"place": camera(0), "camera": camera(0)})
        assert pool.free == pool.capacity


def test_an_artifact_without_inputs_takes_none() -> None:
    with toy_pool.open_pool() as pool, pool.open_session(text=toy.toy_text()) as session:
        with pytest.raises(
            UsageError, match="'camera' does not exist; this artifact takes no inputs of the caller"
        ):
            session.run_chunk({"camera": camera(0)})
        with pytest.raises(UsageError, match="2 inputs given for 1 sessions"):
            pool.run([session], [None, None])


def test_a_session_of_the_largest_call_takes_one_for_all_rows_or_one_each() -> None:
    most = toy_pool.BUCKETS[-1]

    def chunks_of(cameras: np.ndarray) -> list[np.ndarray]:
        session = stacked_session(
            input_manifest(),
            toy_pool.pool_engines() | input_engines(),
            toy_pool.pool_weights(),
            toy_pool.CpuMemory(),
            seeds=[0] * most,
            text=np.repeat(toy.toy_text(), most, 0),
            prompt_ids=WordIds(),
            inputs={"place": camera(1)},
        )
        with session:
            return [session.run_chunk({"camera": cameras}).to_host() for _ in range(2)]

    (first, second), each = chunks_of(camera(0)), chunks_of(np.stack([camera(n) for n in range(most)]))
    assert all(np.array_equal(second[0], row) for row in second)
    assert np.array_equal(first[0], each[0][0])
    assert not np.array_equal(each[1][0], each[1][1])


def test_a_stream_takes_inputs_as_they_come_and_ends_with_them() -> None:
    asked: list[int] = []

    def cameras() -> Any:
        for number in range(3):
            asked.append(number)
            yield inputs_of(0, number)

    with open_pool() as pool, begun(pool) as session:
        frames = [frame.tobytes() for frame in session.stream(inputs=cameras())]
    assert asked == [0, 1, 2]
    with open_pool() as pool, begun(pool) as session:
        assert frames == [session.run_chunk(inputs_of(0, chunk)).video().tobytes() for chunk in range(3)]


def test_bfloat16_is_rounded_to_nearest() -> None:
    value = np.float32(1.00390625 + 0.0009765625)  # between two of its numbers
    rounded = np.float32(torch.tensor(value).bfloat16().float().item())

    def chunk_of(zoom: np.float32) -> bytes:
        with open_pool() as pool, begun(pool) as session:
            chunk = session.run_chunk({"camera": camera(0), "zoom": np.array(zoom)})
            return chunk.to_host().tobytes()

    assert value != rounded
    assert chunk_of(value) == chunk_of(rounded)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"buffer": "seeds"}, "another meaning"),
        ({"buffer": "text.embeddings"}, "another meaning"),
        ({"buffer": "nowhere"}, "is not there"),
        ({"shape": (3,)}, r"expected host float32 \[4, 3\]"),
        ({"dtype": "int64"}, "expected host int64"),
        ({"per": "pass"}, r"expected \[3, \.\.\.\]: a pass each"),
        ({"per": "session"}, r"expected session float32 \[6, 4\]"),
        ({"source": "host"}, "one that the host fills"),
        ({"name": "zoom"}, "hold 'zoom' twice"),
        ({"name": "zoom.0"}, "'zoom.0' has the name of something else"),
    ],
)
def test_an_input_must_fit_its_buffer(edit: dict[str, Any], words: str) -> None:
    inputs = (replace(INPUTS[0], **edit), *INPUTS[1:])
    with pytest.raises(ManifestError, match=words):
        resolve_video(input_manifest(inputs=inputs))


def test_a_chunk_buffer_is_of_the_host_or_of_an_input() -> None:
    with pytest.raises(ManifestError, match=r"host buffer 'input\.camera' is not one that the host fills"):
        resolve_video(input_manifest(inputs=INPUTS[1:]))
