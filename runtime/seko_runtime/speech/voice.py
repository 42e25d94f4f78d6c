"""A voice to speak with, as patches of latents."""

from __future__ import annotations

from dataclasses import dataclass

from seko_runtime.speech.prompts import Floats


@dataclass(frozen=True)
class Voice:
    """A voice; any sessions may share it. `SpeechPool.encode_voice` makes one of sound.

    Parameters
    ----------
    reference : array or None
        [n, P, C] float32: the voice to sound like.
    continued : array or None
        [n, P, C] float32: the voice that goes on; what is spoken follows it.
    text : str
        The words of ``continued``.
    """

    reference: Floats | None = None
    continued: Floats | None = None
    text: str = ""


NO_VOICE = Voice()  # the model chooses one
