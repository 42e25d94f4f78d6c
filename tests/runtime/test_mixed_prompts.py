"""A prompt with a weight is mixed with the one before, as embeddings, and fades end at the new prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from seko_runtime import Session
from seko_runtime.arguments import as_array
from seko_runtime.errors import UsageError
from tests.support.tolerances import STREAM

from . import toy_pool, toy_whole

OLD, NEW = "a b", "c a"


def embedded(prompt: str) -> np.ndarray:
    """The text embeddings of a prompt [1, tokens, dim], by the toy's own encoder."""
    ids = torch.as_tensor(np.asarray(toy_whole.WordIds().ids(prompt)))
    table = toy_whole.whole_weights()["text.table"]
    return np.asarray(toy_whole.TextEncoder()(ids, torch.as_tensor(table)))


@contextmanager
def two(**options: str) -> Iterator[tuple[Session, Session]]:
    """Two sessions of one seed and prompt."""
    with toy_pool.open_pool() as pool:
        opened = [pool.open_session(seed=3, prompt=OLD, **options) for _ in range(2)]  # type: ignore[arg-type]
        with opened[0], opened[1]:
            yield opened[0], opened[1]


def latents(session: Session) -> np.ndarray:
    return as_array(session.run_chunk().latents, "latents").copy()


def test_a_weight_is_the_share_of_the_new_text() -> None:
    with two() as (mixed, told):
        for share in (0.25, 0.5):
            mixed.set_prompt(NEW, weight=share)
        told.set_text(0.75 * 0.5 * embedded(OLD) + (1 - 0.75 * 0.5) * embedded(NEW))
        assert np.allclose(latents(mixed), latents(told), atol=STREAM[torch.float32])


def test_a_fade_goes_evenly_and_ends_at_the_new_prompt() -> None:
    with two() as (faded, told):
        for step in range(1, 5):
            faded.set_prompt(NEW, weight=1 / (5 - step))
            told.set_text((1 - step / 4) * embedded(OLD) + step / 4 * embedded(NEW))
            assert np.allclose(latents(faded), latents(told), atol=STREAM[torch.float32])
        told.set_prompt(NEW)
        assert np.allclose(latents(faded), latents(told), atol=STREAM[torch.float32])


def test_who_sets_the_same_prompt_later_gets_it_unmixed() -> None:
    with two(tenant="one") as (first, later):
        first.set_prompt(NEW, weight=0.5)
        later.set_prompt(NEW)
        made = latents(later)
    with toy_pool.open_pool() as pool, pool.open_session(seed=3, prompt=NEW) as alone:
        assert np.array_equal(made, latents(alone))


def test_a_recording_has_the_weight_and_none_begins_with_a_mixture() -> None:
    with toy_pool.open_pool() as pool, pool.open_session(seed=3, prompt=OLD) as session:
        recording = session.record()
        session.set_prompt(NEW, weight=0.5)
        made = latents(session)
        session.restart()
        with pytest.raises(UsageError, match="mixed"):
            session.record()
        entries = recording.entries
    with toy_pool.open_pool() as pool, pool.open_session(**entries[0].opening) as again:
        for entry in entries[:2]:
            again.replay(entry)
        assert np.array_equal(made, latents(again))


@pytest.mark.parametrize("weight", [0, -0.5, 1.5, float("nan"), "half"])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with toy_pool.open_pool() as pool, pool.open_session(seed=3, prompt=OLD) as session:
        with pytest.raises(UsageError, match="weight"):
            session.set_prompt(NEW, weight=weight)
        made = latents(session)
    with toy_pool.open_pool() as pool, pool.open_session(seed=3, prompt=OLD) as alone:
        assert np.array_equal(made, latents(alone))
