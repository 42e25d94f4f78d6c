"""Any story of sessions that come, speak in any company, move and go: each says what it says alone, to the last bit."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from seko_runtime.errors import PoolFullError
from seko_runtime.speech.places import free_start, gaps
from seko_runtime.speech.prompts import Floats, SpeechPrompt, assemble
from seko_runtime.speech.session import SpeechSession
from seko_runtime.speech.voice import NO_VOICE, Voice
from tests.speech.toy_speech import BUCKETS, MARKS, PLACES, C, P, Tokens, alone, manifest, open_pool
from tests.support.rows import rows_of

VOICES = (NO_VOICE, Voice(reference=np.full((5, P, C), 0.4, np.float32)))


class Said:
    """What a session is to say, and what has come of it."""

    def __init__(self, seed: int, positions: int, voice: Voice) -> None:
        self.seed, self.positions, self.voice = seed, positions, voice
        self.wanted: list[Floats] = []
        self.heard: list[Floats] = []

    def begin(self, session: SpeechSession, text: str) -> None:
        self.check()
        prompt: SpeechPrompt = assemble(
            Tokens().ids(text), (P, C), reference=self.voice.reference, marks=MARKS
        )
        limit = min(manifest().workload.limits.patches(len(text)), self.positions - len(prompt.ids))
        session.begin(text)
        self.wanted, self.heard = alone(prompt, limit, seed=self.seed), []

    def check(self) -> None:
        wanted = [patch.tobytes() for patch in self.wanted[: len(self.heard)]]
        assert [patch.tobytes() for patch in self.heard] == wanted


class Story(RuleBasedStateMachine):
    """Sessions of one pool, served as the scheduler chooses or stepped in a company of the story's own."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now = 0.0
        self.pool = open_pool(clock=lambda: self.now)
        self.said: dict[SpeechSession, Said] = {}

    def running(self, wanted: Callable[[SpeechSession], bool] = lambda _: True) -> list[SpeechSession]:
        return [
            session for session in self.said if not session.closed and not session.paused and wanted(session)
        ]

    def paused(self) -> list[SpeechSession]:
        return [session for session in self.said if session.paused]

    @rule(
        seed=st.integers(0, 3),
        positions=st.integers(15, 32),
        voice=st.sampled_from(VOICES),
        lease=st.sampled_from((None, None, 3.0)),
    )
    def join(self, seed: int, positions: int, voice: Voice, lease: float | None) -> None:
        try:
            session = self.pool.open_session(seed=seed, positions=positions, voice=voice, lease_s=lease)
        except PoolFullError:
            assert not self.pool.free or self.pool.free_positions < positions
        else:
            self.said[session] = Said(seed, positions, voice)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), text=st.text("abchq", min_size=1, max_size=6))
    def begin(self, data: Any, text: str) -> None:
        session = data.draw(st.sampled_from(self.running()))
        self.said[session].begin(session, text)

    @precondition(lambda self: self.running(lambda session: session.speaks))
    @rule(data=st.data())
    def step(self, data: Any) -> None:
        speaking = self.running(lambda session: session.speaks)
        company = data.draw(st.lists(st.sampled_from(speaking), min_size=1, unique=True))
        for session, samples in zip(company, self.pool.step(company), strict=True):
            if samples is not None:
                self.said[session].heard.append(samples)

    @precondition(lambda self: self.running(lambda session: session.speaks))
    @rule(data=st.data(), due=st.floats(0, 9))
    def ask(self, data: Any, due: float) -> None:
        data.draw(st.sampled_from(self.running(lambda session: session.speaks))).request_patch(due)

    @rule(calls=st.integers(1, 3))
    def serve(self, calls: int) -> None:
        for _ in range(calls):
            for session, patch in self.pool.serve_next():
                if patch is not None and not patch.surplus():
                    self.said[session].heard.append(patch.samples())

    @precondition(lambda self: self.running(lambda session: session.speaks))
    @rule(data=st.data(), patches=st.integers(1, 6), ahead=st.integers(0, 3))
    def listen(self, data: Any, patches: int, ahead: int) -> None:
        session = data.draw(st.sampled_from(self.running(lambda session: session.speaks)))
        said, sound = self.said[session], session.sound(ahead=ahead)
        said.heard += islice(sound, patches)
        said.check()
        sound.close()  # which finishes the text
        said.wanted, said.heard = [], []

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        session = data.draw(st.sampled_from(self.running()))
        self.said[session].check()
        session.finish()
        self.said[session].wanted = self.said[session].heard = []

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def pause(self, data: Any) -> None:
        data.draw(st.sampled_from(self.running())).pause()

    @precondition(lambda self: self.paused())
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        session = data.draw(st.sampled_from(self.paused()))
        try:
            session.resume()
        except PoolFullError:
            assert not self.pool.free or self.pool.free_positions < self.said[session].positions

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def save_and_restore(self, data: Any) -> None:
        session = data.draw(st.sampled_from(self.running()))
        path = Path(self.folder.name) / "saved"
        session.save(path)
        session.close()
        said = self.said.pop(session)
        restored = self.pool.restore(path)
        restored.voice = said.voice
        self.said[restored] = said

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        session = data.draw(st.sampled_from([*self.said]))
        session.close()
        self.said.pop(session).check()

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.pool.reap()

    @invariant()
    def rows_share_no_place(self) -> None:
        places = sorted(rows_of(self.pool)._taken())
        ends = [start + count for start, count in places]
        assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
        assert not ends or ends[-1] < PLACES  # the last place is nobody's

    def teardown(self) -> None:
        for session in self.running():
            said = self.said[session]
            if said.wanted:
                said.heard += session.sound()
                assert len(said.heard) == len(said.wanted)
        for session, said in self.said.items():
            said.check()
            session.close()
        self.pool.close()
        self.folder.cleanup()


def run_stories(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Story,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=[*HealthCheck],
        ),
    )


def test_whatever_moves_a_session_it_says_what_it_says_alone() -> None:
    run_stories(examples=25, steps=25)


@pytest.mark.slow
def test_whatever_moves_a_session_it_says_what_it_says_alone_at_length() -> None:
    run_stories(examples=40, steps=50)


@settings(max_examples=60)
@given(st.data())
def test_a_free_stretch_is_found_where_there_is_one(data: st.DataObject) -> None:
    places = data.draw(st.integers(1, 20))
    taken: list[tuple[int, int]] = []
    for start, count in data.draw(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 6)), max_size=6)):
        if start + count <= places and all(start + count <= s or s + n <= start for s, n in taken):
            taken.append((start, count))
    free = set(range(places)) - {place for start, count in taken for place in range(start, start + count)}
    assert {place for start, count in gaps(taken, places) for place in range(start, start + count)} == free
    wanted = data.draw(st.integers(1, 20))
    fits = [s for s in range(places) if set(range(s, s + wanted)) <= free]
    assert free_start(taken, wanted, places) == min(fits, default=None)


def test_every_bucket_is_reached() -> None:
    """Else a story of four rows would be one of a single bucket."""
    assert BUCKETS == (1, 2, 4)
