"""Video of a session: each row's frames are those of its own stream, whatever the others, failures or the host do."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime.errors import EngineRunError, SessionClosedError, StaleChunkError, UsageError
from seko_runtime.video.decoding import FRAME_BLOCKS
from seko_runtime.video.session import Session
from tests.support.rows import rows_of
from tests.support.stacked import stacked_session

from . import toy, toy_whole
from .toy_whole import CHUNK_VIDEO, FIRST_FRAMES, HEIGHT, PER_LATENT, WIDTH, open_whole, whole_manifest

Engine = Callable[[list[Any]], list[Any]]


def decoded_apart(latents: list[np.ndarray]) -> list[np.ndarray]:
    """Frames of one row's chunks [C, F, h, w], decoded by the modules alone, from the stream's beginning."""
    frames, caches = [], []
    for number, chunk in enumerate(latents):
        module = toy_whole.Decode() if number else toy_whole.DecodeFirst()
        picture, *caches = module(torch.from_numpy(chunk.copy()), *caches)
        frames.append(picture.numpy())
    return frames


def test_the_first_chunk_has_fewer_frames_and_all_are_those_of_the_latents() -> None:
    with open_whole(2) as session:
        chunks = [session.run_chunk() for _ in range(1)]
        assert chunks[0].video().shape == (2, FIRST_FRAMES, HEIGHT, WIDTH, 3)
        latents, video = [chunks[0].to_host()], [chunks[0].video()]
        for _ in range(5):
            chunk = session.run_chunk()
            latents.append(chunk.to_host())
            video.append(chunk.video())
            assert video[-1].shape == (2, CHUNK_VIDEO, HEIGHT, WIDTH, 3)
    for row in range(2):
        for got, wanted in zip(video, decoded_apart([latent[row] for latent in latents]), strict=True):
            assert np.array_equal(got[row], wanted)


@settings(max_examples=25)
@given(
    st.lists(
        st.sets(st.integers(0, 2)).filter(lambda rows: len(rows) < 3),
        min_size=1,
        max_size=8,
    )
)
def test_rows_that_restart_at_different_chunks_decode_as_streams_of_their_own(
    restarts: list[set[int]],
) -> None:
    latents: list[list[list[np.ndarray]]] = [[[]] for _ in range(3)]  # row, stream, chunk
    video: list[list[list[np.ndarray]]] = [[[]] for _ in range(3)]
    with open_whole(3) as session:
        for rows in restarts:
            chunk = session.run_chunk()
            host, frames = chunk.to_host(), chunk.video_rows()
            for row in range(3):
                latents[row][-1].append(host[row])
                video[row][-1].append(frames[row])
            for row in rows:
                session.restart_row(row)
                latents[row].append([])
                video[row].append([])
    for row in range(3):
        for latents_of_chunk, got in zip(latents[row], video[row], strict=True):
            wanted = decoded_apart(latents_of_chunk)
            assert [row.tobytes() for row in got] == [row.tobytes() for row in wanted]


def test_rows_of_different_length_are_read_apart() -> None:
    with open_whole(2) as session:
        session.run_chunk()
        session.restart_row(1)
        chunk = session.run_chunk()
        assert [len(row) for row in chunk.video_rows()] == [CHUNK_VIDEO, FIRST_FRAMES]
        assert chunk.frames[:, 0].tolist() == [toy.CHUNK, 0]


def test_frames_are_held_for_a_few_chunks_and_then_stale() -> None:
    with open_whole() as session:
        chunks = [session.run_chunk()]
        pixels = chunks[0].video().tobytes()
        for _ in range(FRAME_BLOCKS - 1):
            chunks.append(session.run_chunk())
            assert chunks[0].video().tobytes() == pixels
        session.run_chunk()
        with pytest.raises(StaleChunkError, match="frames of chunk 0"):
            chunks[0].video()
        chunks[1].video()


class Failing:
    """An engine that fails when it is told to, after it has run."""

    def __init__(self, name: str) -> None:
        self._real = toy_whole.eager_engines()[name]
        self.calls_left = -1

    def __call__(self, inputs: list[Any]) -> list[Any]:
        out = self._real(inputs)
        self.calls_left -= 1
        if self.calls_left == 0:
            raise RuntimeError("planted")
        return out


@pytest.mark.parametrize(
    ("engine", "failing_chunk"),
    [(name, chunk) for name in ("step", "store") for chunk in (0, 1, 4)]
    + [("vae_decode_first", 0), ("vae_decode", 1), ("vae_decode", 4)],
)
@pytest.mark.parametrize("call", [1, 2])
def test_a_failed_chunk_or_decoding_leaves_the_session_at_the_chunk_before(
    engine: str, failing_chunk: int, call: int
) -> None:
    def stream(session: Session, before: int) -> list[bytes]:
        return [session.run_chunk().video().tobytes() for _ in range(before)]

    with open_whole(2) as whole:
        expected = stream(whole, 7)
    failing = Failing(engine)
    with open_whole(2, engines={engine: failing}) as session:
        got = stream(session, failing_chunk)
        for _ in range(2):  # twice: a try that fails again must not move a row's caches twice
            failing.calls_left = call
            with pytest.raises(EngineRunError, match="planted"):
                session.run_chunk()
            if call == 2 and engine.startswith("vae"):
                break  # the first row is done and is not called again
        failing.calls_left = -1
        assert session.stats.chunks == failing_chunk
        got += stream(session, 7 - failing_chunk)
    assert got == expected


@pytest.mark.parametrize(
    ("engine", "call"),
    [("vae_decode", call) for call in range(1, 2 * toy.CHUNK + 1)]
    + [("step", toy.LAYERS * toy.PASSES + layer) for layer in (0, 1, 2)],
)
def test_a_chunk_in_parts_is_decoded_once_whatever_failed(engine: str, call: int) -> None:
    """Two rows, whose chunks are decoded by one latent frame at a time, the first frame of both rows first, before the
    context pass."""
    in_parts = whole_manifest(2, parts=toy.CHUNK)
    failing = Failing(engine)
    with open_whole(2) as whole, open_whole(2, manifest=in_parts, engines={engine: failing}) as session:
        chunk = session.run_chunk()
        assert [part.shape[1] for part in chunk.video_parts()] == [1, *[PER_LATENT] * (toy.CHUNK - 1)]
        assert chunk.video().tobytes() == whole.run_chunk().video().tobytes()
        failing.calls_left = call
        with pytest.raises(EngineRunError, match="planted"):
            session.run_chunk()
        failing.calls_left = -1
        for _ in range(3):
            chunk = session.run_chunk()
            assert [part.shape[1] for part in chunk.video_parts()] == [PER_LATENT] * toy.CHUNK
            assert chunk.video().tobytes() == whole.run_chunk().video().tobytes()
        for stream in (session, whole):
            stream.rewind(3)
        assert session.run_chunk().video().tobytes() == whole.run_chunk().video().tobytes()


def test_a_row_restarted_after_a_failed_decoding_begins_with_its_first_frames() -> None:
    failing = Failing("vae_decode")
    with open_whole(2, engines={"vae_decode": failing}) as session:
        session.run_chunk()
        failing.calls_left = 2  # row 0 is decoded, row 1 is not
        with pytest.raises(EngineRunError, match="planted"):
            session.run_chunk()
        session.restart_row(0)
        frames = session.run_chunk().video_rows()
    with open_whole(2) as whole:
        first = whole.run_chunk().video_rows()
        second = whole.run_chunk().video_rows()
    assert frames[0].tobytes() == first[0].tobytes()
    assert frames[1].tobytes() == second[1].tobytes()


def test_a_stream_gives_every_chunks_frames_and_goes_on_where_it_was_left() -> None:
    with open_whole() as whole:
        expected = [whole.run_chunk().video().tobytes() for _ in range(9)]
    with open_whole() as session:
        got = []
        for frames in session.stream(chunks=100):
            got.append(frames.tobytes())
            if len(got) == 3:
                break
        got += [frames.tobytes() for frames in session.stream(chunks=4)]
        endless = session.stream()
        got += [next(endless).tobytes() for _ in range(2)]
        assert got == expected
        assert session.stats.chunks == 9


def test_after_a_restart_a_stream_yields_the_new_streams_first_chunk() -> None:
    """As on a GPU, `stream` has queued a chunk of the old stream by then."""
    with open_whole(seeds=(2,)) as alone:
        expected = [alone.run_chunk().video().tobytes() for _ in range(2)]
    with open_whole(seeds=(1,)) as stacked:
        (session,) = stacked.sessions
        rows_of(stacked).decoder().overlaps = True
        endless = session.stream()
        next(endless)
        with pytest.raises(UsageError, match="has not given out"):
            session.rewind(0)
        session.restart(seed=2)
        assert [next(endless).tobytes() for _ in range(2)] == expected


def test_a_stream_takes_a_prompt_and_refuses_what_does_nothing() -> None:
    with open_whole(prompt="a blue ring") as other, open_whole() as session:
        expected = [frames.tobytes() for frames in other.stream(chunks=3)]
        assert [frames.tobytes() for frames in session.stream("a blue ring", chunks=3)] == expected
        with pytest.raises(UsageError, match="recache without a prompt"):
            session.stream(recache=True)


def test_an_artifact_without_video_says_so() -> None:
    with stacked_session(
        toy.toy_manifest(),
        toy.eager_engines(),
        toy.toy_weights(),
        toy_whole.CpuMemory(),
        seeds=[0],
        text=toy.toy_text(),
    ) as session:
        chunk = session.run_chunk()
        for use in (chunk.video, chunk.video_rows, session.stream):
            with pytest.raises(UsageError, match="makes no video"):
                use()


def test_a_closed_session_gives_no_frames() -> None:
    session = open_whole()
    chunk = session.run_chunk()
    endless = session.stream()
    session.close()
    for use in (chunk.video, chunk.video_rows, session.stream, lambda: next(endless)):
        with pytest.raises(SessionClosedError):
            use()


@pytest.mark.slow
def test_memory_is_flat_however_long_the_stream() -> None:
    def live_bytes() -> int:
        gc.collect()
        return sum(
            tensor.untyped_storage().nbytes() for tensor in gc.get_objects() if type(tensor) is torch.Tensor
        )

    with open_whole(2) as session:
        stream = session.stream()
        for _ in range(8):
            next(stream)
        before = live_bytes()
        for number in range(120):
            frames = next(stream)
            if number % 20 == 7:
                session.set_prompt(["a red disc", f"a green ring drifts{number}"], recache=number % 40 == 7)
        assert frames.shape[1] == CHUNK_VIDEO
        earlier = session.stats
        for _ in range(60):
            next(stream)
        assert live_bytes() - before < 9 * 10_000  # a few prompts in a bounded cache
        assert session.stats.prompt_cache_misses == earlier.prompt_cache_misses
        again = live_bytes()
        for _ in range(60):
            next(stream)
        assert live_bytes() == again


def test_a_memory_that_warms_up_leaves_no_trace_in_the_frames() -> None:
    class Warm(toy_whole.CpuMemory):
        warm_up_runs = 2

    calls = [0]

    def decode(inputs: list[Any]) -> list[Any]:
        calls[0] += 1
        return list(toy_whole.Decode()(*inputs))

    with open_whole(2, memory=Warm(), engines={"vae_decode": decode}) as warm, open_whole(2) as cold:
        assert calls[0] == 4  # two rows, twice
        for name in ("vae.cache.00", "vae.cache.01", "video", "video.first", "decode.latents"):
            assert not rows_of(warm).device().buffers[name].any()
        for _ in range(4):
            assert warm.run_chunk().video().tobytes() == cold.run_chunk().video().tobytes()
