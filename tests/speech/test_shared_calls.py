"""Sessions of speech that share calls: each says what it says alone; and on a device their calls race with nobody."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.prompts import Floats
from seko_runtime.speech.session import SpeechSession
from tests.runtime.order_watch import FakeMemory, World, made_world
from tests.speech.texts import TEXTS, said_alone, said_in_turn, same
from tests.speech.toy_speech import BUCKETS, SESSIONS, open_pool
from tests.support.rows import rows_of


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
        texts = [text for text in TEXTS if len(text) > 3] * 3

        def speak(seed: int) -> None:
            patches_of[seed] = list(sessions[seed].speak(f"{text}!\n" for text in texts))

        threads = [threading.Thread(target=speak, args=(seed,)) for seed in range(SESSIONS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for seed, session in enumerate(sessions):
            same(patches_of[seed], said_in_turn([f"{text}!" for text in texts], seed=seed))
            session.close()
        assert calls["rows"] > calls["step"]  # some were shared


def test_what_was_asked_for_by_request_patch_is_not_made_by_threads_that_iterate(pool: SpeechPool) -> None:
    asked, spoken = pool.open_session(seed=1), pool.open_session(seed=2)
    asked.begin("hallo")
    asked.request_patch(0.0)
    same(list(spoken.speak("aa")), said_alone("aa", seed=2))
    served = [patch for _ in range(2) for _, patch in pool.serve_next()]
    same([patch.samples() for patch in served if patch is not None], said_alone("hallo", seed=1)[:1])
    asked.close()
    spoken.close()


def test_captured_calls_and_copies_beside_them_race_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    world: World = made_world(monkeypatch)
    with open_pool(FakeMemory(world), buckets=(2,)) as pool:
        first, second = pool.open_session(seed=1), pool.open_session(seed=2)
        first.begin("hallo")
        launches = rows_of(pool).launches
        patches = pool.step([first])
        assert rows_of(pool).launches == launches + 2  # a prefill and a step
        first.pause()
        second.begin("aa")
        pool.step([second])
        first.resume()
        patches += [pool.step([first, second])[0], pool.step([first])[0]]
        assert rows_of(pool).launches == launches + 6
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
