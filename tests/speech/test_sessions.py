"""A session of speech says what the model says by plain loops, up to its flag or its limit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from seko_runtime.errors import (
    SessionClosedError,
    UsageError,
)
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.voice import Voice
from tests.speech.texts import LIMITS, TEXTS, VOICES, said_alone, same
from tests.speech.toy_speech import open_pool


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


def test_a_text_in_sentences_is_read_as_it_is_spoken(pool: SpeechPool) -> None:
    """Sound comes before the second sentence is there, and each sounds as it does alone."""
    consumed: list[str] = []

    def writing() -> Iterator[str]:
        for text in TEXTS[:3]:
            consumed.append(text)
            yield text

    with pool.open_session(seed=2) as session:
        patches = []
        for samples in session.speak(writing()):
            patches.append(samples)
            assert len(patches) > len(said_alone(TEXTS[0], seed=2)) or consumed == [TEXTS[0]]
        assert consumed == list(TEXTS[:3])
        same(patches, [patch for text in TEXTS[:3] for patch in said_alone(text, seed=2)])


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
        assert pool._rows.row(row).patches == len(wanted) + 1  # the surplus one was made
        same(patches, wanted)
        with pytest.raises(UsageError, match="no text to speak, or has spoken it"):
            pool.step([session])
        same(list(session.speak(text)), wanted)
        assert (
            pool._rows.row(row).patches == len(wanted) + 1
        )  # the device had its next call before the flag was read
        same(list(session.speak(text, ahead=0)), wanted)
        assert pool._rows.row(row).patches == len(wanted)


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
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"positions": 1}, "positions is 1"),
        ({"voice": "anna"}, "voice is 'anna'"),
    ],
)
def test_what_no_session_can_have_is_refused(pool: SpeechPool, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pool.open_session(**arguments)
    assert pool.free == pool.capacity


def test_what_is_no_text_is_refused(pool: SpeechPool) -> None:
    with pool.open_session() as session:
        for text in (None, 3, b"abc"):
            with pytest.raises(UsageError, match="expected a string or strings"):
                session.speak(text)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="give a sentence with words"):
            next(session.speak(""))
        with pytest.raises(UsageError, match="ahead is -1"):
            session.speak("abc", ahead=-1)
        with pytest.raises(UsageError, match="patches is 0"):
            next(session.speak("abc", patches=0))
        with pytest.raises(UsageError, match="no text to speak"):
            session.request_patch(0.0)
