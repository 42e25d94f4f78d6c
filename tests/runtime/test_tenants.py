"""What one tenant of a pool learns of another: no name, no prompt, and not by the prompt cache either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seko_runtime.errors import PoolFullError, SnapshotError, UsageError
from seko_runtime.video.pool import Pool
from seko_runtime.video.prompts import PromptCache, PromptKey
from seko_runtime.video.text import MAX_PROMPT_LETTERS
from tests.support.rows import rows_of

from . import toy_whole
from .pool_stories import PROMPTS, Story, closing, take
from .toy_pool import SESSIONS, open_pool


class CountedText:
    """The toy's text engine, which a prompt that the cache holds goes without."""

    def __init__(self) -> None:
        self.calls = 0
        self._run = toy_whole.eager_engines()["text"]

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.calls += 1
        return self._run(inputs)


def counts(pool: Pool) -> tuple[int, int]:
    return pool.stats.prompt_cache_hits, pool.stats.prompt_cache_misses


def test_a_full_pool_names_nobody() -> None:
    with closing(open_pool()) as pool:
        names = [f"customer-{number}" for number in range(SESSIONS)]
        sessions = [pool.open_session(prompt=PROMPTS[0], name=name, tenant=f"of {name}") for name in names]
        with pytest.raises(
            PoolFullError, match=f"all {SESSIONS} rows of the pool are taken; a session takes"
        ) as full:
            pool.open_session(prompt=PROMPTS[0])
        assert "customer" not in str(full.value)
        assert len(sessions) == SESSIONS


def test_sessions_without_a_tenant_find_their_own_prompts_alone() -> None:
    text = CountedText()
    with closing(open_pool(engines={"text": text})) as pool:
        a, b = (pool.open_session(seed=seed, prompt=PROMPTS[0]) for seed in (1, 2))
        assert text.calls == 2
        b.set_prompt(PROMPTS[1])
        a.set_prompt(PROMPTS[1])
        assert (text.calls, counts(pool)) == (4, (0, 4))
        a.set_prompt(PROMPTS[0])
        b.set_prompt(PROMPTS[0])
        assert (text.calls, counts(pool)) == (4, (2, 4))


@pytest.mark.parametrize("leave", ["close", "pause"])
def test_the_next_owner_of_a_row_does_not_find_the_last_ones_prompts(leave: str) -> None:
    text = CountedText()
    with closing(open_pool(sessions=1, buckets=(1,), engines={"text": text})) as pool:
        first = pool.open_session(prompt=PROMPTS[0])
        getattr(first, leave)()
        second = pool.open_session(prompt=PROMPTS[0])
        assert (text.calls, counts(pool)) == (2, (0, 2))
        second.close()


def test_sessions_of_one_tenant_share_prompts_and_those_of_two_do_not(tmp_path: Path) -> None:
    text, file = CountedText(), tmp_path / "session"
    with closing(open_pool(engines={"text": text})) as pool:
        a, b = (pool.open_session(prompt=PROMPTS[0], tenant="ada") for _ in range(2))
        assert (text.calls, a.tenant, b.tenant) == (1, "ada", "ada")
        c = pool.open_session(prompt=PROMPTS[0], tenant="bob")
        assert text.calls == 2
        d = pool.open_session(prompt=PROMPTS[0], tenant="row 0")  # row 0 is ada's, and "row 0" not its name
        assert text.calls == 3
        a.save(file)
        for session in (a, b, d):
            session.close()
        b = pool.open_session(prompt=PROMPTS[0], tenant="ada")  # what a tenant shared stays when sessions end
        assert text.calls == 3
        b.pause()
        b.resume()
        b.set_prompt(PROMPTS[0])
        assert text.calls == 3
        again = pool.restore(file, tenant="ada")
        again.set_prompt(PROMPTS[0])
        assert (text.calls, again.tenant) == (3, "ada")
        c.save(file)
        c.close()
        c = pool.restore(file, tenant="bob")
        c.set_prompt(PROMPTS[0])
        assert (text.calls, c.tenant) == (3, "bob")
        c.close()


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_a_snapshot_is_restored_for_its_own_tenant_alone(tmp_path: Path, key: bytes | None) -> None:
    """Whoever can copy a file over another one would else see the frames of its owner."""
    with closing(open_pool(snapshot_key=key)) as pool:
        for name, tenant in (("ada", "ada"), ("bob", "bob"), ("nobody", None), ("odd", "\ud800")):
            with pool.open_session(prompt=PROMPTS[0], tenant=tenant) as session:
                session.save(tmp_path / name)
            for other in ("ada", "bob", None, "nobody", "x" * 100_000):
                if other == tenant:
                    pool.restore(tmp_path / name, tenant=other).close()
                    continue
                with pytest.raises(
                    SnapshotError, match=f"^{name} is of another tenant: restore it with the tenant="
                ):
                    pool.restore(tmp_path / name, tenant=other)
            assert pool.free == pool.capacity


