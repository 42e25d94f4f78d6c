"""Calls of speech that fail end the texts of the sessions they carried, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from seko_runtime.errors import (
    EngineRunError,
    TornStreamError,
)
from tests.speech.texts import said_alone, same
from tests.speech.toy_speech import open_pool


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
