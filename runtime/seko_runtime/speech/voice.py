"""A voice for sessions to speak with, as patches of latents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seko_runtime.arguments import shown
from seko_runtime.errors import UsageError
from seko_runtime.speech.prompts import Floats, checked_patches
from seko_runtime.speech.texts import checked_text, joined


@dataclass(frozen=True)
class Voice:
    """A voice, which any sessions may share. `SpeechPool.encode_voice` makes a `Voice` from recordings.

    Parameters
    ----------
    reference : array or None
        The voice to imitate, float32 [n, P, C]: n patches, each of P latents and C channels.
    continued : array or None
        A recording that the spoken text continues, float32 [n, P, C]: n patches.
    text : str
        The words that are spoken in ``continued``.

    Raises
    ------
    UsageError
        If an array has another shape, dtype, or numbers that are not finite; if ``text`` is no text, or only one of
        ``continued`` and ``text`` is given.
    """

    reference: Floats | None = None
    continued: Floats | None = None
    text: str = ""

    def __post_init__(self) -> None:
        for name in ("reference", "continued"):
            patches = getattr(self, name)
            if patches is not None:
                object.__setattr__(self, name, checked_patches(patches, name))
        check_words(self.continued, self.text)

    def then(self, text: str, patches: Floats) -> Voice:
        """Return the voice that goes on after it has said a text, as patches [n, P, C]."""
        before = () if self.continued is None else (self.continued,)
        return Voice(self.reference, np.concatenate((*before, patches)), joined(self.text, text))


def check_voice(voice: object, patch_shape: tuple[int, int]) -> None:
    """Raise a UsageError if an argument is no voice, or one of a model with other patches than [P, C]."""
    if not isinstance(voice, Voice):
        raise UsageError(f"voice is {shown(voice)}, expected a Voice of encode_voice()")
    for name in ("reference", "continued"):
        patches = getattr(voice, name)
        if patches is not None and patches.shape[1:] != patch_shape:
            raise UsageError(
                f"voice.{name} has patches of shape {list(patches.shape)}, expected [n, {patch_shape[0]}, "
                f"{patch_shape[1]}]: a voice belongs to the model that encoded it"
            )


def check_words(continued: object, text: object) -> None:
    """Raise a UsageError unless a recording to continue and its words are both given, or neither."""
    if (continued is not None) != bool(checked_text(text, "the voice's text")):
        sound = "no sound" if continued is None else "sound"
        raise UsageError(
            f"a voice that goes on has {sound} and the words {shown(text)}: give both or neither"
        )


NO_VOICE = Voice()  # the model chooses one
