"""A pool under errors and Ctrl-C at every line: no two sessions on one row, none half open, the others' frames whole.

``SEKO_POOL_EXAMPLES`` says how many random stories are told.
"""

from __future__ import annotations

import dis
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from linecache import getline
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from seko_runtime.errors import PoolFullError, SessionClosedError, UsageError
from seko_runtime.sessions import call_lock
from seko_runtime.sessions import membership as membership_module
from seko_runtime.sessions import pool as pool_module
from seko_runtime.sessions import session as session_module
from seko_runtime.video.pool import Session, SessionLeakWarning
from tests.support.rows import rows_of
from tests.support.tiers import first_is_fast

from .pool_stories import PROMPTS, Story, closing, take
from .toy_pool import BUCKETS, SESSIONS, open_pool

EXAMPLES = int(os.environ.get("SEKO_POOL_EXAMPLES", "60"))
WATCHED = {module.__file__ for module in (membership_module, pool_module, session_module, call_lock)}


class PlantedError(Exception):
    """An error that no code expects."""


KINDS = (PlantedError, KeyboardInterrupt)


def faults(lines: int) -> st.SearchStrategy[tuple[type[BaseException], int] | None]:
    """Faults in a call that runs about so many lines; one behind its last line is none."""
    return st.one_of(st.none(), st.tuples(st.sampled_from(KINDS), st.integers(0, lines)))


WHICH = st.integers(0, 9)
NUMBERS = st.sampled_from((None, 5.0, 50.0))


class FaultAtLine:
    """Raises at the n-th line of the pool's files that runs, once.

    The end of a ``with`` block has a line event of its own, before the lock is given back: Python looks for signals
    only behind it, so nothing is raised there.
    """

    def __init__(self, kind: type[BaseException], at: int) -> None:
        self.kind, self.left, self.fired = kind, at, False

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code.co_filename not in WATCHED or (event == "call" and _finalises(frame)):
            return None
        if event == "line" and frame.f_lasti not in _ends_of_with(code):
            if self.left == 0:
                self.fired = True
                raise self.kind("planted")
            self.left -= 1
        return self.trace


