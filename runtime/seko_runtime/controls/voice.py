"""The control ``voice``: sound of one or more speakers at 16 kHz, of which the model gets a window of one second around
each latent frame."""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, check_magnitude, flag, whole_number
from seko_runtime.controls.base import MEDIA, Control, ControlOption, Event, one_of, parameters_of
from seko_runtime.controls.recording import of_json
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.format.records import Within
from seko_runtime.media_files.sound import VOICE_RATE, load_sound

RATE = VOICE_RATE  # samples a second
WINDOW = 16_000  # audio samples in the window of one latent frame
WINDOWS = "windows"  # word of the input, float32 [speakers, F, WINDOW]
# Kinds of inputs with windows, and whether the samples are normalised to mean 0 and variance 1.
NORMALISED, PLAIN = "audio_windows", "audio_windows_plain"
KINDS = {NORMALISED: True, PLAIN: False}
FEATURES = "audio_features"  # kind of the input of an artifact without an audio encoder: the encoder's output
_LEAST_VARIANCE = 1e-7  # added to the variance, as transformers' feature extractor does
_INT16 = 32768.0
MAX_HELD_S = 1800  # most seconds of voice that a session holds: used by its last chunks, or sent ahead
MAX_HELD = MAX_HELD_S * RATE
MAX_SAMPLE = 1 << 53
MAX_PCM_BYTES = 128 << 10  # of one event: 4 s of one voice
_BLOCK = RATE  # samples in one array of a `SampleBuffer`


