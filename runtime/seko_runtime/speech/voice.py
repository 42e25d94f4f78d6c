"""A voice to speak with, as patches of latents."""

from __future__ import annotations

from dataclasses import dataclass

from seko_runtime.speech.prompts import Floats


@dataclass(frozen=True)
class Voice:
    """A voice, which any sessions may share. `SpeechPool.encode_voice` makes a voice from recordings.

    Parameters
    ----------
    reference : array or None
        [n, P, C] float32: n patches, each of P latents and C channels, of the voice to imitate.
    continued : array or None
        [n, P, C] float32: n patches of a recording, which the spoken text continues.
    text : str
        The words of ``continued``.
    """

    reference: Floats | None = None
    continued: Floats | None = None
    text: str = ""


NO_VOICE = Voice()  # the model chooses one
