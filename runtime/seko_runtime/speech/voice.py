"""A voice for sessions to speak with, as patches of latents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import path_of, shown
from seko_runtime.errors import ArtifactError, InputFileError, UsageError
from seko_runtime.format.safetensors_map import map_safetensors, safetensors_head
from seko_runtime.format.whole_files import whole_file
from seko_runtime.host.faults import machine_faults
from seko_runtime.host.user_files import first_bytes
from seko_runtime.speech.prompts import Floats, checked_patches
from seko_runtime.speech.texts import checked_text, joined

MAX_FILE_BYTES = 64 << 20  # of an encoded voice
_ARRAYS, _TEXT = ("reference", "continued"), "text"  # tensors of a voice's file
_DTYPES = {"reference": "float32", "continued": "float32", _TEXT: "uint8"}


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

    def content(self) -> bytes:
        """Return the voice as the content of a safetensors file: the arrays by name, and ``text`` in UTF-8."""
        parts: dict[str, NDArray[np.generic]] = {
            name: array for name in _ARRAYS if (array := getattr(self, name)) is not None
        }
        if self.text:
            parts[_TEXT] = np.frombuffer(self.text.encode(), np.uint8)
        head = safetensors_head(
            (name, "U8" if name == _TEXT else "F32", array.shape, array.nbytes)
            for name, array in parts.items()
        )
        return b"".join((head, *(np.ascontiguousarray(array).tobytes() for array in parts.values())))

    @classmethod
    def of_content(cls, content: bytes, name: str = "the voice") -> Voice:
        """Return the voice of what `content` returned; InputFileError, with ``name`` in front, for other bytes."""
        try:
            tensors = map_safetensors(memoryview(content), name)
            if any(_DTYPES.get(tensor.name) != tensor.dtype for tensor in tensors.values()):
                raise InputFileError(f"{name} is no encoded voice: it holds {', '.join(tensors)[:120]}")
            arrays = {tensor: tensors[tensor].to_numpy() for tensor in _ARRAYS if tensor in tensors}
            text = tensors[_TEXT].to_numpy().tobytes().decode() if _TEXT in tensors else ""
            return cls(**arrays, text=text)  # type: ignore[arg-type]  # checked by the class
        except (ArtifactError, UsageError, UnicodeDecodeError) as fault:
            raise InputFileError(f"{name} is no encoded voice: {fault}") from None

    @machine_faults()
    def save(self, path: str | Path) -> None:
        """Write the voice to a safetensors file of mode 0600, so that no recording has to be encoded again. An existing
        regular file is replaced.

        Raises
        ------
        UsageError
            If the path exists and is not a regular file.
        DiskError
            If the file cannot be written.
        """
        with whole_file(path_of(path, "path"), replace=True, mode=0o600) as file:
            file.write(self.content())

    @classmethod
    @machine_faults()
    def load(cls, path: str | Path) -> Voice:
        """Return the voice in a file that `save` wrote. It suits artifacts with the audio VAE that encoded it.

        Raises
        ------
        InputFileError
            If the file cannot be read, or is no encoded voice.
        """
        file = path_of(path, "path")
        content = first_bytes(file, str(file), MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise InputFileError(f"{file} is no encoded voice: it has more than {MAX_FILE_BYTES} bytes")
        return cls.of_content(content, str(file))


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
    words = checked_text(text, "the voice's text")
    if bool(words) != (continued is not None) or bool(words) != bool(words.strip()):
        sound = "no sound" if continued is None else "sound"
        raise UsageError(
            f"a voice that goes on has {sound} and the words {shown(text)}: give both or neither"
        )


NO_VOICE = Voice()  # the model chooses one
