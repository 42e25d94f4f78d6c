"""Sessions of speech: what each says is what it says alone, whoever shares its calls and whatever moves it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seko_runtime.errors import (
    EngineRunError,
    PoolFullError,
    SessionClosedError,
    SnapshotError,
    TornStreamError,
    UsageError,
)
from seko_runtime.sessions.snapshot import Snapshot, read_snapshot
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.prompts import Floats, assemble
from seko_runtime.speech.session import SpeechSession
from seko_runtime.speech.voice import NO_VOICE, Voice
from tests.runtime.order_watch import FakeMemory, World, made_world
from tests.speech.toy_speech import BUCKETS, MARKS, PLACES, SESSIONS, C, P, Tokens, alone, manifest, open_pool

TEXTS = ("abc", "zzzz", "hallo", "aa", "qqqqqqqqqqq")
VOICES = (
    NO_VOICE,
    Voice(reference=np.full((3, P, C), 0.4, np.float32)),
    Voice(continued=np.full((4, P, C), -0.2, np.float32), text="yes"),
    Voice(np.full((2, P, C), 0.1, np.float32), np.full((1, P, C), 0.3, np.float32), "no"),
)
LIMITS = manifest().workload.limits


def said_alone(text: str, voice: Voice = NO_VOICE, positions: int = 18, **settings: Any) -> list[Floats]:
    """What a session of so many positions says."""
    ids = Tokens().ids(voice.text + text)
    prompt = assemble(ids, (P, C), reference=voice.reference, continued=voice.continued, marks=MARKS)
    return alone(prompt, min(LIMITS.patches(len(text)), positions - len(prompt.ids)), **settings)


def same(patches: Sequence[Floats], wanted: Sequence[Floats]) -> None:
    """The same bits."""
    assert [patch.tobytes() for patch in patches] == [patch.tobytes() for patch in wanted]


@pytest.fixture
def pool() -> Iterator[SpeechPool]:
    with open_pool() as opened:
        yield opened


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


@pytest.mark.parametrize("bucket", BUCKETS)
def test_rows_decode_while_one_is_filled_then_one_finishes_and_a_new_one_takes_its_row(bucket: int) -> None:
    """The schedule with which a public server lost its rows' state."""
    with open_pool(buckets=(bucket,)) as pool:
        count = max(bucket, 2)
        sessions = [pool.open_session(seed=seed, positions=18) for seed in range(count)]
        patches_of: dict[SpeechSession, list[Floats]] = {session: [] for session in sessions}
        text_of = {session: TEXTS[at] for at, session in enumerate(sessions)}
        long = "qqqqqqqqqqq"  # two parts of a prompt

        def turn(*some: SpeechSession) -> None:
            for session in some:
                if session.speaks:
                    session.request_patch(0.0)
            for _ in range(len(some)):
                for session, patch in pool.serve_next():
                    if patch is not None and not patch.surplus():
                        patches_of[session].append(patch.samples())

        for session in sessions[:-1]:
            session.begin(text_of[session])
        for _ in range(3):
            turn(*sessions[:-1])
        sessions[-1].begin(long)
        text_of[sessions[-1]] = long
        for _ in range(3):
            turn(*sessions)
        row, ended = sessions[0]._row, sessions[0]
        ended.finish()
        ended.close()
        new = pool.open_session(seed=9, positions=18)
        assert new._row == row
        patches_of[new], text_of[new] = [], TEXTS[2]
        new.begin(text_of[new])
        for _ in range(20):
            turn(*sessions[1:], new)
        for seed, session in [*enumerate(sessions), (9, new)]:
            wanted = said_alone(text_of[session], seed=seed)
            same(patches_of[session], wanted if session is not ended else wanted[: len(patches_of[session])])
            session.close()
        assert len(patches_of[ended]) >= 3


def test_a_prompt_stalls_those_who_speak_for_one_call_at_most(pool: SpeechPool) -> None:
    speaking = pool.open_session(positions=24)
    speaking.begin("ccc", patches=18)
    beginning = [pool.open_session(seed=seed, positions=16) for seed in (1, 2)]
    speaking.request_patch(100.0)
    pool.serve_next()
    for session in beginning:
        session.begin("qqqqqqqqqqq")  # two parts
        session.request_patch(0.0)  # due before
    kinds = []
    for due in range(8):
        if speaking.speaks:
            speaking.request_patch(100.0 + due)
        kinds += [{patch is None for _, patch in pool.serve_next()}]
    assert kinds.count({True}) == kinds.count({False}) == 4  # both prompts are in
    assert {True} not in [first & second for first, second in pairwise(kinds)]
    for session in (speaking, *beginning):
        session.close()