@dataclass(frozen=True)
class AudioWindows:
    """The position of each latent frame's window in the audio samples of a voice.

    Latent frame 0 is one video frame; each later latent frame is ``per_latent`` video frames. A window has `WINDOW`
    samples around the middle of its latent frame's video frames. Samples before the beginning of the voice, and after
    the latent frame's last video frame, are zeros in the window.

    Parameters
    ----------
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

    speakers: int
    chunk_frames: int
    frame_samples: int
    per_latent: int
    normalised: bool

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


@dataclass(frozen=True)
class VoiceParameters:
    """The parameters of a voice in the manifest: video frames a second, video frames of a latent frame after the first,
    whether windows are normalised, and the number of latent frames by which a session may step back."""

    fps: Annotated[int, Within(1, RATE)]
    per_latent: Annotated[int, Within(1, 1 << 16)]
    normalised: bool
    kept_frames: Annotated[int, Within(0, 1 << 31)] = 0


class VoiceControl(Control):
    """The voice of one session: the samples that later chunks hear.

    A chunk can be made as soon as the samples that it hears have come, or the voice has ended; `needed` says which. A
    voice that has ended may go on: samples that come later follow the last one that the stream has heard by then.
    """

    kind = "voice"
    options: ClassVar = (
        ControlOption(
            "--audio",
            "FILE",
            "the voice, once for each speaker: wav; with PyAV also mp3, m4a. An .mp4 output gets its sound",
            MEDIA,
            file=True,
            repeatable=True,
        ),
    )
    sound_rate = RATE
    fits_recording = False  # recorded windows are noise, which goes with no voice

    def __init__(self, spec: ControlSpec, inputs: Mapping[str, InputSpec]) -> None:
        super().__init__(spec, inputs)
        p, own = parameters_of(VoiceParameters, spec), inputs[WINDOWS]
        if len(own.shape) != 3 or own.shape[2] != WINDOW or own.dtype != "float32" or RATE % p.fps:
            raise UsageError(
                f"its input {own.name!r} is {own.dtype} {list(own.shape)} at {p.fps} fps, expected float32 [speakers, "
                f"chunk, {WINDOW}] and a rate that divides {RATE}"
            )
        self.windows = AudioWindows(own.shape[0], own.shape[1], RATE // p.fps, p.per_latent, p.normalised)
        self._kept_frames = p.kept_frames
        self.reset()

    @staticmethod
    def declared(
        windows: str, *, fps: int, per_latent: int, normalised: bool, kept_frames: int
    ) -> ControlSpec:
        """Return the manifest's entry of a voice, whose windows are the model's input ``windows``; the parameters are
        those of `VoiceParameters`."""
        parameters = {
            "fps": fps, "per_latent": per_latent, "normalised": normalised, "kept_frames": kept_frames,
        }  # fmt: skip
        return ControlSpec("voice", "voice", {WINDOWS: windows}, parameters)

    def reset(self) -> None:
        """Forget the voice: the stream begins again, and so does its sound."""
        self._samples = SampleBuffer(self.windows.speakers)
        self._first = 0  # number of the first held sample, counted from the start of the stream
        self._ended = self._active = False
        self._frame = 0  # first latent frame of the next chunk
        self._came: deque[tuple[int, float]] = deque()  # ends of pushes, with the time at which they came
        self._replaced: tuple[int, int] | None = None  # samples that the last event with `at` took back

    @property
    def active(self) -> bool:
        """Whether sound has come, or the voice has ended."""
        return self._active

    @property
    def end(self) -> int:
        """The number of the last sample that has come, plus 1, counted from the start of the stream."""
        return self._first + len(self._samples)

    @property
    def needed(self) -> tuple[int, int]:
        """The range of samples, first and end, that the next chunk hears."""
        return self.windows.needed(self._frame)

    @property
    def chunks(self) -> int | None:
        """Number of chunks that cover a voice that has ended."""
        if not self._ended or not self.end:
            return None
        return -(-self.windows.latent_frames(self.end) // self.windows.chunk_frames)

    def ready(self) -> bool:
        """Return whether the samples that the next chunk hears have come, or the voice has ended."""
        return self._ended or self.end >= self.needed[1]

    # -- events ------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the events with their schemas, the number of speakers and the rate, and the field of a request to open
        a session that holds a sound file of each."""
        last = {"type": "boolean", "description": "whether the voice ends with these samples"}
        return {
            "events": {
                "pcm16": {
                    "pcm16": {
                        "type": "string",
                        "contentEncoding": "base64",
                        "description": "signed 16-bit little-endian samples, speakers interleaved",
                    },
                    "last": last,
                },
                "samples": {
                    "samples": {"type": "array"},
                    "at": {"type": "integer", "minimum": 0},
                    "last": last,
                },
                "end": {"end": {"const": True}},
            },
            "sound": {"field": "voice", "rate": RATE, "speakers": self.windows.speakers},
            "limits": {"pcm16_bytes": MAX_PCM_BYTES, "held_s": MAX_HELD_S},
        }

    def check(self, event: Event) -> Event:
        """Return an event with checked values.

        Parameters
        ----------
        event : mapping
            One of the following.

            ``samples``: [N], or with several speakers [speakers, N], at 16 kHz: float32 in -1..1, or int16. ``at``: the
            number of the first of them, counted from the start of the stream; earlier samples from there on are
            replaced. Default: they follow those before. ``last``: whether the voice ends with them.

            ``pcm16``: bytes of signed 16-bit little-endian samples whose speakers are interleaved, or such bytes in
            base64; and ``last``.

            ``end``: True, the voice has ended: what follows is silence.
        """
        known = {"samples": ("at", "last"), "pcm16": ("last",), "end": ()}
        which, values = one_of(event, known, "a voice")
        flag(values.get("last", False), "last")
        if which == "samples":
            checked_samples(values["samples"], self.windows.speakers)
            if values.get("at") is not None:
                whole_number(values["at"], "at", 0, MAX_SAMPLE)
        elif which == "pcm16":
            values["pcm16"] = _bytes_of(values["pcm16"])
            if len(values["pcm16"]) > MAX_PCM_BYTES:
                raise UsageError(f"pcm16 has {len(values['pcm16'])} bytes, at most {MAX_PCM_BYTES} are taken")
        elif not flag(values["end"], "end"):
            raise UsageError("end is False, expected True")
        return values

    def _apply(self, event: Event) -> None:
        if "end" in event:
            self._ended = self._active = True
            return
        speakers = self.windows.speakers
        if "pcm16" in event:
            samples = pcm_samples(event["pcm16"], speakers)
        else:
            samples = checked_samples(event["samples"], speakers)
        at, last = event.get("at"), bool(event.get("last", False))
        begin = self.end if at is None else whole_number(at, "at", 0, MAX_SAMPLE)
        goes_on = at is None and self._ended and samples.shape[1] > 0
        if goes_on:
            begin = max(self.end, self._oldest_heard)  # no frame hears what was silent before
            gap = np.zeros((speakers, max(0, self._heard - begin)), np.float32)
            samples = np.concatenate((gap, samples), 1)
        self._check_place(begin, samples.shape[1], at)
        if goes_on and begin > self.end:
            self._samples, self._first = SampleBuffer(speakers), begin
        if not len(self._samples):
            self._first = begin
        before = self.end
        self._samples.write(begin - self._first, samples)
        self._replaced = (self.end, before) if at is not None and self.end < before else None
        self._note_push(begin)
        # Only samples, or a place that is replaced, open a voice again that has ended.
        self._ended = last or (self._ended and at is None and not goes_on)
        self._active = True

    def _check_place(self, begin: int, count: int, at: object) -> None:
        first = self._first if len(self._samples) else begin
        if at is not None and not first <= begin <= max(first, self.end):
            raise UsageError(
                f"samples from {begin} on: the voice is held from {first} to {self.end}, and one begins there or in "
                "between"
            )
        if begin + count - first > MAX_HELD:
            raise UsageError(
                f"{count} samples from {begin} on would make {begin + count - first} that are held, at most {MAX_HELD} "
                f"are ({MAX_HELD_S} s): send them when chunks have been made"
            )

    @property
    def _heard(self) -> int:
        """The number, plus 1, of the last sample that the frames made so far have heard; 0 before the first."""
        return self.windows.end(self._frame - 1) if self._frame else 0

    @property
    def _oldest_heard(self) -> int:
        """The number of the first sample that a chunk may still hear, also after a step back."""
        return self.windows.needed(max(0, self._frame - self._kept_frames))[0]

    # -- chunks ------------------------------------------------------------------------------------------------

    def next_chunk(self) -> Mapping[str, NDArray[np.float32]]:
        """Return the windows [speakers, F, WINDOW] of the next chunk.

        Raises
        ------
        UsageError
            If samples that the chunk hears have not come, and the voice has not ended.
        """
        own, (first, end) = self.inputs[WINDOWS], self.needed
        if not self._active:
            if own.default != "required":
                return {}
            raise UsageError(
                f"the chunk from latent frame {self._frame} on hears samples {first} to {end} of the voice, and none "
                f"has come: give {end - first} samples to the control {self.name!r}"
                + (f" with at={first}" if first else "")
                + f", or the input {own.name!r}"
            )
        missing = 0 if self._ended else end - self.end
        if first < self._first or missing > 0:
            what = (
                f"give {missing} more, or say last=True where the voice has ended"
                if first >= self._first
                else f"give them with at={first}"
            )
            if self._replaced is not None:
                what += "; samples with at=... took back those from {} to {}".format(*self._replaced)
            raise UsageError(
                f"the chunk from latent frame {self._frame} on hears samples {first} to {end} of the voice, found "
                f"{self._first} to {self.end}: {what}"
            )
        last = max(first, min(end, self.end))
        heard = self._samples.between(first - self._first, last - self._first)
        return {own.name: self.windows.of_chunk(heard, first, self._frame)}

    def advance(self) -> None:
        """Move on by a chunk, and drop the samples that no chunk hears any more."""
        self._frame += self.windows.chunk_frames
        gone = min(self._oldest_heard, self.end) - self._first
        if gone > 0:
            self._samples.drop(gone)
            self._first += gone
            while len(self._came) > 1 and self._came[0][0] <= self._first:
                self._came.popleft()

    def go_to(self, frame: int) -> None:
        """Go on at a latent frame."""
        self._frame = frame

    def heard_at(self) -> float | None:
        """Return the time, by `time.monotonic`, at which the last sample that the next chunk hears came."""
        end = min(self.needed[1], self.end)
        return next((came for behind, came in self._came if behind >= end), None)

    def _note_push(self, begin: int) -> None:
        """Record the time at which samples came, the first of which has the number ``begin``."""
        cut = None
        while self._came and self._came[-1][0] > begin:
            cut = self._came.pop()
        if cut is not None:
            self._came.append((begin, cut[1]))
        if self._came:
            before = self._came[-2][0] if len(self._came) > 1 else self._first
            if self._whole(before) == self._whole(self._came[-1][0]):
                self._came.pop()  # the previous push completed no latent frame: no chunk needs its time
        self._came.append((self.end, time.monotonic()))

    def _whole(self, samples: int) -> int:
        """Return the number of latent frames that hear only the first ``samples`` samples of the stream."""
        return (samples // self.windows.frame_samples - 1) // self.windows.per_latent + 1

    def sound(self, first_frame: int) -> NDArray[np.float32]:
        """Return the sound that is played with the chunk whose first latent frame is ``first_frame``, float32 [N] at
        `RATE`: the mean of all speakers, silence where nothing came."""
        begin = self.windows.end(first_frame - 1) if first_frame else 0
        end = self.windows.end(first_frame + self.windows.chunk_frames - 1)
        sound = np.zeros(end - begin, np.float32)
        first, last = max(begin, self._first), min(end, self.end)
        if first < last:
            sound[first - begin : last - begin] = self._samples.between(
                first - self._first, last - self._first
            ).mean(0)
        return sound

    def sound_track(self) -> NDArray[np.float32] | None:
        """Return all voices that have come, mixed to one sound [N]; quieter where they are too loud together."""
        if not self.end:
            return None
        sound: NDArray[np.float32] = self._samples.between(0, len(self._samples)).sum(0)
        return sound / max(1.0, float(np.abs(sound).max(initial=0)))

    def lateness(self, times: Sequence[float]) -> list[float]:
        """Return for each chunk the delay in seconds behind what it hears; see `AudioWindows.lateness`."""
        return self.windows.lateness(times)

    def state(self) -> dict[str, Any]:
        """Return the voice's state for `load`."""
        return {
            "first": self._first,
            "ended": self._ended,
            "active": self._active,
            "frame": self._frame,
            "samples": self._samples.between(0, len(self._samples)),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned; UsageError if the value is no state of a voice."""
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"a {type(state).__name__}")
            samples = checked_samples(of_json(state["samples"]), self.windows.speakers)
            first = whole_number(state["first"], "first", 0, MAX_SAMPLE)
            frame = whole_number(state["frame"], "frame", 0, MAX_SAMPLE)
            ended, active = flag(state["ended"], "ended"), flag(state["active"], "active")
        except (KeyError, TypeError, ValueError, UsageError) as fault:
            raise UsageError(f"this is no state of a voice: {fault}; take what state() gave") from None
        self.reset()
        self._first, self._frame, self._ended, self._active = first, frame, ended, active
        self._samples.write(0, samples)
        if self.end:
            self._came.append((self.end, time.monotonic()))

    # -- command line ------------------------------------------------------------------------------------------

    @classmethod
    def events_of(cls, given: Mapping[str, Any]) -> list[Event]:
        """Return the event of ``--audio``: the voice of each file; one that is shorter ends in silence."""
        return [{"samples": read_voices(given["--audio"]), "last": True}]

    @classmethod
    def lacking(cls, inputs: Sequence[InputSpec]) -> str:
        """Return why an artifact with these inputs has no voice."""
        spec = next((spec for spec in inputs if spec.kind == FEATURES), None)
        if spec is not None:
            return (
                f"this artifact hears features of a voice, not its sound: give them as the input {spec.name!r}, "
                f"{spec.dtype} {list(spec.shape)} for every chunk, or rebuild it with --audio-encoder"
            )
        names = ", ".join(spec.name for spec in inputs) or "none"
        return f"this artifact's model hears no audio; its inputs: {names}"


def read_voices(paths: Sequence[Path]) -> NDArray[np.float32]:
    """Return the voices in sound files, float32 [speakers, N] at 16 kHz. A voice that is shorter than the longest one
    is followed by silence; the errors are those of `load_sound`."""
    voices = [load_sound(path) for path in paths]
    longest = max(map(len, voices))
    return np.stack([np.pad(voice, (0, longest - len(voice))) for voice in voices])


def _bytes_of(value: object) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    try:
        if isinstance(value, str):
            return base64.b64decode("".join(value.split()), validate=True)  # MIME breaks lines
    except ValueError:
        pass
    raise UsageError("pcm16 is neither bytes nor base64")


def pcm_samples(pcm16: bytes, speakers: int) -> NDArray[np.float32]:
    """Return samples [speakers, N] of signed 16-bit little-endian sound whose channels are interleaved."""
    whole = len(pcm16) // (2 * speakers) * 2 * speakers
    return np.frombuffer(pcm16[:whole], "<i2").reshape(-1, speakers).T.astype(np.float32) / np.float32(_INT16)


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
            f"audio has {shaped.shape[1]} samples, at most {MAX_HELD} are held ({MAX_HELD_S} s): give it in parts"
        )
    check_magnitude(array, "audio")
    scaled: NDArray[np.float32] = shaped.astype(np.float32) / np.float32(
        _INT16 if array.dtype == np.int16 else 1
    )
    return scaled
