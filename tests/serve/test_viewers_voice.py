"""A viewer's voice in any order of pieces, ends and chunks: what is played is what the runtime hears, at its place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seko_runtime.video.conditioning.voice import AudioWindows, Voice
from seko_serve.live.voice import ViewersVoice, pcm_samples
from seko_serve.store.arrays import array_table

WINDOWS = AudioWindows("audio", 1, 2, 1000, 4, normalised=False)
LONGEST = 400_000  # samples that a story may come to
steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 9_000)),
        st.tuples(st.sampled_from(["end", "ask", "chunk", "save"]), st.just(0)),
    ),
    max_size=30,
)


class Row:
    """The voice of a row, as the runtime holds it."""

    def __init__(self) -> None:
        self.voice = Voice(WINDOWS)

    def push_audio(self, samples: object, *, at: int | None = None, last: bool = False) -> None:
        self.voice.push(samples, at=at, last=last)


@given(steps, st.one_of(st.none(), st.integers(1, 20_000)))
def test_what_is_played_is_what_is_heard(story: list[tuple[str, int]], opening: int | None) -> None:
    generator = np.random.default_rng(0)
    line = np.zeros(LONGEST, np.float32)  # the stream's sound, by another way: every sample at its place
    begun = None if opening is None else generator.uniform(-1, 1, (1, opening)).astype(np.float32)
    ours, row = ViewersVoice(WINDOWS, begun), Row()
    ours.begin(row)
    end, ended, frame, asked = 0, True, 0, False
    if begun is not None:
        line[: begun.shape[1]], end = begun[0], begun.shape[1]
    for step, size in story:
        heard = WINDOWS.end(frame + (2 if asked else 0) - 1) if frame or asked else 0
        if step == "push":
            samples = generator.uniform(-1, 1, (1, size)).astype(np.float32)
            end = max(end, heard) if ended else end
            line[end : end + size] = samples[0]
            end, ended = end + size, False
            ours.push(row, samples)
        elif step == "end":
            ended = True
            ours.finish(row)
        elif step == "save":
            assert isinstance(ours.state()["samples"], np.ndarray)  # not text: the device's thread calls this
            state = json.loads(json.dumps(ours.state(), default=array_table))
            later, row = ViewersVoice(WINDOWS, begun), Row()
            later.load(row, state)
            later.asked = ours.asked
            ours = later
        elif step == "ask" and not ours.starved():
            ours.asked = asked = True
        elif step == "chunk" and not ours.starved():
            window = row.voice.of_chunk(frame)
            assert np.array_equal(window, WINDOWS.of_chunk(line[None], 0, frame))
            first = WINDOWS.end(frame - 1) if frame else 0
            assert np.array_equal(ours.of_chunk(frame), line[first : WINDOWS.end(frame + 1)])
            frame, asked = frame + 2, False
            row.voice.forget(frame)
        assert ours.starved() == (not ended and not asked and end < WINDOWS.needed(frame)[1])


@pytest.mark.parametrize("speakers", [1, 2])
def test_interleaved_pieces_are_a_row_for_each_speaker(speakers: int) -> None:
    voices = np.arange(-6, 6, dtype=np.int16).reshape(speakers, -1) * 1000
    samples = pcm_samples(voices.T.tobytes() + b"\1", speakers)  # half a sample at the end is dropped
    assert np.array_equal(samples, voices.astype(np.float32) / 32768)
