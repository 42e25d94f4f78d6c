"""A pool's sessions: each one's bytes are those of a stream alone, whoever comes, goes or shares its launch."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from seko_runtime.errors import (
    DeviceMemoryError,
    PoolFullError,
    SessionClosedError,
    UsageError,
)
from seko_runtime.sessions.rows import check_room
from seko_runtime.video.pool import Session, SessionLeakWarning
from tests.support.rows import rows_of

from . import toy_pool
from .pool_stories import FILL_CHUNKS, PROMPTS, Story, closing, take
from .toy_pool import BUCKETS, SESSIONS, open_alone, open_pool, pool_manifest

ACTIONS = st.one_of(
    *(
        st.tuples(
            st.just("run"),
            st.lists(st.integers(0, 9), min_size=1, max_size=most, unique=True),
            st.integers(1, FILL_CHUNKS),  # chunks in a row: so full rows meet those that fill
        )
        for most in (1, 3, BUCKETS[-1])
    ),
    st.tuples(st.just("open"), st.integers(0, 3), st.sampled_from(PROMPTS)),
    st.tuples(st.just("close"), st.integers(0, 9)),
    st.tuples(st.just("prompt"), st.integers(0, 9), st.sampled_from(PROMPTS), st.booleans()),
    st.tuples(st.just("restart"), st.integers(0, 9), st.integers(0, 3)),
    st.tuples(st.just("pause"), st.integers(0, 9)),
    st.tuples(st.just("resume"), st.integers(0, 9)),
    st.tuples(st.just("move"), st.integers(0, 9)),
)


@pytest.mark.shows("pools")
@settings(max_examples=60)
@given(st.lists(ACTIONS, min_size=12, max_size=40))
@example([("run", [0], FILL_CHUNKS), ("run", [0, 1], FILL_CHUNKS), ("run", [1, 0], 1)])
@example(  # a prefill beside running streams, calls without them, then all together: nobody is taken for ended
    [
        ("run", [0, 1], 2),
        ("open", 2, PROMPTS[2]),
        ("run", [2], 2),
        ("run", [1], 1),
        ("run", [2], 1),
        ("run", [0, 1, 2], 1),
        ("run", [2, 0], 1),
        ("run", [1, 2, 0], 1),
    ]
)
def test_a_sessions_bytes_are_those_of_a_stream_alone(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[Any, ...]]
) -> None:
    """Joins, leaves, prompts with and without a new cache, restarts, pauses, moves by snapshot; far past the wrap."""
    stories: list[tuple[Session, Story]] = []
    ended: list[Story] = []
    file = tmp_path_factory.mktemp("snapshot") / "session"
    with closing(open_pool()) as pool:
        for what, *rest in [("open", 0, PROMPTS[0]), ("open", 1, PROMPTS[1]), *actions, ("run", [0], 1)]:
            running = [pair for pair in stories if not pair[0].paused]
            if what == "open" and pool.free:
                stories.append((pool.open_session(seed=rest[0], prompt=rest[1]), Story(*rest)))
            elif what == "run" and running:
                chosen = [running[i] for i in dict.fromkeys(number % len(running) for number in rest[0])]
                for _ in range(rest[1]):
                    for (_, story), chunk in zip(
                        chosen, pool.run([session for session, _ in chosen]), strict=True
                    ):
                        story.asked.append(("run",))
                        story.gave.append(take(chunk))
            elif what == "close" and stories:
                session, story = stories.pop(rest[0] % len(stories))
                session.close()
                ended.append(story)
            elif what == "resume" and len(running) < len(stories) and pool.free:
                paused = [session for session, _ in stories if session.paused]
                paused[rest[0] % len(paused)].resume()
            elif running and what in ("prompt", "restart", "pause", "move"):
                at = rest[0] % len(running)
                session, story = running[at]
                if what == "prompt":
                    session.set_prompt(rest[1], recache=rest[2])
                    story.asked.append(("prompt", *rest[1:]))
                elif what == "restart":
                    session.restart(seed=rest[1])
                    story.asked.append(("restart", rest[1]))
                elif what == "pause":
                    session.pause()
                else:
                    session.save(file)
                    session.close()
                    stories[[stored for stored, _ in stories].index(session)] = (pool.restore(file), story)
        for session, _ in stories:
            session.close()
    for story in (*ended, *(story for _, story in stories)):
        assert story.gave == story.alone()


def test_nothing_of_an_owner_is_left_for_the_next() -> None:
    """Every byte of a row's state is a marker or NaN when its owner leaves; the next one finds neither."""
    with closing(open_pool(sessions=1, buckets=(1,))) as pool:
        first = pool.open_session(seed=1, prompt=PROMPTS[1])
        for _ in range(4):
            first.run_chunk()
        state = rows_of(pool).device().tensors(0)
        for tensor in state.values():
            tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 77)
        first.close()
        story = Story(2, PROMPTS[2])
        second = pool.open_session(seed=2, prompt=PROMPTS[2])
        for name, tensor in state.items():
            assert not torch.isnan(tensor.float()).any(), name
            assert not (tensor == 77).any(), name
        for _ in range(4):
            story.asked.append(("run",))
            story.gave.append(take(second.run_chunk()))
        assert story.gave == story.alone()


