"""Voices of a pool's streams: audio samples that are pushed while the streams run, and used by each stream's next
chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.video.conditioning.voice import AudioWindows, Voice
from seko_runtime.video.inputs import Inputs
from seko_runtime.video.manifest import VideoManifest


class Voices:
    """The audio pushed for each stream; see `Session.push_audio`. For a stream without pushed audio, the caller passes
    the audio windows as an input.

    Parameters
    ----------
    manifest : VideoManifest
        The manifest, whose inputs say whether the model takes audio.
    """

    def __init__(self, manifest: VideoManifest) -> None:
        self._windows = AudioWindows.of(manifest)
        self._manifest = manifest
        self._required = any(
            spec.default == "required"
            for spec in manifest.caller_inputs
            if self._windows is not None and spec.name == self._windows.name
        )
        self._of_row: dict[int, Voice] = {}

    @property
    def windows(self) -> AudioWindows:
        """The position of each latent frame's window in the audio samples; UsageError if the model takes no sound."""
        if self._windows is None:
            raise UsageError(AudioWindows.missing(self._manifest))
        return self._windows

    def push(self, row: int, samples: object, at: int | None, *, last: bool) -> None:
        """Append audio samples to the voice of a stream; after an error the voice has not changed."""
        voice = self._of_row.get(row) or Voice(self.windows)
        voice.push(samples, at=at, last=last)
        self._of_row[row] = voice

    def beside(
        self, rows: Sequence[int], inputs: Sequence[Inputs | None], first_frames: Sequence[int]
    ) -> list[Inputs]:
        """Return the inputs of each stream's next chunk, with the windows of the stream's voice added.

        Raises
        ------
        UsageError
            If audio samples are missing, or a stream has both a voice and windows from the caller.
        """
        heard: list[Inputs] = []
        for row, row_inputs, first in zip(rows, inputs, first_frames, strict=True):
            if row not in self._of_row:
                self._check_heard(row_inputs, first)
            heard.append({**(row_inputs or {}), **self._of_chunk(row, row_inputs, first)})
        return heard

    def heard_at(self, row: int, first_frame: int) -> float | None:
        """Return the time at which the last audio sample that a stream's chunk uses was pushed; None without a
        voice."""
        voice = self._of_row.get(row)
        return None if voice is None else voice.heard_at(first_frame)

    def forget_before(self, row: int, next_frame: int) -> None:
        """Drop the audio samples that no later chunk of a stream uses; the stream's next chunk begins at the latent
        frame ``next_frame``."""
        if row in self._of_row:
            self._of_row[row].forget(next_frame)

    def voice(self, row: int) -> Voice | None:
        """Return a copy of a stream's voice; None if no audio was pushed for the stream."""
        voice = self._of_row.get(row)
        return None if voice is None else voice.copy()

    def put(self, row: int, voice: Voice | None) -> None:
        """Set the voice of a stream. If ``voice`` is None, remove the voice."""
        self._of_row.pop(row, None)
        if voice is not None:
            self._of_row[row] = voice

    def _check_heard(self, inputs: Inputs | None, first_frame: int) -> None:
        """Raise a UsageError if a stream has neither pushed audio nor audio windows from the caller."""
        if self._windows is None or not self._required or self._windows.name in (inputs or {}):
            return
        first, end = self._windows.needed(first_frame)
        raise UsageError(
            f"the chunk from latent frame {first_frame} on hears samples {first} to {end} of the voice, and "
            f"none was pushed: push_audio {end - first} samples"
            + (f" with at={first}" if first else "")
            + f", or give the input {self._windows.name!r}"
        )

    def _of_chunk(self, row: int, inputs: Inputs | None, first_frame: int) -> dict[str, NDArray[np.float32]]:
        voice = self._of_row.get(row)
        if voice is None:
            return {}
        name = self.windows.name
        if name in (inputs or {}):
            raise UsageError(
                f"found the input {name!r} and audio that was pushed, which makes the same input; give one of them"
            )
        return {name: voice.of_chunk(first_frame)}