@pytest.mark.parametrize("buckets", [BUCKETS, (4,)])
def test_threads_that_speak_share_calls(buckets: tuple[int, ...]) -> None:
    calls = {"step": 0, "rows": 0}

    def counting(name: str, run: Any) -> Any:
        def counted(tensors: list[Any]) -> list[Any]:
            if name.startswith("begin"):
                calls["step"] += 1
                calls["rows"] += len(set(tensors[0].tolist()) - {SESSIONS})
            return run(tensors)

        return counted

    with open_pool(buckets=buckets, wrap=counting) as pool:
        sessions = [pool.open_session(seed=seed, positions=18) for seed in range(SESSIONS)]
        patches_of: dict[int, list[Floats]] = {}

        def speak(seed: int) -> None:
            patches_of[seed] = list(sessions[seed].speak(TEXTS * 3))

        threads = [threading.Thread(target=speak, args=(seed,)) for seed in range(SESSIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed, session in enumerate(sessions):
            same(patches_of[seed], [patch for text in TEXTS * 3 for patch in said_alone(text, seed=seed)])
            session.close()
        assert calls["rows"] > calls["step"]  # some were shared


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


def test_a_pause_at_any_time_changes_nothing(pool: SpeechPool) -> None:
    """Also within a prompt, beside others, and into another row and other places."""
    text = "qqqqqqqqqqq"
    for stop in range(5):
        other = pool.open_session(positions=7)
        session = pool.open_session(seed=3, positions=18)
        session.begin(text)
        session.request_patch(0.0)
        served = [patch for _ in range(stop) for _, patch in pool.serve_next()]
        session.pause()
        other.close()
        blocks = pool.open_session(positions=30)
        list(blocks.speak("aa"))
        session.resume()
        patches = [patch.samples() for patch in served if patch is not None]
        same([*patches, *session.sound()], said_alone(text, seed=3))
        session.close()
        blocks.close()


def test_a_session_that_is_paused_while_it_speaks_goes_on_where_it_was(pool: SpeechPool) -> None:
    with pool.open_session(seed=3) as session:
        sound = session.speak("hallo", ahead=2)
        patches = [next(sound)]
        session.pause()
        with pytest.raises(SessionClosedError, match="paused; call resume"):
            next(sound)
        session.resume()
        same([*patches, *session.sound()], said_alone("hallo", seed=3))


@pytest.mark.parametrize("calls", range(4))
def test_a_snapshot_goes_on_in_another_pool(tmp_path: Path, calls: int) -> None:
    """The file grows with what the row holds; it is taken within a prompt, too."""
    text = "qqqqqqqqqqq"
    with open_pool() as pool, open_pool() as other, open_pool(digest="e") as foreign:
        session = pool.open_session(seed=3, positions=18)
        session.begin(text)
        session.request_patch(0.0)
        patches = []
        for _ in range(calls):
            patches += [patch.samples() for _, patch in pool.serve_next() if patch is not None]
            if session.due is None:
                session.request_patch(0.0)
        session.save(tmp_path / "saved")
        session.close()
        blocks = other.open_session(positions=20)
        again = other.restore(tmp_path / "saved")
        same([*patches, *again.sound()], said_alone(text, seed=3))
        with pytest.raises(SnapshotError, match="is of artifact 'd'"):
            foreign.restore(tmp_path / "saved")
        again.close()
        blocks.close()


def test_snapshots_of_rows_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with open_pool() as pool:
        session = pool.open_session(positions=18)
        sound = session.speak("hallo", ahead=4)
        next(sound)
        for _ in range(5):
            pool.serve_next()  # as another thread's session would
        with pytest.raises(UsageError, match="has 4 patches that were not taken"):
            session.save(tmp_path / "saved")
        session.finish()
        session.begin("hallo")
        pool.step([session])
        session.save(tmp_path / "saved")
        session.close()
        rows = pool._rows
        state = read_snapshot(tmp_path / "saved", pool._digests, rows.layout(), rows.form)
        for changed in (
            {"positions": 33},
            {"filled": 13, "positions": 12},
            {"patches": 12},
            {"limit": 19},
            {"pending": 3},
        ):
            wrong = replace(state, numbers=replace(state.numbers, **changed))
            Snapshot(wrong, pool._digests).save(tmp_path / "wrong")
            with pytest.raises(SnapshotError, match=r"positions filled|does not hold"):
                pool.restore(tmp_path / "wrong")
        assert pool.free == pool.capacity


def test_places_are_those_that_sessions_ask_for(pool: SpeechPool) -> None:
    assert pool.free_positions == 32
    first, second = pool.open_session(positions=32), pool.open_session(positions=32)
    assert pool.free_positions == PLACES - 1 - 64 == 10
    with pytest.raises(PoolFullError, match="asks for 11 positions, at most 10 are free side by side"):
        pool.open_session(positions=11)
    assert pool.free == 2
    third = pool.open_session(positions=10)
    first.close()
    with pytest.raises(UsageError, match="positions is 33, expected 2 to 32"):
        pool.open_session(positions=33)
    second.pause()
    blocks = [pool.open_session(positions=20), pool.open_session(positions=20)]
    with pytest.raises(PoolFullError, match=r"all 4 rows|free side by side"):
        pool.open_session(positions=32)
    with pytest.raises(PoolFullError, match="asks for 32 positions, at most 24"):
        second.resume()
    third.close()
    second.resume()
    for session in (second, *blocks):
        session.close()


def test_a_session_that_nobody_holds_gives_its_places_back(pool: SpeechPool) -> None:
    sessions = [pool.open_session(positions=32), pool.open_session(positions=32)]
    with pytest.warns(ResourceWarning, match="was never closed"):
        del sessions[0]
    sessions.append(pool.open_session(positions=32))
    for session in sessions:
        session.close()


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
    ],
)
def test_what_is_no_voice_is_refused(pool: SpeechPool, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pool.encode_voice(**arguments)


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


def test_a_step_that_fails_ends_its_texts_and_no_others() -> None:
    """A decoder's state is moved in place, so such a row cannot make the patch again; it may speak anew."""
    planted = [False]

    def failing(name: str, run: Any) -> Any:
        def fails(tensors: list[Any]) -> list[Any]:
            if planted[0] and name.startswith("decode"):
                planted[0] = False
                raise RuntimeError("planted")
            return run(tensors)

        return fails

    with open_pool(wrap=failing) as pool:
        hit, spared = pool.open_session(seed=1), pool.open_session(seed=2)
        sound = hit.speak("hallo", ahead=1)
        next(sound)
        spared.begin("zzzz")
        pool.step([spared])
        planted[0] = True
        with pytest.raises(EngineRunError, match="planted"):
            pool.step([hit])
        with pytest.raises(TornStreamError, match="interrupted while a call"):
            list(sound)
        same(list(spared.sound()), said_alone("zzzz", seed=2)[1:])
        same(list(hit.speak("hallo")), said_alone("hallo", seed=1))
        hit.close()
        spared.close()


def test_what_was_asked_for_by_request_patch_is_not_made_by_threads_that_iterate(pool: SpeechPool) -> None:
    asked, spoken = pool.open_session(seed=1), pool.open_session(seed=2)
    asked.begin("hallo")
    asked.request_patch(0.0)
    same(list(spoken.speak("aa")), said_alone("aa", seed=2))
    served = [patch for _ in range(2) for _, patch in pool.serve_next()]
    same([patch.samples() for patch in served if patch is not None], said_alone("hallo", seed=1)[:1])
    asked.close()
    spoken.close()


def test_an_error_reaches_the_threads_whose_sessions_the_call_carried_and_no_others() -> None:
    """Whichever thread runs the call. A prompt that failed can be filled in again."""
    failing = [False]

    def planted(name: str, run: Any) -> Any:
        def fails(tensors: list[Any]) -> list[Any]:
            if failing[0] and name.startswith("prefill"):
                raise RuntimeError("planted")
            return run(tensors)

        return fails

    with open_pool(wrap=planted) as pool:
        hit, spared = pool.open_session(seed=1), pool.open_session(seed=2)
        sound = spared.speak("zzzz")
        patches = [next(sound)]
        failing[0] = True
        begun = hit.speak("hallo")
        hit.begin("hallo")
        hit._ahead = 1
        hit.request_patch(0.0)
        patches += sound  # its thread runs the prefill that fails
        same(patches, said_alone("zzzz", seed=2))
        with pytest.raises(EngineRunError, match="planted"):
            list(hit.sound())
        failing[0] = False
        same(list(begun), said_alone("hallo", seed=1))
        hit.close()
        spared.close()


def test_a_cache_that_an_engine_takes_whole_has_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers would have gaps between them if an engine took each alone."""
    memory = FakeMemory(made_world(monkeypatch))
    with open_pool(memory, buckets=(2,)) as pool:
        device = pool._rows.device()
        assert device.buffers["k"].is_contiguous()
        assert not memory.allocate(device.specs["k"]).is_contiguous()


def test_captured_calls_and_copies_beside_them_race_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world: World = made_world(monkeypatch)
    with open_pool(FakeMemory(world), buckets=(2,)) as pool:
        first, second = pool.open_session(seed=1), pool.open_session(seed=2)
        first.begin("hallo")
        launches = pool._rows.launches
        patches = pool.step([first])
        assert pool._rows.launches == launches + 2  # a prefill and a step
        first.pause()
        second.begin("aa")
        pool.step([second])
        first.resume()
        patches += [pool.step([first, second])[0], pool.step([first])[0]]
        assert pool._rows.launches == launches + 6
        same([patch for patch in patches if patch is not None], said_alone("hallo", seed=1)[:3])
        sound_in = np.arange(1, 12, dtype=np.float32) / 8
        second.voice = voice = pool.encode_voice(sound_in, continued=sound_in, text="no")
        sound = second.speak("aa")  # with a lead-in, while the first speaks on
        patches = [next(sound)]
        same(list(first.sound()), said_alone("hallo", seed=1)[3:])
        first.snapshot().blocks()
        same([*patches, *sound], said_alone("aa", voice, seed=2))
        first.close()
        second.close()