def test_places_that_no_session_fills_touch_the_spare_row_alone() -> None:
    with closing(open_pool()) as pool:
        sessions = [pool.open_session(seed=i, prompt=PROMPTS[0]) for i in range(4)]
        pool.run(sessions)
        live = rows_of(pool).device()
        before = {row: {n: t.clone() for n, t in live.tensors(row).items()} for row in (1, 3)}
        pool.run([sessions[2], sessions[0]])
        pool.run([sessions[0], sessions[2]])
        chunk = pool.run([sessions[2]])[0]
        assert chunk.index == 3
        fifth = pool.open_session(prompt=PROMPTS[1])
        three = pool.run([sessions[0], sessions[2], fifth])  # in a bucket of four
        assert [chunk.index for chunk in three] == [3, 4, 0]
        for row, tensors in before.items():
            for name, tensor in live.tensors(row).items():
                assert torch.equal(tensor, tensors[name]), (row, name)


def test_a_pool_that_is_full_says_so_with_the_numbers_and_harms_nobody() -> None:
    with closing(open_pool()) as pool:
        sessions = [pool.open_session(seed=i, prompt=PROMPTS[0], name=f"user {i}") for i in range(SESSIONS)]
        with pytest.raises(PoolFullError, match=rf"all {SESSIONS} rows .* takes {pool.session_bytes} bytes"):
            pool.open_session(prompt=PROMPTS[0])
        sessions[3].close()
        again = pool.open_session(seed=7, prompt=PROMPTS[1])
        assert pool.free == 0
        story = Story(7, PROMPTS[1], [("run",)], [take(again.run_chunk())])
        assert story.gave == story.alone()


def test_a_row_is_free_again_after_a_session_that_could_not_open() -> None:
    with closing(open_pool()) as pool:
        for wrong in (
            {"prompt": "x", "text": np.zeros((1, 5, 4), np.float32)},
            {},
            {"text": np.zeros((2, 5, 4))},
        ):
            with pytest.raises(UsageError):
                pool.open_session(**wrong)
        with pytest.raises(UsageError, match="image is uint8"):
            pool.open_session(prompt=PROMPTS[0], image=np.zeros((2, 2, 3), np.uint8))
        with pytest.raises(UsageError, match="62 bits"):
            pool.open_session(prompt=PROMPTS[0], seed=1 << 62)
        assert pool.free == SESSIONS


def test_calls_that_cannot_be() -> None:
    with closing(open_pool()) as pool, closing(open_pool()) as other:
        a = pool.open_session(prompt=PROMPTS[0], name="a")
        b = other.open_session(prompt=PROMPTS[0], name="b")
        rest = [pool.open_session(prompt=PROMPTS[0]) for _ in range(4)]
        for sessions in ([], [a, a], [a, *rest]):
            with pytest.raises(UsageError, match="expected 1 to 4 different ones"):
                pool.run(sessions)
        for wrong in (a, [0]):
            with pytest.raises(UsageError, match="expected a list of the pool's sessions"):
                pool.run(wrong)  # type: ignore[arg-type, list-item]
        with pytest.raises(UsageError, match="'b' is another pool's"):
            pool.run([a, b])
        a.close()
        a.close()
        for call in (a.run_chunk, a.pause, a.restart):
            with pytest.raises(SessionClosedError, match="'a' is closed"):
                call()
        b.pause()
        with pytest.raises(SessionClosedError, match="'b' is paused; call resume"):
            b.run_chunk()
        assert other.free == SESSIONS
        b.close()
        with pytest.raises(UsageError, match="not paused"):
            b.resume()
        assert b.closed


