"""A session of speech says what the model says by plain loops, up to its flag or its limit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime.errors import (
    SessionClosedError,
    UsageError,
)
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.prompts import SpeechPrompt
from seko_runtime.speech.session import Said
from seko_runtime.speech.voice import Voice
from tests.speech.texts import LIMITS, TEXTS, VOICES, said_alone, said_in_turn, same
from tests.speech.toy_speech import C, P, open_pool
from tests.support.rows import rows_of


def test_some_texts_end_by_their_flag_and_some_at_their_limit() -> None:
    """Else nothing here would show that a flag is read, or that a limit is kept."""
    ends = {
        len(said_alone(text, seed=seed)) < LIMITS.patches(len(text)) for text in TEXTS for seed in range(4)
    }
    assert ends == {True, False}


@pytest.mark.parametrize("voice", VOICES, ids=["none", "reference", "continued", "both"])
@pytest.mark.parametrize("text", TEXTS[:3])
def test_a_session_says_what_the_model_says_by_loops(pool: SpeechPool, voice: Voice, text: str) -> None:
    settings = {"seed": 5, "guidance": 1.5, "temperature": 0.5}
    with pool.open_session(voice=voice, positions=32, **settings) as session:
        same(list(session.speak(text)), said_alone(text, voice, 32, **settings))
        same(list(session.speak(text)), said_alone(text, voice, 32, **settings))  # and again


SENTENCES = ("abcd!", "zzzz!", "hallo!")


def test_a_text_in_pieces_is_read_as_it_is_spoken(pool: SpeechPool) -> None:
    """Sound comes before the second sentence is there."""
    consumed: list[str] = []

    def writing() -> Iterator[str]:
        for text in SENTENCES:
            consumed.append(text)
            yield f"{text}\n"

    with pool.open_session(seed=2, positions=32) as session:
        patches = []
        for samples in session.speak(writing()):
            patches.append(samples)
            assert len(patches) > len(said_alone(SENTENCES[0], seed=2)) or consumed == [SENTENCES[0]]
        assert consumed == list(SENTENCES)
        same(patches, said_in_turn(SENTENCES, positions=32, seed=2))
        same(list(session.speak(" ".join(SENTENCES))), patches)
        same(list(session.speak(iter(" ".join(SENTENCES)))), patches)  # letter by letter


@pytest.mark.parametrize("voice", VOICES, ids=["none", "reference", "continued", "both"])
def test_a_sentence_goes_on_in_the_voice_of_the_one_before(voice: Voice) -> None:
    """As the package's `merge_prompt_cache` has it; and again from the same text the same bytes."""
    carried, texts = 0, ("aa", "zz", "c")
    with open_pool() as pool:
        for seed in [*range(6)] * 2:
            with pool.open_session(voice=voice, seed=seed, positions=32) as session:
                sounds = []
                for number, text in enumerate(texts):
                    session.begin(text, continues=number > 0)
                    sounds += list(session.sound())
                    carried += session.continues
                same(sounds, said_in_turn(texts, voice, 32, seed=seed))
                session.begin(texts[0])  # not after the one before
                same(list(session.sound()), said_alone(texts[0], voice, 32, seed=seed))
    assert carried


def test_what_was_said_moves_with_a_session(pool: SpeechPool, tmp_path: Path) -> None:
    """A snapshot is taken within a sentence; the next one goes on in its voice all the same."""
    wanted = said_in_turn(SENTENCES[:2], positions=32, seed=1)
    with pool.open_session(seed=1, positions=32) as session:
        session.begin(SENTENCES[0])
        sounds = pool.step([session]) + pool.step([session])
        session.save(tmp_path / "snapshot")
        said = session.said
    with pool.restore(tmp_path / "snapshot") as session:
        session.said = said
        sounds += list(session.sound(ahead=0))
        session.begin(SENTENCES[1], continues=True)
        assert session.continues
        sounds += list(session.sound())
    same(sounds, wanted)


@pytest.mark.parametrize("patches", range(4))
def test_a_pause_keeps_what_was_said(pool: SpeechPool, patches: int) -> None:
    """Within a sentence or behind it; the next one goes on in its voice."""
    wanted = said_in_turn(SENTENCES[:2], positions=32, seed=1)
    with pool.open_session(seed=1, positions=32) as session:
        session.begin(SENTENCES[0])
        sounds = [sound for _ in range(patches) for sound in pool.step([session])]
        for _ in range(2):
            session.pause()
            session.resume()
        sounds += list(session.sound(ahead=0))
        session.pause()
        with pytest.raises(SessionClosedError, match="paused"):
            session.said = Said()
        session.resume()
        session.begin(SENTENCES[1], continues=True)
        assert session.continues
        sounds += list(session.sound())
    same(sounds, wanted)