def test_a_prompt_of_the_cache_gives_the_bytes_of_one_that_is_encoded() -> None:
    with closing(open_pool()) as pool:
        stories = [Story(seed, PROMPTS[0]) for seed in range(3)]
        for story, tenant in zip(stories, ("ada", "ada", None), strict=True):
            session = pool.open_session(seed=story.seed, prompt=story.prompt, tenant=tenant)
            for _ in range(3):
                story.asked.append(("run",))
                story.gave.append(take(session.run_chunk()))
            assert story.gave == story.alone()
            session.close()
        assert counts(pool) == (1, 2)


def test_many_prompts_of_one_owner_do_not_push_out_anothers_few() -> None:
    cache = PromptCache(4)
    few = [PromptKey("bob", prompt) for prompt in ("1", "2")]
    for key in few:
        cache.put(key, [key])
    many = [PromptKey("ada", str(number)) for number in range(50)]
    for key in many:
        cache.put(key, [key])
    assert [cache.get(key) for key in few] == [[key] for key in few]
    assert [key for key in many if cache.get(key) is not None] == many[-2:]
    cache.forget("ada")
    assert len(cache) == 2


def test_prompts_of_a_session_that_ended_take_no_place() -> None:
    """They are nobody's: nobody could find them."""
    with closing(open_pool()) as pool:
        prompts = rows_of(pool)._prompts
        assert prompts is not None
        session = pool.open_session(prompt=PROMPTS[0])
        session.set_prompt(PROMPTS[1])
        session_of_ada = pool.open_session(prompt=PROMPTS[0], tenant="ada")
        assert len(prompts.cache) == 3
        session.close()
        session_of_ada.close()
        assert len(prompts.cache) == 1


@pytest.mark.parametrize("tenant", ["", 3, b"ada", ["ada"]])
def test_what_is_no_tenant_is_refused(tmp_path: Path, tenant: Any) -> None:
    with closing(open_pool()) as pool:
        session = pool.open_session(prompt=PROMPTS[0])
        session.save(tmp_path / "session")
        for opened in (
            lambda: pool.open_session(prompt=PROMPTS[0], tenant=tenant),
            lambda: pool.restore(tmp_path / "session", tenant=tenant),
        ):
            with pytest.raises(
                UsageError, match=r"tenant is .*, expected a name, or None for a session that shares"
            ):
                opened()
        assert pool.free == SESSIONS - 1


SECRET = "whistleblower"
WRONG: dict[str, Any] = {
    "long": SECRET * (MAX_PROMPT_LETTERS // len(SECRET) + 1),
    "surrogate": f"{SECRET} \ud800",
    "bytes": SECRET.encode(),
    "list": [SECRET],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_no_error_quotes_a_prompt(wrong: str) -> None:
    prompt = WRONG[wrong]
    with closing(open_pool()) as pool, toy_whole.open_whole(2) as alone:
        session = pool.open_session(prompt=PROMPTS[0])
        calls: list[Callable[[], object]] = [
            lambda: alone.set_prompt([PROMPTS[0], prompt]),
            lambda: session.set_prompt([prompt]),  # type: ignore[arg-type] # what a caller gets wrong
            lambda: pool.open_session(prompt=[prompt]),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(UsageError, match="prompt") as caught:
                call()
            assert SECRET[:6] not in str(caught.value)