def test_a_lease_runs_out_unless_the_session_is_run_or_renewed() -> None:
    now = [0.0]
    with closing(open_pool(clock=lambda: now[0])) as pool:
        a, b, c = (pool.open_session(prompt=PROMPTS[0], name=name, lease_s=lease)
                   for name, lease in (("a", 10.0), ("b", 10.0), ("c", None)))  # fmt: skip
        now[0] = 9.0
        a.run_chunk()
        b.renew()
        now[0] = 18.0
        assert pool.reap() == []
        b.renew()
        now[0] = 20.0
        assert pool.reap() == ["a"]
        assert a.closed
        assert [session.name for session in pool.sessions] == ["b", "c"]
        now[0] = 1e9
        pool.run([c])
        assert b.closed


@pytest.mark.parametrize(
    "lease", ["60", True, 0, -1.0, float("nan"), float("inf"), 10**400, 1j, np.timedelta64(5, "s")]
)
def test_a_lease_that_is_none_is_refused_before_a_row_is_taken(lease: Any, tmp_path: Path) -> None:
    """And what failed has no row: as many sessions open afterwards as there are rows, each with its own."""
    with closing(open_pool()) as pool:
        first = pool.open_session(seed=1, prompt=PROMPTS[1])
        first.save(tmp_path / "kept")
        for begin in (
            lambda: pool.open_session(prompt=PROMPTS[0], lease_s=lease),
            lambda: pool.restore(tmp_path / "kept", lease_s=lease),
        ):
            with pytest.raises(
                UsageError, match=r"lease_s is .*, expected a finite number of seconds above 0"
            ):
                begin()
        gc.collect()
        assert pool.reap() == []
        others = [
            pool.open_session(prompt=PROMPTS[0], lease_s=lease_s)
            for lease_s in (1e9, 60, np.float32(5), None)
        ]
        assert len({session._row for session in (first, *others)}) == SESSIONS
        with pytest.raises(PoolFullError):
            pool.open_session(prompt=PROMPTS[0])


def test_a_paused_sessions_lease_runs_out_and_its_host_memory_comes_back() -> None:
    now = [0.0]
    with closing(open_pool(clock=lambda: now[0])) as pool:
        leased, unleased = (pool.open_session(prompt=PROMPTS[0], name=name, lease_s=lease)
                        for name, lease in (("leased", 10.0), ("unleased", None)))  # fmt: skip
        stored: list[Any] = []
        store = rows_of(pool).store

        def watched(row: int) -> Any:
            state = store(row)
            stored.append(weakref.ref(state.tensors))
            return state

        rows_of(pool).store = watched  # type: ignore[method-assign]
        leased.pause()
        unleased.pause()
        now[0] = 9.0
        leased.renew()
        now[0] = 18.0
        assert pool.reap() == []
        assert [reference() is None for reference in stored] == [False, False]
        now[0] = 19.0
        assert pool.reap() == ["leased"]
        assert leased.closed
        assert not leased.paused
        assert [reference() is None for reference in stored] == [True, False]
        with pytest.raises(UsageError, match="'leased' is not paused; it is closed"):
            leased.resume()
        unleased.resume()
        unleased.run_chunk()


def test_a_session_whose_lease_ran_out_while_paused_does_not_resume() -> None:
    now = [0.0]
    with closing(open_pool(clock=lambda: now[0])) as pool:
        session = pool.open_session(prompt=PROMPTS[0], lease_s=10.0)
        session.pause()
        now[0] = 10.0
        with pytest.raises(UsageError, match="not paused; it is closed"):
            session.resume()
        assert pool.free == SESSIONS