def test_the_limit_is_the_models_or_the_callers_or_that_of_the_positions(pool: SpeechPool) -> None:
    text, seed = next(
        (t, s) for t in TEXTS for s in range(9) if len(said_alone(t, seed=s)) == len(t) + 6 < 10
    )
    with pool.open_session(seed=seed, positions=32) as session:
        assert len(list(session.speak(text))) == LIMITS.patches(len(text))
        assert session.cut
        assert len(list(session.speak(text, patches=2))) == 2
        assert not session.speaks
    with pool.open_session(seed=seed, positions=len(text) + 3) as session:
        same(list(session.speak(text)), said_alone(text, seed=seed)[:2])
        assert session.cut
        with pytest.raises(UsageError, match="have 12 tokens, the session has"):
            next(session.speak("x" * 11))


def test_a_flag_may_be_read_one_step_late_and_the_surplus_patch_is_dropped(pool: SpeechPool) -> None:
    text, seed = next((t, s) for t in TEXTS for s in range(9) if 4 < len(said_alone(t, seed=s)) < len(t) + 6)
    wanted = said_alone(text, seed=seed)
    with pool.open_session(seed=seed) as session:
        session.begin(text)
        row = session._running_row()
        patches = [patch for _ in range(len(wanted) + 1) for patch in pool.step([session])]
        assert patches.pop() is None
        assert rows_of(pool).row(row).patches == len(wanted) + 1  # the surplus one was made
        same(patches, wanted)
        with pytest.raises(UsageError, match="no text to speak, or has spoken it"):
            pool.step([session])
        same(list(session.speak(text)), wanted)
        assert (
            rows_of(pool).row(row).patches == len(wanted) + 1
        )  # the device had its next call before the flag was read
        same(list(session.speak(text, ahead=0)), wanted)
        assert rows_of(pool).row(row).patches == len(wanted)


def test_a_text_ends_when_it_is_finished_or_its_loop_is_left_or_its_session_goes(pool: SpeechPool) -> None:
    with pool.open_session(seed=1) as session:
        sound = session.speak("ccc", patches=8)
        same([next(sound)], said_alone("ccc", seed=1)[:1])
        session.finish()
        assert list(sound) == []
        same(list(islice(session.speak("ccc"), 2)), said_alone("ccc", seed=1)[:2])
        session.begin("aa")
        assert session.speaks
        sound = session.sound()
        next(sound)
        sound.close()
        assert not session.speaks
        again = session.speak("hallo")
        next(again)
        session.begin("aa")  # another text takes its place
        assert list(again) == []
        same(list(session.sound()), said_alone("aa", seed=1))
        last = session.speak("ccc")
        next(last)
    with pytest.raises(SessionClosedError, match="closed"):
        list(last)


