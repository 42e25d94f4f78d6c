"""A pool's calls: how many launches one takes, what a failed one leaves, which bucket a rebuilt cache goes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from seko_runtime.errors import EngineRunError, TornStreamError
from seko_runtime.video.chunk_programs import variant_starts
from seko_runtime.video.pool import Session
from tests.support.rows import rows_of

from . import toy, toy_pool
from .order_watch import FakeMemory, World
from .pool_stories import FILL_CHUNKS, PROMPTS, Story, closing, take
from .toy_pool import open_pool, pool_manifest


class Failing:
    """Engines that fail in their n-th call from now on, counted together, after it has run."""

    def __init__(self, *names: str) -> None:
        real = toy_pool.pool_engines()
        self.engines = {name: partial(self._call, real[name]) for name in names}
        self.calls_left = -1

    def _call(self, real: Callable[[list[Any]], list[Any]], inputs: list[Any]) -> list[Any]:
        out = real(inputs)
        self.calls_left -= 1
        if self.calls_left == 0:
            raise RuntimeError("planted")
        return out


def test_the_chunks_with_which_a_variant_begins_follow_from_the_manifest() -> None:
    with closing(open_pool()) as pool:
        session = pool.open_session(seed=0, prompt=PROMPTS[0])
        variants = []
        for _ in range(FILL_CHUNKS + 3):
            variants += rows_of(pool).variants([0])
            session.run_chunk()
        changes = [chunk for chunk in range(1, len(variants)) if variants[chunk] != variants[chunk - 1]]
        assert changes == list(variant_starts(pool.manifest))
    manifest = pool_manifest()
    masked = replace(
        manifest, programs={name: calls for name, calls in manifest.programs.items() if "_full" not in name}
    )
    assert variant_starts(masked) == ()
    schedule = replace(manifest.workload.schedule, first_timesteps=(1000.0,), first_sigmas=(1.0,))
    apart = replace(masked, workload=replace(masked.workload, schedule=schedule))
    assert variant_starts(apart) == (1,)
    assert variant_starts(replace(apart, pool=None)) == ()


@pytest.mark.parametrize(
    ("engines", "call"),
    [
        (("begin.2",), 1),
        *(
            (names, call)
            for names in (("step.2", "step_full.2"), ("store.2",), ("copy.2",), ("vae_decode",))
            for call in (1, 2)
        ),
    ],
)
def test_a_chunk_that_fails_leaves_its_sessions_at_the_chunk_before(
    engines: tuple[str, ...], call: int
) -> None:
    failing = Failing(*engines)
    with closing(open_pool(engines=failing.engines)) as pool:
        a, b, c = (pool.open_session(seed=i, prompt=PROMPTS[i]) for i in range(3))
        stories = [Story(i, PROMPTS[i]) for i in range(3)]
        for turn in range(6):
            if turn in (1, 4):
                failing.calls_left = call
                with pytest.raises(EngineRunError, match="planted"):
                    pool.run([a, b])
                failing.calls_left = -1
                other = pool.run([c])  # whom it does not touch
                stories[2].asked.append(("run",))
                stories[2].gave.append(take(other[0]))
            for story, chunk in zip(stories, pool.run([a, b]), strict=False):
                story.asked.append(("run",))
                story.gave.append(take(chunk))
        for story in stories:
            assert story.gave == story.alone()


@pytest.mark.parametrize(("place", "torn"), [("begin.1", False), ("step.1", False), ("vae_decode", True)])
def test_ctrl_c_in_a_chunk_gives_the_same_bytes_again_or_a_named_error(place: str, torn: bool) -> None:
    """While the frames are decoded and counted nobody knows how far the caches have moved: the stream begins anew."""
    real, presses = toy_pool.pool_engines()[place], [False]

    def pressed(inputs: list[Any]) -> list[Any]:
        if presses[0]:
            presses[0] = False
            raise KeyboardInterrupt
        return list(real(inputs))

    with closing(open_pool(engines={place: pressed})) as pool:
        stories = [Story(i, PROMPTS[i]) for i in range(2)]
        sessions = [pool.open_session(seed=i, prompt=PROMPTS[i]) for i in range(2)]

        def run(at: int) -> None:
            chunk = sessions[at].run_chunk()
            stories[at].asked.append(("run",))
            stories[at].gave.append(take(chunk))

        run(0)
        run(1)
        presses[0] = True
        with pytest.raises(KeyboardInterrupt):
            run(0)
        if torn:
            for use in (sessions[0].run_chunk, sessions[0].pause, lambda: pool.run(sessions)):
                with pytest.raises(TornStreamError, match="it is not known where it stands; restart it"):
                    use()
            sessions[0].restart(seed=5)
            stories[0].asked.append(("restart", 5))
        for _ in range(FILL_CHUNKS):
            run(0)
            run(1)
        for story in stories:
            assert story.gave == story.alone()


@pytest.mark.parametrize(
    ("engine", "call"),
    [
        *(("begin.2", call) for call in (1, 2)),  # the noise of each launch
        *((f"step{full}.2", call) for full in ("", "_full") for call in (1, toy.LAYERS * (toy.PASSES + 1))),
        *(("store.2", call) for call in range(1, 2 * toy.PASSES + 1)),
        *(("vae_decode", call) for call in (1, 2)),  # when both launches are done
    ],
)
def test_a_call_of_two_launches_fails_as_one(engine: str, call: int) -> None:
    """In whichever launch: neither the full row nor the filling one has moved on, nor has anybody's state."""
    failing = Failing(engine)
    with closing(open_pool(engines=failing.engines)) as pool:
        stories = [Story(i, PROMPTS[i]) for i in range(2)]

        def run(*chosen: int) -> None:
            for index, chunk in zip(chosen, pool.run([sessions[index] for index in chosen]), strict=True):
                stories[index].asked.append(("run",))
                stories[index].gave.append(take(chunk))

        sessions = [pool.open_session(seed=i, prompt=PROMPTS[i]) for i in range(2)]
        for _ in range(FILL_CHUNKS):
            run(1)
        run(0)
        failing.calls_left = call
        with pytest.raises(EngineRunError, match="planted"):
            run(0, 1)
        failing.calls_left = -1
        assert [rows_of(pool).streams.clocks.chunks_made(session._running_row()) for session in sessions] == [
            1,
            FILL_CHUNKS,
        ]
        run(1)  # each goes on as if nothing had been, alone and together
        run(0, 1)
        sessions[0].set_prompt(PROMPTS[2], recache=True)
        stories[0].asked.append(("prompt", PROMPTS[2], True))
        run(1, 0)
        for story in stories:
            assert story.gave == story.alone()


