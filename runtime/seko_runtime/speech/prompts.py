"""Prompts of speech: text and voices as one sequence of tokens, some of which are patches of latents.

A patch of sound is a few latents [P, C]. In shapes, T is the number of tokens. There are four kinds of prompts.

- A prompt of text alone is the text and the start token.
- A prompt with a reference voice is the reference start, the reference patches, the reference end, the text and the
  start token.
- A prompt that continues a voice is the text of the voice, the text, the start token, and the patches of the voice.
- A prompt with a reference voice that also continues a voice is the reference start, the reference patches, the
  reference end, the text of the voice, the text, the start token, and the patches of the voice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import shown
from seko_runtime.errors import UsageError

_CONTEXT = 3  # patches of a voice that the decoder hears before the first new one
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class SpeechMarks:
    """Token ids that separate the parts of a prompt.

    Parameters
    ----------
    audio_start : int
        Between a text and its patches.
    reference_start, reference_end : int
        Around the patches of a reference voice.
    """

    audio_start: int = 101
    reference_start: int = 103
    reference_end: int = 104


@dataclass(frozen=True)
class SpeechPrompt:
    """The prompt of a text, as arrays: its tokens, some of which are patches of a voice.

    Parameters
    ----------
    ids : array
        Token ids, int64 [T]; 0 where a token is a patch.
    is_audio : array
        Whether each token is a patch, bool [T].
    patches : array
        Patches of the voice, float32 [T, P, C]; zeros where a token is text.
    """

    ids: NDArray[np.int64]
    is_audio: NDArray[np.bool_]
    patches: Floats

    @property
    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.bool_], Floats]:
        """The prompt's arrays ``ids``, ``is_audio`` and ``patches``, by name."""
        return self.ids, self.is_audio, self.patches

    def split(self, tokens: int) -> tuple[SpeechPrompt, SpeechPrompt]:
        """Return two prompts: the first ``tokens`` tokens of the prompt, and the rest."""
        return (
            SpeechPrompt(*(array[:tokens] for array in self.arrays)),  # type: ignore[arg-type]
            SpeechPrompt(*(array[tokens:] for array in self.arrays)),  # type: ignore[arg-type]
        )

    @property
    def context(self) -> Floats:
        """The last patches [n, P, C] of the continued voice; n is 0 if the prompt continues no voice. Before a text the
        decoder runs over the patches of its context, whose samples are not used.
        """
        if not len(self.is_audio) or not self.is_audio[-1]:
            return self.patches[:0]
        return self.patches[self.is_audio][-_CONTEXT:]


def check_room(tokens: int, positions: int, most: int) -> None:
    """Raise a UsageError if a session with so many positions has no room for a prompt of ``tokens`` tokens and one
    patch; a session of the artifact has at most ``most`` positions."""
    if tokens >= positions:
        raise UsageError(
            f"the text and its voice have {tokens} tokens, the session has {positions} positions, also for the patches "
            f"to come: speak shorter texts, or open it with more positions; this artifact has {most} at most"
        )


def checked_prompt(prompt: object, patch_shape: tuple[int, int], vocabulary: int) -> SpeechPrompt:
    """Return a caller's prompt with the dtypes of `SpeechPrompt`.

    Raises
    ------
    UsageError
        If it is no `SpeechPrompt`, has no token, arrays of different lengths or other shapes and dtypes, a token id
        outside the vocabulary, or latents that are not finite.
    """
    if not isinstance(prompt, SpeechPrompt):
        raise UsageError(f"prompt is {shown(prompt)}, expected a SpeechPrompt")
    ids = _checked_ids(prompt.ids, "prompt.ids")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise UsageError(
            f"prompt.ids are {ids.min()} to {ids.max()}, expected token ids from 0 to {vocabulary - 1}"
        )
    is_audio = prompt.is_audio
    if not isinstance(is_audio, np.ndarray) or is_audio.dtype != bool or is_audio.shape != ids.shape:
        raise UsageError(f"prompt.is_audio is {_described(is_audio)}, expected bool {list(ids.shape)}")
    patches = checked_patches(prompt.patches, "prompt.patches")
    if patches.shape != (*ids.shape, *patch_shape):
        raise UsageError(
            f"prompt.patches are {list(patches.shape)}, expected {[*ids.shape, *patch_shape]}: one for each token"
        )
    return SpeechPrompt(ids, is_audio, patches)


