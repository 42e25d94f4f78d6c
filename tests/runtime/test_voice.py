"""Windows of a voice against a loop over samples and transformers' feature extractor; what is pushed in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime.controls.voice import (
    MAX_HELD,
    MAX_SAMPLE,
    RATE,
    WINDOW,
    AudioWindows,
    SampleBuffer,
)
from seko_runtime.errors import UsageError
from tests.support.voices import Heard, voice_control

from .toy import CHUNK


def windows(chunk_frames: int = 1, speakers: int = 1, *, normalised: bool = False) -> AudioWindows:
    """Those of 16 frames a second, four of them for a latent frame."""
    return AudioWindows(speakers, chunk_frames, 1000, 4, normalised)


def by_hand(voice: np.ndarray, frame: int) -> np.ndarray:
    """One window [WINDOW], sample by sample, as the original's description has it."""
    left = -7500 if frame == 0 else 1000 * (4 * frame - 1) - 8000
    real = 1000 if frame == 0 else 1000 * (4 * frame + 1)
    return np.array(
        [voice[at] if 0 <= at < min(real, len(voice)) else 0 for at in range(left, left + WINDOW)], np.float32
    )


def noise(samples: int, seed: int = 0, speakers: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (speakers, samples)).astype(np.float32)


@pytest.mark.parametrize("samples", [1, 999, 1000, 17_123, 40_000])
def test_windows_are_those_of_the_description(samples: int) -> None:
    """Latent frames 0 to 5, and those at and behind the end of a short voice."""
    voice = noise(samples)
    for frame in range(6):
        window = windows().of_chunk(voice, 0, frame)
        assert window.shape == (1, 1, WINDOW)
        assert np.array_equal(window[0, 0], by_hand(voice[0], frame))
    assert windows().needed(0) == (0, 1000)
    assert windows(3).needed(6) == (15_000, 33_000)


@pytest.mark.parametrize("samples", [*range(0, 9500, 250), 23_000])
def test_a_voice_is_heard_to_its_end(samples: int) -> None:
    """By the least latent frames of which the last hears up to its last sample."""
    frames = windows().latent_frames(samples)
    assert (frames == 0) == (samples == 0)
    assert not frames or windows().end(frames - 1) >= samples
    assert frames < 2 or windows().end(frames - 2) < samples


def test_one_latent_frame_later_is_something_else() -> None:
    voice = noise(60_000)
    late = np.concatenate((np.zeros((1, 4000), np.float32), voice), axis=1)
    for frame in range(1, 6):
        assert np.array_equal(
            windows().of_chunk(late, 0, frame + 1)[0, 0, 6000:], by_hand(voice[0], frame)[6000:]
        )
        assert not np.array_equal(windows().of_chunk(late, 0, frame)[0, 0], by_hand(voice[0], frame))