def test_a_session_that_nobody_closed_is_named_and_its_row_is_used_again() -> None:
    with closing(open_pool(sessions=1, buckets=(1,))) as pool:
        lost = pool.open_session(prompt=PROMPTS[0], name="forgotten")
        references = [lost]
        del lost
        with pytest.warns(SessionLeakWarning, match="'forgotten' was never closed"):
            references.clear()
        gc.collect()
        story = Story(4, PROMPTS[2], [("run",)])
        again = pool.open_session(seed=4, prompt=PROMPTS[2])
        story.gave.append(take(again.run_chunk()))
        assert story.gave == story.alone()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again.close()
            del again
            gc.collect()
    pool = open_pool()
    unclosed = pool.open_session(prompt=PROMPTS[0], name="open still")
    with pytest.warns(SessionLeakWarning, match="'open still' was never closed"):
        pool.close()
    assert unclosed.closed
    pool.close()
    with pytest.raises(SessionClosedError):
        pool.open_session(prompt=PROMPTS[0])


def test_a_session_that_is_paused_when_its_pool_closes_can_be_saved_and_not_resumed() -> None:
    pool = open_pool()
    session = pool.open_session(seed=1, prompt=PROMPTS[0])
    session.run_chunk()
    session.pause()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.close()
    with pytest.raises(SessionClosedError):
        session.resume()
    assert session.paused
    saved = b"".join(session.snapshot().blocks())
    session.close()
    assert session.closed
    with closing(open_pool()) as pool, pool.restore(saved) as restored:
        assert restored.run_chunk().index == 1


def test_a_pool_is_closed_also_where_warnings_are_errors() -> None:
    pool = open_pool()
    session = pool.open_session(seed=1, prompt=PROMPTS[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SessionLeakWarning):
            pool.close()
    assert session.closed
    assert rows_of(pool).closed


def test_a_stream_of_a_pooled_session_and_its_latents() -> None:
    with closing(open_pool()) as pool, open_alone(seeds=[5], prompt=PROMPTS[0]) as alone:
        session = pool.open_session(seed=5, prompt=PROMPTS[0])
        for got, wanted in zip(session.stream(chunks=3), alone.stream(chunks=3), strict=True):
            assert np.array_equal(got, wanted)
        for got, wanted in zip(
            session.stream(PROMPTS[2], chunks=2, recache=True),
            alone.stream(PROMPTS[2], chunks=2, recache=True),
            strict=True,
        ):
            assert np.array_equal(got, wanted)


def test_a_batch_session_over_a_pools_artifact() -> None:
    """What `verify` and the command `run` open: as many streams as the largest call."""
    prompts = [*PROMPTS, PROMPTS[0]]
    stories = [Story(i, prompt) for i, prompt in enumerate(prompts)]
    with toy_pool.open_batch(prompt=prompts) as pooled:
        for turn in range(7):
            if turn == 4:
                pooled.restart_row(1, seed=9)
                stories[1].asked.append(("restart", 9))
            chunk = pooled.run_chunk()
            latents, pictures = chunk.to_host(), chunk.video_rows()
            for row, story in enumerate(stories):
                story.asked.append(("run",))
                story.gave.append(latents[row].tobytes() + pictures[row].tobytes())
    for story in stories:
        assert story.gave == story.alone()


def test_a_pool_larger_than_what_is_free_is_refused_before_anything_is_allocated() -> None:
    class Small:
        def free_bytes(self) -> int:
            return 1000

    memory: Any = Small()
    with pytest.raises(
        DeviceMemoryError, match=r"a pool of 5 sessions takes \d+ bytes, about \d+ each; 1000 are free"
    ):
        check_room(pool_manifest(), memory)


def test_snapshots_go_on_in_another_pool(tmp_path: Path) -> None:
    story = Story(3, PROMPTS[0])
    file = tmp_path / "session.safetensors"
    with closing(open_pool()) as pool:
        session = pool.open_session(seed=3, prompt=PROMPTS[0])
        for _ in range(5):
            story.asked.append(("run",))
            story.gave.append(take(session.run_chunk()))
        session.save(file)
    with closing(open_pool(sessions=2, buckets=(1, 2))) as pool:
        other = pool.open_session(seed=1, prompt=PROMPTS[1])
        other.run_chunk()
        again = pool.restore(file)
        for _ in range(4):
            story.asked.append(("run",))
            story.gave.append(take(again.run_chunk()))
    assert story.gave == story.alone()
