"""A viewer's voice in any order of pieces, ends and chunks: what is played is what the runtime hears, at its place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_runtime.controls.recording import as_json
from seko_runtime.controls.voice import AudioWindows, pcm_samples
from tests.support.voices import voice_control

WINDOWS = AudioWindows(1, 2, 1000, 4, normalised=False)
LONGEST = 400_000  # samples that a story may come to
steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 9_000)),
        st.tuples(st.sampled_from(["end", "chunk", "save"]), st.just(0)),
    ),
    max_size=30,
)


@given(steps, st.one_of(st.none(), st.integers(1, 20_000)))
def test_what_is_played_is_what_is_heard(story: list[tuple[str, int]], opening: int | None) -> None:
    generator = np.random.default_rng(0)
    line = np.zeros(LONGEST, np.float32)  # the stream's sound, by another way: every sample at its place
    begun = None if opening is None else generator.uniform(-1, 1, (1, opening)).astype(np.float32)
    ours = voice_control(2, kept_frames=4)
    ours.take({"end": True} if begun is None else {"samples": begun, "last": True})
    end, ended, frame = 0, True, 0
    if begun is not None:
        line[: begun.shape[1]], end = begun[0], begun.shape[1]
    for step, size in story:
        heard = WINDOWS.end(frame - 1) if frame else 0
        if step == "push":
            samples = generator.uniform(-1, 1, (1, size)).astype(np.float32)
            end = max(end, heard) if ended and size else end
            line[end : end + size] = samples[0]
            end, ended = end + size, ended and not size
            ours.take({"samples": samples})
        elif step == "end":
            ended = True
            ours.take({"end": True})
        elif step == "save":
            assert isinstance(ours.state()["samples"], np.ndarray)  # not text: the device's thread calls this
            later = voice_control(2, kept_frames=4)
            later.load(json.loads(json.dumps(as_json(ours.state()))))
            ours = later
        elif step == "chunk" and ours.ready():
            window = ours.next_chunk()["audio"]
            assert np.array_equal(window, ours.next_chunk()["audio"])  # asking moves nothing
            assert np.array_equal(window, WINDOWS.of_chunk(line[None], 0, frame))
            ours.advance()
            first = WINDOWS.end(frame - 1) if frame else 0
            assert np.array_equal(ours.sound(frame), line[first : WINDOWS.end(frame + 1)])
            frame += 2
        assert ours.ready() == (ended or end >= WINDOWS.needed(frame)[1])


@pytest.mark.parametrize("speakers", [1, 2])
def test_interleaved_pieces_are_a_row_for_each_speaker(speakers: int) -> None:
    voices = np.arange(-6, 6, dtype=np.int16).reshape(speakers, -1) * 1000
    samples = pcm_samples(voices.T.tobytes() + b"\1", speakers)  # half a sample at the end is dropped
    assert np.array_equal(samples, voices.astype(np.float32) / 32768)