def test_a_call_is_a_launch_for_each_kind_of_rows_in_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions that fill, that are full, or both; the host allocates nothing for it and waits for nothing."""
    memory = FakeMemory(world)
    with closing(open_pool(memory=memory)) as pool:
        a, b, c, d, e = (pool.open_session(seed=i, prompt=PROMPTS[0]) for i in range(5))

        def launches(*sessions: Session) -> int:
            before = pool.stats.graph_launches
            pool.run(sessions)
            return pool.stats.graph_launches - before

        captured, waits = pool.stats.captured_graphs, world.device_waits
        monkeypatch.setattr(memory, "allocate", None)
        assert [launches(a, b) for _ in range(FILL_CHUNKS + 1)] == [1] * (FILL_CHUNKS + 1)
        assert launches(c, d, e) == 1  # in a bucket of four, as all that follows
        assert launches(a, b, c) == 2
        assert launches(a, b, c) == 1  # c is full now, and the place that nobody fills is of no kind
        assert launches(d, c, e, a) == 2
        assert launches(d, c, e, a) == 1
        c.restart()
        assert launches(d, c, e, a) == 2
        assert launches(c) == 1
        assert (pool.stats.captured_graphs, world.device_waits) == (captured, waits)
        assert pool.stats.graph_launches == pool.stats.chunks + 3


@pytest.mark.parametrize("full", [False, True])
def test_a_cache_is_rebuilt_in_a_bucket_that_depends_on_no_other_row(full: bool) -> None:
    """Buckets round otherwise here. One row's rebuilding failed, or both rows': the next call makes up for it."""
    real = toy_pool.pool_engines()

    def rounds_otherwise(inputs: list[Any], name: str) -> list[Any]:
        return [real[name](inputs)[0] * (1 - 2.0**-9)]

    two = {name: partial(rounds_otherwise, name=name) for name in ("step.2", "step_full.2")}
    gave = []
    for both in (False, True):
        failing = Failing("step.1")
        with closing(open_pool(engines={**two, **failing.engines})) as pool:
            pair = [pool.open_session(seed=i, prompt=PROMPTS[i]) for i in range(2)]
            for _ in range(FILL_CHUNKS if full else 1):
                pool.run(pair)
            for session in pair[: 1 + both]:
                failing.calls_left = 1
                with pytest.raises(EngineRunError, match="planted"):
                    session.set_prompt(PROMPTS[2], recache=True)
                failing.calls_left = -1
            gave.append([take(pool.run(pair)[0]) for _ in range(3)])
    assert gave[0] == gave[1]


def test_what_reads_the_fill_on_the_device_is_one_launch(world: World) -> None:
    """Without engines for full rows there is one kind of rows."""
    base = pool_manifest()
    programs = {name: calls for name, calls in base.programs.items() if "_full" not in name}
    with closing(open_pool(memory=FakeMemory(world), manifest=replace(base, programs=programs))) as pool:
        old, new = (pool.open_session(seed=i, prompt=PROMPTS[0]) for i in range(2))
        for _ in range(FILL_CHUNKS):
            old.run_chunk()
        before = pool.stats.graph_launches
        pool.run([old, new])
        assert pool.stats.graph_launches == before + 1


def test_what_a_failed_call_has_decoded_is_not_decoded_as_another_chunk(tmp_path: Path) -> None:
    """The VAE's caches of the first row are a chunk ahead: it goes on with that chunk, or anew, and nowhere else."""
    failing, story = Failing("vae_decode"), Story(0, PROMPTS[0])
    with closing(open_pool(engines=failing.engines)) as pool:
        a, b = (pool.open_session(seed=i, prompt=PROMPTS[i]) for i in range(2))
        story.gave.append(take(pool.run([a, b])[0]))
        failing.calls_left = 2
        with pytest.raises(EngineRunError, match="planted"):
            pool.run([a, b])
        failing.calls_left = -1
        a.set_prompt(PROMPTS[2])
        for use in (a.pause, lambda: a.save(tmp_path / "a"), a.run_chunk):
            with pytest.raises(TornStreamError, match="make the same chunk again, or restart it"):
                use()
        a.set_prompt(PROMPTS[0])
        story.gave.append(take(a.run_chunk()))
        a.pause()
        a.resume()
        story.gave.append(take(a.run_chunk()))
    story.asked = [("run",)] * 3
    assert story.gave == story.alone()