def test_a_lease_ends_a_text() -> None:
    now = [0.0]
    with open_pool(clock=lambda: now[0]) as leased:
        session = leased.open_session(lease_s=5)
        sound = session.speak("ccc", ahead=1)
        next(sound)
        now[0] = 4.0
        next(sound)  # a call renews it
        now[0] = 10.0
        assert leased.reap() == [session.name]
        with pytest.raises(SessionClosedError):
            list(sound)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"guidance": float("nan")}, "guidance is nan"),
        ({"guidance": 1e38}, "guidance is 1e.38, expected a number from 0 to 10"),
        ({"guidance": -1}, "guidance is -1, expected a number from 0 to 10"),
        ({"temperature": -0.5}, "temperature is -0.5, expected a number from 0 to 2"),
        ({"temperature": 3e38}, "temperature is 3e.38, expected a number from 0 to 2"),
        ({"temperature": "1"}, "temperature is '1', expected a number from 0 to 2"),
        ({"positions": 1}, "positions is 1"),
        ({"voice": "anna"}, "voice is 'anna'"),
    ],
)
def test_what_no_session_can_have_is_refused(pool: SpeechPool, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pool.open_session(**arguments)
    assert pool.free == pool.capacity


BAD_TEXTS = {
    "": "the text has nothing to say",
    " \n\t": "the text has nothing to say",
    "😄 ...": "the text has nothing to say: it has no letter and no digit",
    "a\0b": "the text has a zero character at place",
    "\0": "the text has a zero character at place 0",
    "abc\ud83d": "the text has half of a surrogate pair at place",
}


def test_what_is_no_text_is_refused(pool: SpeechPool) -> None:
    with pool.open_session() as session:
        for text in (None, 3, b"abc"):
            with pytest.raises(UsageError, match="expected a string or strings"):
                session.speak(text)  # type: ignore[arg-type]
        for text, words in BAD_TEXTS.items():
            for say in (session.speak, session.begin, lambda text: list(session.speak(iter(text)))):
                with pytest.raises(UsageError, match=words):
                    say(text)
        with pytest.raises(UsageError, match="ahead is -1"):
            session.speak("abc", ahead=-1)
        with pytest.raises(UsageError, match="patches is 0"):
            next(session.speak("abc", patches=0))
        with pytest.raises(UsageError, match="no text to speak"):
            session.request_patch(0.0)


PATCHES = np.zeros((3, P, C), np.float32)
IDS = np.array([1, 2, 0], np.int64)
IS_AUDIO = np.array([False, False, True])


@pytest.mark.parametrize(
    ("prompt", "limit", "words"),
    [
        (None, 3, "prompt is None, expected a SpeechPrompt"),
        (SpeechPrompt(np.array([1.5, 2.0, 0.0]), IS_AUDIO, PATCHES), 3, "prompt.ids are float64"),  # type: ignore[arg-type]
        (SpeechPrompt("abc", IS_AUDIO, PATCHES), 3, "prompt.ids are 'abc'"),  # type: ignore[arg-type]
        (SpeechPrompt(IDS[:0], IS_AUDIO[:0], PATCHES[:0]), 3, "prompt.ids are int64"),
        (
            SpeechPrompt(IDS + 62, IS_AUDIO, PATCHES),
            3,
            "prompt.ids are 62 to 64, expected token ids from 0 to 63",
        ),
        (SpeechPrompt(IDS - 1, IS_AUDIO, PATCHES), 3, "prompt.ids are -1 to 1"),
        (SpeechPrompt(IDS, IDS, PATCHES), 3, "prompt.is_audio is int64"),  # type: ignore[arg-type]
        (SpeechPrompt(IDS, IS_AUDIO[:2], PATCHES), 3, "prompt.is_audio is bool"),
        (SpeechPrompt(IDS, IS_AUDIO, PATCHES[:2]), 3, "prompt.patches are"),
        (
            SpeechPrompt(IDS, IS_AUDIO, PATCHES * np.float32(np.nan)),
            3,
            "prompt.patches holds numbers that are not finite",
        ),
        (SpeechPrompt(IDS, IS_AUDIO, [1]), 3, "prompt.patches is"),  # type: ignore[arg-type]
        (SpeechPrompt(IDS, IS_AUDIO, PATCHES), math.nan, "limit is nan, expected a whole number"),
        (SpeechPrompt(IDS, IS_AUDIO, PATCHES), 2.5, "limit is 2.5, expected a whole number"),
        (SpeechPrompt(IDS, IS_AUDIO, PATCHES), 0, "limit is 0, expected at least 1"),
    ],
)
def test_what_is_no_prompt_is_refused(pool: SpeechPool, prompt: Any, limit: Any, words: str) -> None:
    with pool.open_session() as session:
        with pytest.raises(UsageError, match=words):
            session.begin_prompt(prompt, limit)
        session.begin_prompt(SpeechPrompt(IDS, IS_AUDIO, PATCHES), 3)
        assert np.isfinite(list(session.sound())).all()


def test_white_space_is_read_as_the_model_was_trained(pool: SpeechPool) -> None:
    with pool.open_session(seed=1, positions=32) as session:
        session.begin("a\nb   c\td")
        same(list(session.sound()), said_alone("a b c d", positions=32, seed=1))
        same(list(session.speak("a\nb   c\td")), said_alone("a b c d", positions=32, seed=1))


@pytest.mark.parametrize("text", [None, 5, b"hallo"])
def test_what_is_no_text_is_refused_before_it_is_spoken(pool: SpeechPool, text: object) -> None:
    with pool.open_session() as session:
        for check in (session.check_text, pool.check_text, pool.text_tokens):
            with pytest.raises(UsageError, match=f"the text is {text}, expected a text"):
                check(text)  # type: ignore[operator]
