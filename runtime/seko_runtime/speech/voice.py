"""A voice for sessions to speak with, as patches of latents."""

from __future__ import annotations

from dataclasses import dataclass

from seko_runtime.speech.prompts import Floats


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
    """

    reference: Floats | None = None
    continued: Floats | None = None
    text: str = ""


NO_VOICE = Voice()  # the model chooses one
