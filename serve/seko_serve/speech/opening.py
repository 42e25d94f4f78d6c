"""The conditions with which a speech session begins, and their parser."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.speech.manifest import MAX_GUIDANCE, MAX_TEMPERATURE, SpeechManifest
from seko_runtime.speech.prompts import prompt_tokens
from seko_runtime.speech.texts import checked_text
from seko_runtime.speech.voice import NO_VOICE, Voice
from seko_serve.errors import ServeError
from seko_serve.http.openings import check_opening
from seko_serve.media import uploads
from seko_serve.protocol import MAX_PROMPT_LETTERS, whole_seed

FIELDS = ("model", "seed", "guidance", "temperature", "voice", "voice_text", "reference")


@dataclass(frozen=True)
class SpeechOpening:
    """The conditions with which a speech session begins, checked.

    Parameters
    ----------
    seed : int
        Seed of the random noise.
    guidance, temperature : float, optional
        Strength of classifier-free guidance and standard deviation of the noise; default: the artifact's settings. See
        `SpeechPool.open_session`.
    voice : numpy.ndarray, optional
        The voice to imitate: samples [N] float32 in -1..1, at the rate of the artifact's voice encoder.
    voice_text : str
        The words that are spoken in ``voice``, if the speech continues this recording; otherwise empty.
    reference : numpy.ndarray, optional
        The voice to imitate while ``voice`` is continued, as samples like those.
    encoded : Voice
        A voice that was encoded before, instead of ``voice``.
    """

    seed: int = 0
    guidance: float | None = None
    temperature: float | None = None
    voice: NDArray[np.float32] | None = None
    voice_text: str = ""
    reference: NDArray[np.float32] | None = None
    encoded: Voice = NO_VOICE

    def recordings(self) -> dict[str, NDArray[np.float32] | None]:
        """Return the recordings by the names of `SpeechPool.encode_voice`, or None for each that is not there."""
        if self.voice_text:
            return {"reference": self.reference, "continued": self.voice}
        return {"reference": self.voice, "continued": None}

    def voice_patches(self, manifest: SpeechManifest) -> dict[str, int]:
        """Return how many patches each of the `recordings` has when it is encoded; 0 for one that is not there."""
        if self.encoded is not NO_VOICE:
            encoded = {"reference": self.encoded.reference, "continued": self.encoded.continued}
            return {name: 0 if patches is None else len(patches) for name, patches in encoded.items()}
        size = manifest.workload.voice.patch_samples
        return {
            name: 0 if samples is None else -(-len(samples) // size)
            for name, samples in self.recordings().items()
        }


def speech_opening_of(
    table: dict[str, Any], manifest: SpeechManifest, sound: str = "voice", words: str = "voice_text"
) -> SpeechOpening:
    """Return the opening of a session of a speech artifact from a request; see `ServedWorkload.opening_of`. ``voice``
    may be a `Voice`, which was encoded before. Messages of errors call the fields ``voice`` and ``voice_text`` by the
    names ``sound`` and ``words``."""
    kept = table.get("voice")
    if isinstance(kept, Voice):
        if {"voice_text", "reference"} & table.keys():
            raise ServeError("bad_request", f"a kept voice has its words: leave {words} and reference out")
        others = {name: value for name, value in table.items() if name != "voice"}
        return replace(speech_opening_of(others, manifest), encoded=kept, voice_text=kept.text)
    check_opening(table, FIELDS, manifest.name)
    seed, text, voice = (
        whole_seed(table.get("seed", 0), "seed"),
        table.get("voice_text", ""),
        table.get("voice"),
    )
    if seed < 0:
        raise ServeError("bad_request", f"seed is {seed}, expected 0 or more for speech")
    if not isinstance(text, str):
        raise ServeError("bad_request", f"{words} is no text, expected the words that {sound} says")
    if len(text) > MAX_PROMPT_LETTERS:
        raise ServeError(
            "too_large", f"{words} has {len(text)} letters, at most {MAX_PROMPT_LETTERS} are taken"
        )
    try:
        checked_text(text, words)
    except UsageError as error:
        raise ServeError("bad_request", str(error)) from None
    if text and voice is None:
        raise ServeError("bad_request", f"{words} has the words that {sound} says, but {sound} is missing")
    if "reference" in table and not text:
        raise ServeError(
            "bad_request", f"reference stands beside {sound} with {words}; a voice to imitate is {sound}"
        )
    return SpeechOpening(
        seed,
        _between(table.get("guidance"), "guidance", MAX_GUIDANCE),
        _between(table.get("temperature"), "temperature", MAX_TEMPERATURE),
        _sound(voice, sound, manifest, continued=bool(text)),
        text,
        _sound(table.get("reference"), "reference", manifest, continued=False),
    )


def _sound(
    upload: object, name: str, manifest: SpeechManifest, *, continued: bool
) -> NDArray[np.float32] | None:
    """Return the samples of an uploaded recording; None for none."""
    if upload is None:
        return None
    return uploads.decoded_sound(
        uploads.data_of(upload, name, uploads.MAX_SOUND_BYTES),
        name,
        rate=manifest.workload.voice.sample_rate,
        max_s=_voice_seconds(manifest, continued),
    )


def _voice_seconds(manifest: SpeechManifest, continued: bool) -> float:
    """Return the length in seconds of the longest voice that leaves a session's positions a word and a patch of it.

    Known from the manifest alone, so a voice that no text could follow is refused before it is decoded as a whole.
    """
    spec = manifest.workload.voice
    least = prompt_tokens(1) if continued else prompt_tokens(1, reference=1) - 1
    patches = max(0, manifest.session_positions - least - 1)
    return min(float(uploads.MAX_VOICE_S), patches * spec.patch_samples / spec.sample_rate)


def _between(value: object, name: str, most: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ServeError("bad_request", f"{name} is no number from 0 to {most:g}")
    return float(value)
