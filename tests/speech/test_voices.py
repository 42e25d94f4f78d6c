"""Voices that a pool of speech encodes, and what is no voice."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from seko_runtime.errors import InputFileError, UsageError
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.prompts import Floats
from seko_runtime.speech.session import Said
from seko_runtime.speech.voice import NO_VOICE, Voice
from tests.speech.texts import said_alone, same
from tests.speech.toy_speech import VOICE, C, P


def test_a_voice_is_encoded_stretch_by_stretch(pool: SpeechPool) -> None:
    """Filled up to whole patches, a reference at its end and a voice that goes on before its beginning."""
    sound = np.arange(1, 12, dtype=np.float32) / 8
    voice = pool.encode_voice(sound, continued=sound, text="yes")
    for patches, padding in ((voice.reference, (0, 1)), (voice.continued, (1, 0))):
        wanted = np.cumsum(np.pad(sound, padding).reshape(-1, 2).sum(1)).reshape(3, P, C)
        np.testing.assert_allclose(patches, wanted, rtol=1e-6)
    assert pool.encode_voice() == NO_VOICE
    references: dict[int, Floats] = {}

    def encode(number: int) -> None:
        reference = pool.encode_voice(np.full(101, number, np.float32)).reference
        assert reference is not None
        references[number] = reference

    threads = [threading.Thread(target=encode, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(1, 5):
        np.testing.assert_array_equal(references[number], number * references[1])


def test_a_voice_is_encoded_a_call_at_a_time(pool: SpeechPool) -> None:
    """So a thread that owns the device makes other calls between."""
    sound = np.arange(1, 6 * VOICE.samples, dtype=np.float32) / 64
    with pool.open_session(seed=1) as session:
        session.begin("hallo")
        parts, between = pool.encode_voice_in_parts(sound), []
        for _ in range(6):
            next(parts)
            between += pool.step([session])
        same(between, said_alone("hallo", seed=1)[:6])
    with pytest.raises(StopIteration) as ended:
        next(parts)
    np.testing.assert_array_equal(ended.value.value.reference, pool.encode_voice(sound).reference)
    left = pool.encode_voice_in_parts(sound)
    next(left)
    left.close()  # another one may be encoded now
    np.testing.assert_array_equal(ended.value.value.reference, pool.encode_voice(sound).reference)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reference": np.zeros(0, np.float32)}, "reference is float32"),
        ({"reference": np.zeros((2, 3), np.float32)}, "expected float32"),
        ({"reference": np.zeros(3, np.int16)}, "reference is int16"),
        ({"reference": np.array([np.nan], np.float32)}, "not finite"),
        ({"reference": np.array([1e300])}, "not finite"),
        ({"reference": [[0.5], [0.5, 0.5]]}, "is no array, expected float32"),
        ({"reference": "voice.wav"}, "reference is a str, expected float32"),
        ({"continued": np.ones(3, np.float32)}, "give both or neither"),
        ({"text": "yes"}, "give both or neither"),
        ({"text": " "}, "give both or neither"),
    ],
)
def test_what_is_no_voice_is_refused(pool: SpeechPool, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pool.encode_voice(**arguments)


NAN = np.full((2, P, C), np.nan, np.float32)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"reference": NAN}, "reference holds numbers that are not finite"),
        ({"continued": NAN, "text": "yes"}, "continued holds numbers that are not finite"),
        ({"reference": np.full((2, P, C), 1e300)}, "reference holds numbers that are not finite"),
        ({"reference": np.zeros((2, P))}, "expected float32 .n, P, C."),
        ({"reference": np.zeros((0, P, C))}, "expected float32 .n, P, C. with at least one patch"),
        ({"reference": np.zeros((2, P, C), np.int64)}, "reference is int64"),
        ({"reference": "anna"}, "reference is 'anna', expected float32"),
        ({"continued": np.zeros((2, P, C))}, "give both or neither"),
        ({"text": "yes"}, "give both or neither"),
        ({"text": " "}, "give both or neither"),
        ({"text": 3}, "the voice's text is 3, expected a text"),
        ({"continued": np.zeros((2, P, C)), "text": "a\0"}, "the voice's text has a zero character"),
    ],
)
def test_what_no_model_has_encoded_is_no_voice(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Voice(**arguments)


SOME = np.arange(2 * P * C, dtype=np.float32).reshape(2, P, C)


@pytest.mark.parametrize(
    "voice", [Voice(SOME), Voice(continued=SOME, text="ja, é"), Voice(SOME, SOME + 1, "yes"), NO_VOICE]
)
def test_a_saved_voice_is_the_voice_and_a_file_that_others_read(tmp_path: Path, voice: Voice) -> None:
    file = tmp_path / "ada.safetensors"
    for _ in range(2):
        voice.save(file)
    loaded, wanted = Voice.load(file), {"reference": voice.reference, "continued": voice.continued}
    assert (loaded.text, file.stat().st_mode & 0o777) == (voice.text, 0o600)
    others = load_file(file)
    for name, array in wanted.items():
        if array is None:
            assert getattr(loaded, name) is None
            assert name not in others
        else:
            np.testing.assert_array_equal(getattr(loaded, name), array)
            np.testing.assert_array_equal(others[name], array)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"weight": SOME}, "it holds weight"),
        ({"reference": SOME.astype(np.float16)}, "it holds reference"),
        ({"reference": SOME[0]}, "expected float32 .n, P, C."),
        ({"reference": np.full_like(SOME, np.nan)}, "not finite"),
        ({"continued": SOME}, "give both or neither"),
        ({"continued": SOME, "text": np.array([0xFF], np.uint8)}, "is no encoded voice"),
        ({"continued": SOME, "text": np.array([0], np.uint8)}, "zero character"),
    ],
)
def test_a_file_that_is_no_voice_is_refused(tmp_path: Path, tensors: Any, words: str) -> None:
    save_file(tensors, file := tmp_path / "ada.safetensors")
    with pytest.raises(InputFileError, match=words):
        Voice.load(file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputFileError, match="is no encoded voice"):
        Voice.load(file)


def test_a_voice_of_another_model_is_refused(pool: SpeechPool) -> None:
    other = Voice(reference=np.zeros((2, P + 1, C), np.float32))
    with pytest.raises(UsageError, match=r"voice\.reference has patches of shape"):
        pool.open_session(voice=other)
    with pool.open_session() as session:
        for voice, words in ((other, "voice.reference has patches"), ("anna", "voice is 'anna'")):
            with pytest.raises(UsageError, match=words):
                session.voice = voice  # type: ignore[assignment]
        for said, words in ((Said("abc", other.reference), "patches of shape"), ("anna", "said is 'anna'")):
            with pytest.raises(UsageError, match=words):
                session.said = said  # type: ignore[assignment]


def test_a_voices_file_that_is_cut_short_is_no_reason_to_rebuild_the_artifact() -> None:
    content = Voice(reference=np.zeros((5, P, C), np.float32)).content()
    with pytest.raises(InputFileError, match=r"announces a header of .* are read$"):
        Voice.of_content(content[:20])