def _finalises(frame: FrameType | None) -> bool:
    """Whether a call was made by a `__del__`, whose errors nobody is told: a collection comes at any line."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@cache
def _ends_of_with(code: CodeType) -> frozenset[int]:
    """Offsets at which a line that begins a ``with`` is come back to."""
    offsets, seen = set(), set()
    for offset, line in dis.findlinestarts(code):
        if line in seen and getline(code.co_filename, line or 0).strip().startswith("with "):
            offsets.add(offset)
        seen.add(line)
    return frozenset(offsets)


class PoolUnderFaults(RuleBasedStateMachine):
    """Sessions that come, go, move and fail; `stories` has what each was asked, as far as it has answered."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = open_pool(clock=lambda: self.now)
        self.stories: list[tuple[Session, Story]] = []
        self.ended: list[Story] = []
        self.fault: BaseException | None = (
            None  # the last one, whose traceback holds frames and what they name
        )
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name, "session")
        self.saved: Story | None = None

    def under(self, fault: tuple[type[BaseException], int] | None, call: Callable[[], Any]) -> Any:
        """Return what a call gives, or None if the fault came."""
        if fault is None:
            return call()
        planted, before = FaultAtLine(*fault), sys.gettrace()
        sys.settrace(planted.trace)
        try:
            return call()
        except (PlantedError, KeyboardInterrupt) as error:
            sys.settrace(before)
            assert planted.fired
            self.fault = error
            return None
        finally:
            sys.settrace(before)

    def chosen(self, which: int, *, paused: bool) -> tuple[Session, Story] | None:
        pairs = [pair for pair in self.stories if pair[0].paused == paused and not pair[0].closed]
        return pairs[which % len(pairs)] if pairs else None

    @rule(seed=st.integers(0, 3), prompt=st.sampled_from(PROMPTS), lease=NUMBERS, fault=faults(60))
    def open(self, seed: int, prompt: str, lease: float | None, fault: Any) -> None:
        full = not self.room()
        try:
            opened = self.under(
                fault, lambda: self.pool.open_session(seed=seed, prompt=prompt, lease_s=lease)
            )
        except PoolFullError:
            assert full
        else:
            if opened is not None:
                self.stories.append((opened, Story(seed, prompt)))

    @rule(
        wrong=st.sampled_from(
            (
                {"prompt": PROMPTS[0], "lease_s": "60"},
                {"prompt": PROMPTS[0], "lease_s": float("nan")},
                {"prompt": PROMPTS[0], "image": np.zeros((2, 2, 3), np.uint8)},
                {"text": np.zeros((2, 5, 4), np.float32)},
            )
        ),
        fault=faults(60),
    )
    def open_what_does_not_fit(self, wrong: dict[str, Any], fault: Any) -> None:
        try:
            assert self.under(fault, lambda: self.pool.open_session(**wrong)) is None
        except UsageError as error:
            self.fault = error
        except PoolFullError:
            assert not self.room()

    @rule(which=st.lists(WHICH, min_size=1, max_size=BUCKETS[-1], unique=True), fault=faults(50))
    def run(self, which: list[int], fault: Any) -> None:
        self.under(None, self.pool.reap)
        running = [pair for pair in self.stories if pair[0]._row is not None]
        chosen = (
            [running[at] for at in dict.fromkeys(number % len(running) for number in which)]
            if running
            else []
        )
        if not chosen:
            return
        before = [self.chunks_made(session) for session, _ in chosen]
        chunks = self.under(fault, lambda: self.pool.run([session for session, _ in chosen]))
        moved = [
            self.chunks_made(session) - earlier for (session, _), earlier in zip(chosen, before, strict=True)
        ]
        assert moved in ([0] * len(chosen), [1] * len(chosen))
        if moved[0]:
            for place, (_, story) in enumerate(chosen):
                story.asked.append(("run",))
                story.gave.append(b"" if chunks is None else take(chunks[place]))  # b"": nobody got it

    @rule(which=WHICH, paused=st.booleans(), fault=faults(10))
    def close(self, which: int, paused: bool, fault: Any) -> None:
        if (pair := self.chosen(which, paused=paused)) is not None:
            self.under(fault, pair[0].close)
            assert pair[0].closed or fault is not None

    @rule(which=WHICH)
    def lose(self, which: int) -> None:
        if (pair := self.chosen(which, paused=False)) is not None:
            self.fault = None
            self.stories.remove(pair)
            self.ended.append(pair[1])
            with pytest.warns(SessionLeakWarning):
                del pair

    @rule(which=WHICH, fault=faults(6))
    def renew(self, which: int, fault: Any) -> None:
        if (pair := self.chosen(which, paused=False)) is not None:
            self.under(fault, pair[0].renew)

    @rule(which=WHICH, fault=faults(14))
    def pause(self, which: int, fault: Any) -> None:
        if (pair := self.chosen(which, paused=False)) is not None:
            self.under(fault, pair[0].pause)
            assert pair[0].paused or fault is not None

    @rule(which=WHICH, fault=faults(60))
    def resume(self, which: int, fault: Any) -> None:
        self.under(None, self.pool.reap)
        if (pair := self.chosen(which, paused=True)) is not None:
            try:
                self.under(fault, pair[0].resume)
                assert not pair[0].paused or fault is not None
            except PoolFullError:
                assert pair[0].paused
                assert not self.room()

    @rule(which=WHICH, paused=st.booleans(), fault=faults(12))
    def save(self, which: int, paused: bool, fault: Any) -> None:
        if (pair := self.chosen(which, paused=paused)) is not None:
            session, story = pair
            before = session._row, session.paused
            written = self.file.stat().st_ino if self.file.exists() else None
            self.under(fault, lambda: session.save(self.file))
            assert (session._row, session.paused) == before
            if self.file.exists() and self.file.stat().st_ino != written:
                self.saved = replace(story, asked=[*story.asked], gave=[*story.gave])

    @precondition(lambda self: self.saved is not None)
    @rule(lease=NUMBERS, fault=faults(60))
    def restore(self, lease: float | None, fault: Any) -> None:
        try:
            restored = self.under(fault, lambda: self.pool.restore(self.file, lease_s=lease))
        except PoolFullError:
            assert not self.room()
        else:
            if restored is not None and self.saved is not None:
                story = replace(self.saved, asked=[*self.saved.asked], gave=[*self.saved.gave])
                self.stories.append((restored, story))

    @rule(seconds=st.sampled_from((1.0, 20.0, 100.0)), fault=faults(30))
    def wait(self, seconds: float, fault: Any) -> None:
        self.now += seconds
        self.under(fault, self.pool.reap)
        self.pool.reap()
        for session, _ in self.stories:
            assert session.closed or session.expires is None or session.expires > self.now

    @rule()
    def fill(self) -> None:
        """As many sessions open as rows are free, and no more."""
        room = self.room()
        guests = [self.pool.open_session(prompt=PROMPTS[0]) for _ in range(room)]
        assert self.pool.free == 0
        with pytest.raises(PoolFullError):
            self.pool.open_session(prompt=PROMPTS[0])
        for guest in guests:
            guest.close()

    def room(self) -> int:
        return SESSIONS - sum(session._row is not None for session, _ in self.stories)

    def chunks_made(self, session: Session) -> int:
        return rows_of(self.pool).streams.clocks.chunks_made(session._running_row())

    @invariant()
    def each_row_has_one_owner_or_none(self) -> None:
        with_row = [session for session, _ in self.stories if session._row is not None]
        rows = [session._row for session in with_row]
        assert len(set(rows)) == len(rows)
        assert {id(session) for session in self.pool.sessions} == {id(session) for session in with_row}
        assert self.pool.free == SESSIONS - len(rows)

    @invariant()
    def each_session_is_running_or_paused_or_closed(self) -> None:
        running = {id(session) for session in self.pool.sessions}
        for session, _ in self.stories:
            assert (id(session) in running) + session.paused + session.closed == 1
            if session.closed:
                with pytest.raises(SessionClosedError):
                    session.run_chunk()

    def teardown(self) -> None:
        for session, story in self.stories:
            if session._row is not None:
                story.asked.append(("run",))
                story.gave.append(take(session.run_chunk()))
            session.close()
        assert self.pool.free == SESSIONS
        self.pool.close()
        self.folder.cleanup()
        for story in (*self.ended, *(story for _, story in self.stories)):
            alone = story.alone()
            assert [chunk for chunk in story.gave if chunk] == [
                chunk for chunk, got in zip(alone, story.gave, strict=True) if got
            ]


