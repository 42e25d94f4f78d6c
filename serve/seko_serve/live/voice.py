"""The voice that a viewer sends: pushed to the viewer's session as it arrives, and played with the resulting video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seko_runtime.video.conditioning.voice import RATE, AudioWindows, SampleBuffer
from seko_serve.store.arrays import array_of

Samples = NDArray[np.float32]


class Hearing(Protocol):
    """The interface of a session of the runtime that takes sound."""

    def push_audio(self, samples: object, *, at: int | None = None, last: bool = False) -> None:
        """Append samples, or replace the samples from number ``at`` on; see `Session.push_audio`."""


class ViewersVoice:
    """The voice of one stream: the samples that later chunks still use or play. Until the first sample arrives, the
    viewer's voice is silence.

    A voice that has ended can continue. The later samples of a continued voice follow the last sample that the stream
    has used by then.

    Parameters
    ----------
    windows : AudioWindows
        The position of each latent frame's window in the audio samples.
    opening : numpy.ndarray, optional
        The whole voice of each stream until further samples arrive: float32 [speakers, N] in -1..1.
    """

    def __init__(self, windows: AudioWindows, opening: Samples | None = None) -> None:
        self.windows, self._opening = windows, opening
        self._forget()

    def _forget(self) -> None:
        self._samples = SampleBuffer(self.windows.speakers)
        self._first = 0  # number of the first sample that is held
        self._ended = True
        self._next_frame = 0  # latent frame
        self.asked = False  # whether the chunk from there on was asked for: samples that come now follow it

    @property
    def end(self) -> int:
        """The number of the last sample that has arrived, plus 1, counted from the start of the stream."""
        return self._first + len(self._samples)

    def begin(self, row: Hearing) -> None:
        """Begin a stream with the voice that the client sent at its opening, or with silence until samples arrive."""
        self._forget()
        opening = self._opening
        self._take(
            row, np.zeros((self.windows.speakers, 0), np.float32) if opening is None else opening, None
        )
        self.finish(row)

    def push(self, row: Hearing, samples: Samples) -> None:
        """Append audio samples [speakers, N] to the voice; errors of the runtime are raised unchanged."""
        if not self._ended:
            self._take(row, samples, None)
            return
        begin = max(
            self.end, self.windows.needed(self._next_frame)[0]
        )  # no frame hears what was silent before
        if begin > self.end:
            self._samples, self._first = SampleBuffer(self.windows.speakers), begin
        gap = np.zeros((self.windows.speakers, max(0, self._heard() - begin)), np.float32)
        self._take(row, np.concatenate((gap, samples), 1), begin)
        self._ended = False

    def finish(self, row: Hearing) -> None:
        """End the voice: later frames use silence, until samples arrive."""
        row.push_audio(np.zeros((self.windows.speakers, 0), np.float32), last=True)
        self._ended = True

    def starved(self) -> bool:
        """Return whether the next chunk needs audio samples that have not arrived."""
        return not (self._ended or self.asked) and self.end < self.windows.needed(self._next_frame)[1]

    def of_chunk(self, first_frame: int) -> Samples:
        """Return the sound of a chunk's video frames, float32 [N] at `RATE`, the mean of all speakers, and move on to
        the next chunk's sound.

        Parameters
        ----------
        first_frame : int
            Number of the chunk's first latent frame, counted from the start of the stream.
        """
        w = self.windows
        begin = w.end(first_frame - 1) if first_frame else 0
        end = w.end(first_frame + w.chunk_frames - 1)
        sound = np.zeros(end - begin, np.float32)
        first, last = max(begin, self._first), min(end, self.end)
        if first < last:
            samples = self._samples.between(first - self._first, last - self._first)
            sound[first - begin : last - begin] = samples.mean(0)
        self._next_frame, self.asked = first_frame + w.chunk_frames, False
        gone = min(end, w.needed(self._next_frame)[0], self.end) - self._first
        if gone > 0:
            self._samples.drop(gone)
            self._first += gone
        return sound

    def state(self) -> dict[str, Any]:
        """Return the voice's state for `load`, with the samples as an array."""
        return {
            "first": self._first,
            "ended": self._ended,
            "next_frame": self._next_frame,
            "asked": self.asked,
            "samples": self._samples.between(0, len(self._samples)),
        }

    def load(self, row: Hearing, state: Mapping[str, Any]) -> None:
        """Continue from a value that `state` returned, with a session of the pool that has no voice yet."""
        self._forget()
        self._first, self._next_frame = state["first"], state["next_frame"]
        self._take(row, array_of(state["samples"]), self._first)
        if state["ended"]:
            self.finish(row)
        else:
            self._ended = False
        self.asked = bool(state["asked"])

    def _heard(self) -> int:
        """Return the number, plus 1, of the last sample that the frames made or requested so far use; 0 before the
        first frame."""
        frame = self._next_frame + (self.windows.chunk_frames if self.asked else 0)
        return self.windows.end(frame - 1) if frame else 0

    def _take(self, row: Hearing, samples: Samples, at: int | None) -> None:
        row.push_audio(samples, at=at)
        self._samples.write(self.end - self._first, samples)


def pcm_samples(pcm16: bytes, speakers: int) -> Samples:
    """Return samples [speakers, N] of signed 16-bit little-endian sound whose channels are interleaved."""
    whole = len(pcm16) // (2 * speakers) * 2 * speakers
    return np.frombuffer(pcm16[:whole], "<i2").reshape(-1, speakers).T.astype(np.float32) / np.float32(32768)


__all__ = ["RATE", "ViewersVoice", "pcm_samples"]
