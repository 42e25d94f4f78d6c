"""The voice that a stream hears: samples of 16 kHz, and for each latent frame the second around it. Numpy only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import Manifest
from seko_runtime.video.inputs import as_array, check_magnitude

RATE = 16_000  # samples a second
WINDOW = 16_000  # samples that are heard for one latent frame
# Kinds of inputs [speakers, F, WINDOW] float32, and whether their numbers are brought to mean 0 and variance 1.
NORMALISED, PLAIN = "audio_windows", "audio_windows_plain"
KINDS = {NORMALISED: True, PLAIN: False}
_LEAST_VARIANCE = 1e-7  # is added, as transformers' feature extractor does
_INT16 = 32768.0


@dataclass(frozen=True)
class AudioWindows:
    """Which samples each latent frame of an artifact's streams hears.

    Latent frame 0 is one video frame, each later one ``per_latent`` of them. A window of `WINDOW` samples lies around
    the middle of its video frames. Samples before the voice, and behind the frame's last video frame, are zeros in it.

    Parameters
    ----------
    name : str
        The input that takes the windows.
    speakers, chunk_frames : int
        Voices of a row, and latent frames of a chunk.
    frame_samples : int
        Samples for one video frame.
    per_latent : int
        Video frames for a latent frame after the first.
    normalised : bool
        Whether the windows of a chunk, zeros included, are together brought to mean 0 and variance 1, for each voice.
    """

    name: str
    speakers: int
    chunk_frames: int
    frame_samples: int
    per_latent: int
    normalised: bool

    @classmethod
    def of(cls, manifest: Manifest) -> AudioWindows | None:
        """Return those of an artifact; None if it has no input of one of `KINDS`."""
        spec = next((one for one in manifest.caller_inputs if one.kind in KINDS), None)
        if spec is None:
            return None
        stream = manifest.stream
        if (
            len(spec.shape) != 3
            or spec.shape[1:] != (stream.chunk_frames, WINDOW)
            or (spec.dtype, spec.per) != ("float32", "chunk")
            or RATE % stream.fps
        ):
            raise UsageError(
                f"input {spec.name!r} of the kind {spec.kind} is {spec.dtype} {list(spec.shape)} per {spec.per} at "
                f"{stream.fps} fps, expected float32 [speakers, {stream.chunk_frames}, {WINDOW}] per chunk and a rate "
                f"that divides {RATE}; rebuild the artifact with this version"
            )
        per_latent = stream.video_frames_per_latent
        return cls(
            spec.name,
            spec.shape[0],
            stream.chunk_frames,
            RATE // stream.fps,
            per_latent,
            KINDS[spec.kind or PLAIN],
        )

    def end(self, frame: int) -> int:
        """Return the sample behind the last one that a latent frame hears."""
        return self.frame_samples * (self.per_latent * frame + 1)

    def begin(self, frame: int) -> int:
        """Return the sample at which a latent frame's window begins; below 0 at the start of a stream."""
        length = self.frame_samples * (self.per_latent if frame else 1)
        return self.end(frame) - length // 2 - WINDOW // 2

    def needed(self, first_frame: int) -> tuple[int, int]:
        """Return the samples that the chunk which begins with a latent frame hears: the first, and behind the last."""
        return max(0, self.begin(first_frame)), self.end(first_frame + self.chunk_frames - 1)

    def lateness(self, times: Sequence[float]) -> list[float]:
        """Return how many seconds after its last sample each chunk of a voice that is just spoken would come.

        Parameters
        ----------
        times : sequence of float
            When chunk 0 began, then when each was ready, in seconds; none of them waited for its samples.
        """
        made, ready = [], 0.0
        for number, (began, ended) in enumerate(pairwise(times)):
            heard = self.needed(number * self.chunk_frames)[1] / RATE
            ready = max(ready, heard) + ended - began
            made.append(ready - heard)
        return made

    def latent_frames(self, samples: int) -> int:
        """Return how many latent frames cover this many samples; the last frame may end after them."""
        return max(0, -(-samples // self.frame_samples) - 2 + self.per_latent) // self.per_latent + (
            samples > 0
        )

    def of_chunk(self, samples: NDArray[np.float32], offset: int, first_frame: int) -> NDArray[np.float32]:
        """Return the windows of a chunk.

        Parameters
        ----------
        samples : numpy.ndarray
            [speakers, N] float32, from sample ``offset`` of the stream on. What is not there is silent.
        offset : int
            See ``samples``.
        first_frame : int
            The chunk's first latent frame, from the start of the stream.

        Returns
        -------
        numpy.ndarray
            [speakers, F, WINDOW] float32.
        """
        made = np.zeros((self.speakers, self.chunk_frames, WINDOW), np.float32)
        for at in range(self.chunk_frames):
            left, right = self.begin(first_frame + at), self.end(first_frame + at)
            first, last = max(left, offset), min(right, offset + samples.shape[1])
            if first < last:
                made[:, at, first - left : last - left] = samples[:, first - offset : last - offset]
        if not self.normalised:
            return made
        exact = made.astype(np.float64)
        mean, variance = (f(exact, axis=(1, 2), keepdims=True) for f in (np.mean, np.var))
        normal: NDArray[np.float64] = (exact - mean) / np.sqrt(variance + _LEAST_VARIANCE)
        return normal.astype(np.float32)


@dataclass(eq=False)
class Voice:
    """The samples that were pushed for one row, as far as they are still needed.

    Parameters
    ----------
    windows : AudioWindows
        The artifact's.
    first : int
        Number of the first sample that is held.
    samples : numpy.ndarray
        [speakers, N] float32, those that are held.
    ended : bool
        Whether the voice has ended: what would follow is silent.
    came : list of (int, float)
        For each push the number of the sample behind its last one, and when it came, by `time.monotonic`.
    """

    windows: AudioWindows
    first: int = 0
    ended: bool = False
    samples: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    came: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.samples.size:
            self.samples = np.zeros((self.windows.speakers, 0), np.float32)

    @property
    def end(self) -> int:
        """The sample behind the last one that is held."""
        return self.first + int(self.samples.shape[1])

    def push(self, samples: object, *, at: int | None = None, last: bool = False) -> None:
        """Append samples, or with ``at`` replace those from there on; see `Session.push_audio`.

        Raises
        ------
        UsageError
            If they are no samples, leave a gap, or come behind the end of the voice.
        """
        found = checked_samples(samples, self.windows.speakers)
        if at is None and self.ended and found.shape[1]:
            raise UsageError(
                f"the voice has ended at sample {self.end}; say with at=... which of its samples are replaced"
            )
        if at is None:
            at = self.end
        elif isinstance(at, int | np.integer) and at >= 0 and not self.samples.shape[1]:
            self.first = int(at)
        if not isinstance(at, int | np.integer) or not self.first <= at <= self.end:
            raise UsageError(
                f"samples from {at} on: the voice is held from {self.first} to {self.end}, and one begins there or in "
                "between"
            )
        self.samples = np.concatenate((self.samples[:, : at - self.first], found), axis=1)
        self.came = [one for one in self.came if one[0] <= at] + [(self.end, time.monotonic())]
        self.ended = last

    def of_chunk(self, first_frame: int) -> NDArray[np.float32]:
        """Return the windows [speakers, F, WINDOW] of the chunk that begins with a latent frame.

        Raises
        ------
        UsageError
            If some of its samples were not pushed, and the voice has not ended.
        """
        first, end = self.windows.needed(first_frame)
        missing = 0 if self.ended else end - self.end
        if first < self.first or missing > 0:
            what = (
                f"push {missing} more, or say last=True where the voice has ended"
                if first >= self.first
                else f"push them with at={first}"
            )
            raise UsageError(
                f"the chunk from latent frame {first_frame} on hears samples {first} to {end} of the voice, found "
                f"{self.first} to {self.end}: {what}"
            )
        return self.windows.of_chunk(self.samples, self.first, first_frame)

    def heard_at(self, first_frame: int) -> float:
        """Return when the last sample was pushed that a chunk hears, by `time.monotonic`; see `of_chunk`."""
        end = min(self.windows.needed(first_frame)[1], self.end)
        return next(came for behind, came in self.came if behind >= end)

    def forget(self, first_frame: int) -> None:
        """Drop the samples that no chunk from this latent frame on hears."""
        gone = min(self.windows.needed(first_frame)[0], self.end) - self.first
        if gone > 0:
            self.samples, self.first = self.samples[:, gone:].copy(), self.first + gone
            self.came = [one for one in self.came if one[0] > self.first] or self.came[-1:]


def checked_samples(samples: object, speakers: int) -> NDArray[np.float32]:
    """Return samples as float32 [speakers, N] in -1..1.

    Raises
    ------
    UsageError
        If they have another shape or dtype, or a number is not finite.
    """
    found = as_array(samples, "audio")
    shaped = found[None] if found.ndim == 1 and speakers == 1 else found
    if shaped.ndim != 2 or len(shaped) != speakers or found.dtype not in (np.int16, np.float32, np.float64):
        wanted = "[samples]" if speakers == 1 else f"[{speakers}, samples], a voice for each speaker"
        raise UsageError(
            f"audio is {found.dtype} {list(found.shape)}, expected int16 or float32 {wanted} at {RATE} Hz"
        )
    check_magnitude(found, "audio")
    made: NDArray[np.float32] = shaped.astype(np.float32) / np.float32(
        _INT16 if found.dtype == np.int16 else 1
    )
    return made