@pytest.mark.parametrize("frames", [1, 3])
def test_numbers_are_normalised_as_transformers_does_it(frames: int) -> None:
    """All windows of one call together: a tensor of two axes, as the original gives it, is one recording there."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    voices = 0.1 * noise(70_000, speakers=2) + 0.05
    for first in (0, frames):
        plain = windows(frames, 2).of_chunk(voices, 0, first)
        normalised = windows(frames, 2, normalised=True).of_chunk(voices, 0, first)
        for samples, other in zip(plain, normalised, strict=True):
            wanted = extractor(
                torch.from_numpy(samples), sampling_rate=16_000, return_tensors="np"
            ).input_values
            assert np.abs(np.reshape(wanted, samples.shape) - other).max() <= 1e-5
    if frames > 1:  # one mean for all, not one for each
        assert abs(float(normalised[0, 0].mean())) > 1e-3


@given(
    cuts=st.lists(st.integers(0, 30_000), max_size=6),
    frames=st.sampled_from([1, 2, 3]),
    at=st.integers(0, 25_000),
)
@settings(max_examples=40)
def test_pushing_in_pieces_is_pushing_at_once(cuts: list[int], frames: int, at: int) -> None:
    """Also where what was said is replaced, and where samples were dropped that are heard no more."""
    whole, other = noise(30_000), noise(30_000 - at, seed=1)
    voice, seen = Heard(windows(frames)), 0
    for cut in [*sorted(cuts), 30_000]:
        voice.push(whole[:, seen:cut])
        seen = cut
    voice.push(other, at=at, last=True)
    replaced = np.concatenate((whole[:, :at], other), axis=1)
    for first in range(0, 12, frames):
        voice.forget(first)
        assert np.array_equal(voice.of_chunk(first), windows(frames).of_chunk(replaced, 0, first))
    assert voice.end - voice.first < 30_000


def test_a_chunk_waits_for_its_samples() -> None:
    """Up to 1000 * (4i + 1) of its last latent frame, and not one more."""
    voice = Heard(windows(2))
    voice.push(noise(4999))
    with pytest.raises(UsageError, match=r"samples 0 to 5000 of the voice, found 0 to 4999: give 1 more"):
        voice.of_chunk(0)
    voice.push(np.zeros(1, np.int16))
    assert voice.of_chunk(0).any()
    with pytest.raises(UsageError, match="give 8000 more, or say last=True"):
        voice.of_chunk(2)
    voice.push(np.zeros(0, np.float32), last=True)
    assert voice.of_chunk(2).any()
    assert not voice.of_chunk(40).any()
    voice.forget(6)
    with pytest.raises(UsageError, match=r"hears samples 0 to 5000 .*give them with at=0"):
        voice.of_chunk(0)


def test_a_voice_that_goes_on_elsewhere() -> None:
    """A stream that another process began: samples from where its next chunk hears them."""
    voice, whole = Heard(windows()), noise(80_000)
    first, end = windows().needed(12)
    voice.push(whole[:, first:end], at=first)
    assert np.array_equal(voice.of_chunk(12), windows().of_chunk(whole, 0, 12))


@pytest.mark.parametrize(
    ("samples", "speakers", "words"),
    [
        (np.zeros(5, np.int32), 1, "int32"),
        (np.zeros((2, 5), np.float32), 1, r"\[2, 5\]"),
        (np.zeros(5, np.float32), 2, r"\[2, samples\], a voice for each speaker"),
        (np.full(5, np.nan), 1, "not finite"),
    ],
)
def test_what_are_no_samples(samples: np.ndarray, speakers: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Heard(windows(speakers=speakers)).push(samples)


def test_gaps_and_what_comes_behind_the_end() -> None:
    voice = Heard(windows())
    voice.push(noise(100), last=True)
    with pytest.raises(UsageError, match="samples from 101 on: the voice is held from 0 to 100"):
        voice.push(noise(1), at=101)
    odd: Any
    for odd in (-1, 1.0, "x", True, [1], 10**5000, MAX_SAMPLE + 1):
        with pytest.raises(UsageError, match=r"^at is .*, expected .*0 to"):
            voice.push(noise(1), at=odd)
    voice.push(np.full(4, -32768, np.int16), at=98, last=True)
    assert voice.end == 102
    assert voice.of_chunk(0).min() == -1


def test_a_step_back_over_a_silence_hears_what_was_heard_there() -> None:
    """A voice that ended and went on a while later, with the samples that a session keeps for a step back."""
    control = voice_control(kept_frames=3)
    first, second = (np.full(size, level, np.float32) for size, level in ((20_000, 0.5), (4_000, 0.25)))
    control.take({"samples": first, "last": True})
    for _ in range(10):
        control.advance()
    control.take({"samples": second})
    heard = 1000 * (4 * 9 + 1)  # by the frames made so far
    voice = np.concatenate((first, np.zeros(heard - len(first), np.float32), second))
    for frame in (10, 9, 8, 7):
        control.go_to(frame)
        assert np.array_equal(control.next_chunk()["audio"][0, 0], by_hand(voice, frame))


def test_an_empty_push_does_not_take_an_end_back() -> None:
    voice, empty = Heard(windows()), np.zeros(0, np.float32)
    voice.push(noise(100), last=True)
    voice.push(empty)
    assert voice.ended
    assert voice.of_chunk(0).any()
    voice.push(empty, at=50)  # which says that what comes from there on is not known yet
    assert not voice.ended
    assert voice.end == 50


@given(
    pushes=st.lists(
        st.tuples(st.integers(0, 3000), st.booleans(), st.integers(0, 2**31)), min_size=1, max_size=40
    )
)
@settings(max_examples=60)
def test_what_is_held_are_the_samples_pushed_whatever_the_pieces(pushes: list[tuple[int, bool, int]]) -> None:
    """Against one plain array, with replacements, dropped samples and copies in any order."""
    voice, plain, rng = Heard(windows()), np.zeros((1, 0), np.float32), np.random.default_rng(1)
    frame = 0
    for length, replaces, draw in pushes:
        part = rng.standard_normal((1, length)).astype(np.float32)
        at = voice.first + draw % (voice.end - voice.first + 1) if replaces else None
        voice.push(part, at=at)
        plain = np.concatenate((plain[:, : voice.end - length if at is None else at], part), axis=1)
        if draw % 3 == 0:
            voice = voice.copy()
        if draw % 5 == 0:
            frame += 1
            voice.forget(frame)
        assert voice.end == plain.shape[1]
        assert np.array_equal(voice.samples, plain[:, voice.first :])


def test_more_than_is_held_is_refused_before_it_is_copied() -> None:
    voice = Heard(windows())
    with pytest.raises(UsageError, match=f"audio has {2**40} samples, at most {MAX_HELD} are held"):
        voice.push(np.broadcast_to(np.float32(0), 2**40))
    voice.push(np.broadcast_to(np.int16(1), MAX_HELD - 5))
    with pytest.raises(
        UsageError, match=f"6 samples from {MAX_HELD - 5} on would make {MAX_HELD + 1} that are held"
    ):
        voice.push(noise(6))
    voice.push(noise(5))
    voice.forget(8)
    voice.push(noise(6))


def test_a_push_moves_what_it_brings_and_not_what_is_held() -> None:
    """No array is made for more than a second of sound, whatever is held, replaced, dropped or copied."""
    buffer = SampleBuffer(1)
    for _ in range(1000):
        buffer.write(len(buffer), noise(997))
    blocks = {id(block) for block in buffer._blocks}
    other = buffer.copy()
    assert {id(block) for block in other._blocks} == blocks
    other.write(500_000, noise(10))  # one block is both kept and replaced
    assert len({id(block) for block in other._blocks} - blocks) == 1
    buffer.write(len(buffer), noise(10))
    assert len({id(block) for block in buffer._blocks} - blocks) == 1
    buffer.drop(900_000)
    assert len(buffer) == 97_010
    assert max(block.shape[1] for block in [*buffer._blocks, *other._blocks]) == RATE


def test_when_samples_came_takes_no_more_room_than_frames() -> None:
    """However small the pushes are; and each frame is told the push of its last sample."""
    voice = Heard(windows())
    for _ in range(5000):
        voice.push(noise(0))
    assert len(voice.control._came) == 1
    for _ in range(6000):
        voice.push(noise(5))
    assert len(voice.control._came) <= windows().latent_frames(30_000) + 1


@given(pushes=st.lists(st.tuples(st.integers(0, 1500), st.booleans()), min_size=1, max_size=40))
@settings(max_examples=60)
def test_a_frame_is_told_when_its_last_sample_came(pushes: list[tuple[int, bool]]) -> None:
    """By a clock that counts the pushes, against one entry for each sample."""
    voice, came = Heard(windows()), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        for number, (length, replaces) in enumerate(pushes):
            patch.setattr("seko_runtime.controls.voice.time.monotonic", lambda now=number: now)
            begin = len(came) // 2 if replaces else len(came)
            voice.push(noise(length), at=begin if replaces else None)
            came = [*came[:begin], *[number] * length]
    for frame in range(40):
        _, end = windows().needed(frame)
        if end <= len(came):
            assert voice.heard_at(frame) == came[end - 1]


def test_what_a_replacement_took_back_is_told() -> None:
    voice = Heard(windows())
    voice.push(noise(50_000))
    voice.push(noise(10), at=100)
    with pytest.raises(UsageError, match=r"give 890 more.* took back those from 110 to 50000"):
        voice.of_chunk(0)


def test_a_chunk_before_any_push_names_what_to_push() -> None:
    control = voice_control(CHUNK)
    _, end = control.needed
    with pytest.raises(
        UsageError, match=rf"hears samples 0 to {end} .* none has come: give {end} samples to"
    ):
        control.next_chunk()
    control.go_to(4 * CHUNK)
    with pytest.raises(
        UsageError, match=r"give \d+ samples to the control 'voice' with at=\d+, or the input 'audio'"
    ):
        control.next_chunk()


def test_samples_that_are_refused_reach_no_voice() -> None:
    control = voice_control(CHUNK)
    with pytest.raises(UsageError, match="not finite"):
        control.take({"samples": np.full(9000, np.nan, np.float32)})
    assert not control.active


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"pcm16": b"\0" * ((128 << 10) + 1)}, "pcm16 has 131073 bytes, at most 131072 are taken"),
        ({"pcm16": "not base64!"}, "pcm16 is neither bytes nor base64"),
        ({"pcm16": b"", "at": 3}, "unknown field 'at'"),
        ({"end": False}, "end is False, expected True"),
        ({"samples": [1], "last": 1}, "last is 1, expected True or False"),
    ],
)
def test_events_that_cannot_be(event: dict[str, Any], words: str) -> None:
    control = voice_control()
    with pytest.raises(UsageError, match=words):
        control.take(event)
    assert not control.active


@pytest.mark.parametrize("change", [{"samples": "AA"}, {"frame": -1}, {"ended": 1}, {"first": None}])
def test_states_of_others_are_refused(change: dict[str, Any]) -> None:
    control = voice_control()
    control.take({"samples": noise(1000)})
    with pytest.raises(UsageError, match="no state of a voice"):
        control.load(control.state() | change)
    with pytest.raises(UsageError, match="no state of a voice"):
        control.load({})