def checked_patches(patches: object, name: str) -> Floats:
    """Return patches of latents, float32 [n, P, C]; UsageError if they are no finite floats of this shape, with at
    least one patch."""
    if (
        not isinstance(patches, np.ndarray)
        or patches.ndim != 3
        or not patches.size
        or patches.dtype.kind != "f"
    ):
        raise UsageError(
            f"{name} is {_described(patches)}, expected float32 [n, P, C] with at least one patch"
        )
    with np.errstate(over="ignore"):
        narrowed: Floats = patches.astype(np.float32)  # large numbers become infinite
    if not np.isfinite(narrowed).all():
        raise UsageError(f"{name} holds numbers that are not finite; give latents of encode_voice()")
    return narrowed


def _checked_ids(ids: object, name: str) -> NDArray[np.int64]:
    array = np.asarray(ids) if isinstance(ids, np.ndarray | list | tuple) else None
    if array is None or array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise UsageError(f"{name} are {_described(ids)}, expected int64 [n] with at least one token")
    return array.astype(np.int64)


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else shown(value)


def prompt_tokens(text: int, *, reference: int = 0, continued: int = 0) -> int:
    """Return the number of tokens of the prompt that `assemble` makes of so many tokens of text, and patches of a
    reference voice and of a continued voice; 0 for no voice."""
    return text + 1 + (reference + 2 if reference else 0) + continued


def assemble(
    text_ids: NDArray[np.int64],
    patch_shape: tuple[int, int],
    *,
    reference: Floats | None = None,
    continued: Floats | None = None,
    marks: SpeechMarks | None = None,
) -> SpeechPrompt:
    """Return the prompt of a sentence.

    Parameters
    ----------
    text_ids : array
        Token ids of the text, int64 [n]. If the prompt continues a voice, the token ids are those of the words of the
        voice and of the new text together.
    patch_shape : tuple of int
        Number P of latents in a patch, and number C of channels.
    reference, continued : array, optional
        Patches of the voice to imitate, and of the voice to continue, [n, P, C] float32.
    marks : SpeechMarks, optional
        Token ids that separate the parts of the prompt; default: the token ids of VoxCPM2.

    Raises
    ------
    UsageError
        If there is no text, or an array of patches has another shape than [n, P, C].
    """
    marks = marks or SpeechMarks()
    text_ids = _checked_ids(text_ids, "the text's token ids")
    parts: list[NDArray[np.int64] | Floats] = []
    if reference is not None:
        voice = _voice("reference", reference, patch_shape)
        parts += [_text(marks.reference_start), voice, _text(marks.reference_end)]
    parts += [text_ids, _text(marks.audio_start)]
    if continued is not None:
        parts.append(_voice("continued voice", continued, patch_shape))
    lengths = [len(part) for part in parts]
    is_audio = np.repeat([part.ndim == 3 for part in parts], lengths)
    ids = np.zeros(sum(lengths), np.int64)
    patches = np.zeros((sum(lengths), *patch_shape), np.float32)
    first = 0
    for part in parts:
        target: NDArray[Any] = patches if part.ndim == 3 else ids
        target[first : first + len(part)] = part
        first += len(part)
    return SpeechPrompt(ids, is_audio, patches)


def pad_voice(samples: Floats, patch_samples: int, *, continued: bool) -> Floats:
    """Return voice samples [n] padded with zeros to whole patches. The zeros follow a voice to imitate, and precede a
    voice to continue."""
    missing = -len(samples) % patch_samples
    return np.pad(samples, (missing, 0) if continued else (0, missing))


def _text(mark: int) -> NDArray[np.int64]:
    return np.array([mark], np.int64)


def _voice(what: str, patches: Floats, patch_shape: tuple[int, int]) -> Floats:
    if patches.ndim != 3 or patches.shape[1:] != patch_shape or not len(patches):
        raise UsageError(
            f"the {what} has patches of shape {list(patches.shape)}, expected [n, {patch_shape[0]}, {patch_shape[1]}] "
            "with at least one"
        )
    return patches
