"""The voice of a stream: audio samples at 16 kHz, of which the model gets a window of one second around each latent
frame. Numpy only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, check_magnitude, flag, whole_number
from seko_runtime.errors import UsageError
from seko_runtime.video.manifest import VideoManifest

RATE = 16_000  # samples a second
WINDOW = 16_000  # audio samples in the window of one latent frame
# Kinds of inputs with windows [speakers, F, WINDOW] float32, and whether the samples are normalised to mean 0 and
# variance 1.
NORMALISED, PLAIN = "audio_windows", "audio_windows_plain"
KINDS = {NORMALISED: True, PLAIN: False}
FEATURES = "audio_features"  # kind of the input of an artifact without an audio encoder: the encoder's output
_LEAST_VARIANCE = 1e-7  # added to the variance, as transformers' feature extractor does
_INT16 = 32768.0
MAX_HELD_S = 1800  # most seconds of voice that a row holds: used by its last chunks, or pushed ahead
MAX_HELD = MAX_HELD_S * RATE
MAX_SAMPLE = 1 << 53
_BLOCK = RATE  # samples in one array of a `SampleBuffer`


@dataclass(frozen=True)
class AudioWindows:
    """The position of each latent frame's window in the audio samples of a voice.

    Latent frame 0 is one video frame; each later latent frame is ``per_latent`` video frames. A window has `WINDOW`
    samples around the middle of its latent frame's video frames. Samples before the beginning of the voice, and after
    the latent frame's last video frame, are zeros in the window.

    Parameters
    ----------
    name : str
        Name of the model input that takes the windows.
    speakers, chunk_frames : int
        Number of voices of a stream, and number of latent frames in a chunk.
    frame_samples : int
        Audio samples for the duration of one video frame.
    per_latent : int
        Number of video frames in a latent frame after the first.
    normalised : bool
        Whether the samples of all windows of a chunk, zeros included, are normalised to mean 0 and variance 1, for
        each voice.
    """

    name: str
    speakers: int
    chunk_frames: int
    frame_samples: int
    per_latent: int
    normalised: bool

    @classmethod
    def of(cls, manifest: VideoManifest) -> AudioWindows | None:
        """Return the audio windows of an artifact; None if no input of the artifact has one of the kinds `KINDS`."""
        spec = next((spec for spec in manifest.caller_inputs if spec.kind in KINDS), None)
        if spec is None:
            return None
        stream = manifest.workload.stream
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

    @staticmethod
    def missing(manifest: VideoManifest) -> str:
        """Return a sentence for error messages that says why an artifact takes no sound."""
        spec = next((spec for spec in manifest.caller_inputs if spec.kind == FEATURES), None)
        if spec is not None:
            return (
                f"this artifact hears features of a voice, not its sound: give them as the input {spec.name!r}, "
                f"{spec.dtype} {list(spec.shape)} for every chunk, or rebuild it with --audio-encoder"
            )
        names = ", ".join(spec.name for spec in manifest.caller_inputs) or "none"
        return f"this artifact's model hears no audio; its inputs: {names}"

    def end(self, frame: int) -> int:
        """Return the number of the last audio sample that a latent frame uses, plus 1."""
        return self.frame_samples * (self.per_latent * frame + 1)

    def begin(self, frame: int) -> int:
        """Return the number of the sample at which a latent frame's window begins; below 0 at the start of a stream."""
        length = self.frame_samples * (self.per_latent if frame else 1)
        return self.end(frame) - length // 2 - WINDOW // 2

    def needed(self, first_frame: int) -> tuple[int, int]:
        """Return the range of samples, first and end, that a chunk uses; ``first_frame`` is the number of the chunk's
        first latent frame."""
        return max(0, self.begin(first_frame)), self.end(first_frame + self.chunk_frames - 1)

    def lateness(self, times: Sequence[float]) -> list[float]:
        """Return for each chunk the delay in seconds after the last audio sample that the chunk uses, as if the voice
        were live.

        Parameters
        ----------
        times : sequence of float
            Time at which chunk 0 began, then the time at which each chunk was ready, in seconds. No chunk may have
            waited for samples.
        """
        late, ready = [], 0.0
        for number, (began, ended) in enumerate(pairwise(times)):
            heard = self.needed(number * self.chunk_frames)[1] / RATE
            ready = max(ready, heard) + ended - began
            late.append(ready - heard)
        return late

    def latent_frames(self, samples: int) -> int:
        """Return the number of latent frames that cover a number of audio samples; the last latent frame may end after
        the last sample."""
        return max(0, -(-samples // self.frame_samples) - 2 + self.per_latent) // self.per_latent + (
            samples > 0
        )

    def of_chunk(self, samples: NDArray[np.float32], offset: int, first_frame: int) -> NDArray[np.float32]:
        """Return the audio windows of a chunk.

        Parameters
        ----------
        samples : numpy.ndarray
            Audio samples, float32 [speakers, N], beginning at sample ``offset`` of the stream. Samples outside this
            range count as zeros.
        offset : int
            Number of the first sample in ``samples``, counted from the start of the stream.
        first_frame : int
            Number of the chunk's first latent frame, counted from the start of the stream.

        Returns
        -------
        numpy.ndarray
            The windows, float32 [speakers, F, WINDOW].
        """
        windows = np.zeros((self.speakers, self.chunk_frames, WINDOW), np.float32)
        for at in range(self.chunk_frames):
            left, right = self.begin(first_frame + at), self.end(first_frame + at)
            first, last = max(left, offset), min(right, offset + samples.shape[1])
            if first < last:
                windows[:, at, first - left : last - left] = samples[:, first - offset : last - offset]
        if not self.normalised:
            return windows
        exact = windows.astype(np.float64)
        mean, variance = (f(exact, axis=(1, 2), keepdims=True) for f in (np.mean, np.var))
        normal: NDArray[np.float64] = (exact - mean) / np.sqrt(variance + _LEAST_VARIANCE)
        return normal.astype(np.float32)


class SampleBuffer:
    """A buffer of consecutive audio samples, stored in blocks that are copied on write. A copy of the buffer shares its
    blocks until one of the two buffers changes them.

    The cost of writing and dropping audio samples grows with the samples moved, not with the samples held.

    Parameters
    ----------
    speakers : int
        Number of voices that the buffer holds side by side.
    """

    def __init__(self, speakers: int) -> None:
        self._speakers = speakers
        self._blocks: list[NDArray[np.float32]] = []  # blocks of float32 [speakers, _BLOCK]
        self._shared = 0  # number of leading blocks that may be shared with a copy
        self._begin = self._end = 0  # range of the held samples within the blocks

    def __len__(self) -> int:
        return self._end - self._begin

    def between(self, first: int, last: int) -> NDArray[np.float32]:
        """Return a copy [speakers, last - first] of samples in the buffer; numbers count from the first held sample."""
        samples = np.empty((self._speakers, last - first), np.float32)
        done, (number, place) = 0, divmod(self._begin + first, _BLOCK)
        while done < last - first:
            part = self._blocks[number][:, place : place + last - first - done]
            samples[:, done : done + part.shape[1]] = part
            done, number, place = done + part.shape[1], number + 1, 0
        return samples

    def write(self, at: int, samples: NDArray[np.float32]) -> None:
        """Replace the samples from number ``at`` on; numbers count from the first held sample."""
        self._end = self._begin + at + samples.shape[1]
        blocks, place = divmod(self._begin + at, _BLOCK)
        del self._blocks[blocks + (place > 0) :]
        if blocks < self._shared:
            if place:
                self._blocks[blocks] = self._blocks[blocks].copy()
            self._shared = blocks
        while samples.shape[1]:
            if not place:
                self._blocks.append(np.empty((self._speakers, _BLOCK), np.float32))
            part = samples[:, : _BLOCK - place]
            self._blocks[-1][:, place : place + part.shape[1]] = part
            samples, place = samples[:, part.shape[1] :], 0

    def drop(self, count: int) -> None:
        """Drop the first ``count`` samples of the buffer."""
        gone, self._begin = divmod(self._begin + count, _BLOCK)
        del self._blocks[:gone]
        self._shared = max(0, self._shared - gone)
        self._end -= gone * _BLOCK

    def copy(self) -> SampleBuffer:
        """Return a copy of the buffer."""
        other = SampleBuffer(self._speakers)
        other._blocks, other._begin, other._end = [*self._blocks], self._begin, self._end
        self._shared = other._shared = len(self._blocks)
        return other


class Voice:
    """The voice of one stream: the pushed audio samples that later chunks still need.

    Parameters
    ----------
    windows : AudioWindows
        The position of each latent frame's window in the samples.
    samples : numpy.ndarray, optional
        Audio samples with which the voice begins, float32 [speakers, N].
    first : int
        Number of the first held sample, counted from the start of the stream.
    ended : bool
        Whether the voice has ended, so that later chunks use zeros.
    came : sequence of (int, float)
        Records of pushes of samples: the end of the pushed samples, and the time by `time.monotonic` at which they
        arrived. ``came`` has the last push, and the pushes that completed a latent frame.
    """

    def __init__(
        self,
        windows: AudioWindows,
        samples: NDArray[np.float32] | None = None,
        first: int = 0,
        *,
        ended: bool = False,
        came: Sequence[tuple[int, float]] = (),
    ) -> None:
        self.windows, self.first, self.ended = windows, first, ended
        self._samples = SampleBuffer(windows.speakers)
        if samples is not None:
            self._samples.write(0, samples)
        self._came = deque(came)
        self._replaced: tuple[int, int] | None = (
            None  # range of the samples that the last push with `at` replaced
        )

    def state(self) -> dict[str, object]:
        """Return the constructor's arguments for an equal voice, as arrays and plain values, for snapshots."""
        return {
            "windows": self.windows,
            "samples": self._samples.between(0, len(self._samples)),
            "first": self.first,
            "ended": self.ended,
            "came": list(self._came),
        }

    def copy(self) -> Voice:
        """Return an independent copy of the voice."""
        other = Voice(self.windows, None, self.first, ended=self.ended, came=self._came)
        other._samples = self._samples.copy()
        return other

    @property
    def end(self) -> int:
        """The number of the last held audio sample, plus 1, counted from the start of the stream."""
        return self.first + len(self._samples)

    def push(self, samples: object, *, at: object = None, last: bool = False) -> None:
        """Append audio samples to the voice, or with ``at`` replace the samples from that number on; see
        `Session.push_audio`.

        Raises
        ------
        UsageError
            If the array holds no samples, the samples leave a gap, follow the end of the voice, or are too many, or
            ``last`` is neither True nor False. The voice has not changed.
        """
        array, begin = self._checked(samples, at)
        last = flag(last, "last")
        if not len(self._samples):
            self.first = begin
        before = self.end
        self._samples.write(begin - self.first, array)
        replaces = at is not None
        self._replaced = (self.end, before) if replaces and self.end < before else None
        self._note_push(begin)
        # Only a push that replaces samples reopens a voice that has ended; an empty push does not.
        self.ended = last or (self.ended and not replaces)

    def _checked(self, samples: object, at: object) -> tuple[NDArray[np.float32], int]:
        """Return pushed samples [speakers, N] and the number of the first, if `push` accepts them."""
        array = checked_samples(samples, self.windows.speakers)
        if at is None and self.ended and array.shape[1]:
            raise UsageError(
                f"the voice has ended at sample {self.end}; say with at=... which of its samples are replaced"
            )
        begin = self.end if at is None else whole_number(at, "at", 0, MAX_SAMPLE)
        first = self.first if len(self._samples) else begin
        if at is not None and not first <= begin <= max(first, self.end):
            raise UsageError(
                f"samples from {begin} on: the voice is held from {self.first} to {self.end}, and one begins there or "
                "in between"
            )
        if begin + array.shape[1] - first > MAX_HELD:
            raise UsageError(
                f"{array.shape[1]} samples from {begin} on would make {begin + array.shape[1] - first} that are held, "
                f"at most {MAX_HELD} are ({MAX_HELD_S} s): push them when chunks have been made"
            )
        return array, begin

    def of_chunk(self, first_frame: int) -> NDArray[np.float32]:
        """Return the audio windows [speakers, F, WINDOW] of the chunk whose first latent frame is ``first_frame``.

        Raises
        ------
        UsageError
            If samples that the chunk uses were not pushed, and the voice has not ended.
        """
        first, end = self.windows.needed(first_frame)
        missing = 0 if self.ended else end - self.end
        if first < self.first or missing > 0:
            what = (
                f"push_audio {missing} more, or say last=True where the voice has ended"
                if first >= self.first
                else f"push_audio them with at={first}"
            )
            if self._replaced is not None:
                what += "; a push with at=... took back the samples from {} to {}".format(*self._replaced)
            raise UsageError(
                f"the chunk from latent frame {first_frame} on hears samples {first} to {end} of the voice, found "
                f"{self.first} to {self.end}: {what}"
            )
        last = max(first, min(end, self.end))
        heard = self._samples.between(first - self.first, last - self.first)
        return self.windows.of_chunk(heard, first, first_frame)

    def heard_at(self, first_frame: int) -> float:
        """Return the time, by `time.monotonic`, at which the last sample that a chunk uses was pushed."""
        end = min(self.windows.needed(first_frame)[1], self.end)
        return next(came for behind, came in self._came if behind >= end)

    def _note_push(self, begin: int) -> None:
        """Record the time at which pushed samples arrived; the first of these samples has the number ``begin``."""
        cut = None
        while self._came and self._came[-1][0] > begin:
            cut = self._came.pop()
        if cut is not None:
            self._came.append((begin, cut[1]))
        if self._came:
            before = self._came[-2][0] if len(self._came) > 1 else self.first
            if self._whole(before) == self._whole(self._came[-1][0]):
                self._came.pop()  # the previous push completed no latent frame: no chunk needs its time
        self._came.append((self.end, time.monotonic()))

    def _whole(self, samples: int) -> int:
        """Return the number of latent frames that use only the first ``samples`` samples of the stream."""
        return (samples // self.windows.frame_samples - 1) // self.windows.per_latent + 1

    def forget(self, first_frame: int) -> None:
        """Drop the audio samples that no chunk uses from this latent frame on."""
        gone = min(self.windows.needed(first_frame)[0], self.end) - self.first
        if gone > 0:
            self._samples.drop(gone)
            self.first += gone
            while len(self._came) > 1 and self._came[0][0] <= self.first:
                self._came.popleft()


def checked_samples(samples: object, speakers: int) -> NDArray[np.float32]:
    """Return samples as float32 [speakers, N] in -1..1.

    Raises
    ------
    UsageError
        If the samples have another shape or dtype, or a number is not finite.
    """
    array = as_array(samples, "audio")
    shaped = array[None] if array.ndim == 1 and speakers == 1 else array
    if shaped.ndim != 2 or len(shaped) != speakers or array.dtype not in (np.int16, np.float32, np.float64):
        wanted = "[samples]" if speakers == 1 else f"[{speakers}, samples], a voice for each speaker"
        raise UsageError(
            f"audio is {array.dtype} {list(array.shape)}, expected int16 or float32 {wanted} at {RATE} Hz"
        )
    # checked before the conversion: a broadcast array may have any length at no cost of memory
    if shaped.shape[1] > MAX_HELD:
        raise UsageError(
            f"audio has {shaped.shape[1]} samples, at most {MAX_HELD} are held ({MAX_HELD_S} s): push it in parts"
        )
    check_magnitude(array, "audio")
    scaled: NDArray[np.float32] = shaped.astype(np.float32) / np.float32(
        _INT16 if array.dtype == np.int16 else 1
    )
    return scaled
