"""Texts and voices that the tests of sessions speak, and what a session says of them alone. No tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from seko_runtime.speech.prompts import Floats, assemble
from seko_runtime.speech.voice import NO_VOICE, Voice
from tests.speech.toy_speech import MARKS, C, P, Tokens, all_alone, alone, manifest

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


def said_in_turn(
    sentences: Sequence[str], voice: Voice = NO_VOICE, positions: int = 18, **settings: Any
) -> list[Floats]:
    """What a session of so many positions says of a text with these sentences, each in the voice of the one before."""
    sounds: list[Floats] = []
    before: Voice | None = None  # which ends with the last sentence that the model ended
    last = ""
    for sentence in sentences:
        plain = assemble(
            Tokens().ids(voice.text + sentence),
            (P, C),
            reference=voice.reference,
            continued=voice.continued,
            marks=MARKS,
        )
        limit, prompt = LIMITS.patches(len(sentence)), plain
        if before is not None:
            ids = Tokens().ids(f"{before.text} {sentence}")
            longer = assemble(
                ids, (P, C), reference=before.reference, continued=before.continued, marks=MARKS
            )
            prompt = longer if len(longer.ids) + limit <= positions else plain
        said, ended = all_alone(prompt, min(limit, positions - len(prompt.ids)), **settings)
        sounds += [sound for sound, _ in said]
        if ended:
            own = () if voice.continued is None else (voice.continued,)
            last = f"{voice.text} {sentence}".strip()
            before = Voice(
                voice.reference, np.concatenate((*own, np.stack([patch for _, patch in said]))), last
            )
    return sounds


def same(patches: Sequence[Floats], wanted: Sequence[Floats]) -> None:
    """The same bits."""
    assert [patch.tobytes() for patch in patches] == [patch.tobytes() for patch in wanted]