@pytest.mark.shows("snapshots")
def test_a_pool_under_errors_and_interrupts() -> None:
    run_state_machine_as_test(
        PoolUnderFaults,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )


STARTED = ("running", "paused")
CALLS: dict[str, Callable[[Any, Any, Path], Any]] = {
    "open": lambda pool, _, __: pool.open_session(seed=7, prompt=PROMPTS[2], lease_s=9.0),
    "close": lambda _, by, __: by["running"].close(),
    "close a paused one": lambda _, by, __: by["paused"].close(),
    "renew": lambda _, by, __: by["running"].renew(),
    "pause": lambda _, by, __: by["running"].pause(),
    "resume": lambda _, by, __: by["paused"].resume(),
    "save": lambda _, by, file: by["running"].save(file),
    "save a paused one": lambda _, by, file: by["paused"].save(file),
    "restore": lambda pool, _, file: pool.restore(file.with_name("there"), lease_s=9.0),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    first_is_fast(
        [*((name, PlantedError) for name in [*CALLS][:4]), *((name, KeyboardInterrupt) for name in CALLS)], 4
    ),
)
def test_a_fault_at_each_line_in_turn(name: str, kind: type[BaseException], tmp_path: Path) -> None:
    """After it every session is in one state, every free row can be taken, and all streams go on as alone."""
    file, line, fired = tmp_path / "session", 0, True
    alone = {label: Story(seed, PROMPTS[seed], [("run",)] * 2).alone() for seed, label in enumerate(STARTED)}
    while fired:
        with closing(open_pool()) as pool:
            stories = {label: Story(seed, PROMPTS[seed]) for seed, label in enumerate(STARTED)}
            by = {
                label: pool.open_session(seed=story.seed, prompt=story.prompt, lease_s=1e6)
                for label, story in stories.items()
            }

            def run(label: str, by: Any = by, stories: Any = stories) -> None:
                stories[label].asked.append(("run",))
                stories[label].gave.append(take(by[label].run_chunk()))

            for label in by:
                run(label)
            by["running"].save(file.with_name("there"))
            by["paused"].pause()
            planted, before = FaultAtLine(kind, line), sys.gettrace()
            fault: BaseException | None = None  # its traceback keeps what the frames name
            sys.settrace(planted.trace)
            try:
                opened = CALLS[name](pool, by, file)
            except (PlantedError, KeyboardInterrupt) as error:
                fault, opened = error, None
            finally:
                sys.settrace(before)
            fired, line = planted.fired, line + 1
            assert fired == (fault is not None)
            known = [session for session in (*by.values(), opened) if isinstance(session, Session)]
            rows = [session._row for session in known if session._row is not None]
            assert len(set(rows)) == len(rows) == SESSIONS - pool.free
            guests = [pool.open_session(seed=9, prompt=PROMPTS[2]) for _ in range(pool.free)]
            with pytest.raises(PoolFullError):
                pool.open_session(prompt=PROMPTS[2])
            if guests:
                pool.run(guests[: BUCKETS[-1]])
            for guest in guests:
                guest.close()
            for label, session in by.items():
                assert (session in pool.sessions) + session.paused + session.closed == 1
                if session.paused:
                    session.resume()
                if not session.closed:
                    run(label)
                assert stories[label].gave == alone[label][: 1 + (not session.closed)]
            if opened is not None:
                opened.close()
    assert line > 2
