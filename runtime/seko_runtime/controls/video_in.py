"""The control ``video_in``: the video that a session turns into another one, and how much of it stays."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import as_array, flag, real_number, whole_number
from seko_runtime.controls.base import MEDIA, Control, ControlOption, Event, one_of, parameters_of
from seko_runtime.controls.fitting import cover_pictures
from seko_runtime.controls.recording import of_json
from seko_runtime.controls.strengths import VideoInParameters, moved
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.media_files.films import Film

KIND = "video_in"
FRAMES, STRENGTH, TIMES = "frames", "strength", "times"  # words of the inputs
# Kinds of the inputs per chunk: frames uint8 [T, H, W, 3]; the share of noise in the first latents, float32 [1]; the
# factors of the passes' times and of their noise levels, float32 [2].
FRAMES_KIND, STRENGTH_KIND, TIMES_KIND = "video_frames", "noise_strength", "time_scale"
TAKEN, DROPPED, REPEATED = "frames taken", "dropped", "repeated"  # what is counted
HELD_CHUNKS = 2  # most frames that wait for the next chunk, in chunks
_AXES = 3  # axes of a frame: rows, columns, channels
_SLOWEST = 1e-6  # frames of a clip a second; the length of a slower one may be infinite
_EARLY = 1e-3  # seconds by which a frame may come before its time, for times that were rounded


class VideoInControl(Control):
    """The video that comes into one session.

    Frames that come live (the event ``frame``) are spread over the next chunk: thinned evenly where more came than it
    takes, repeated where fewer did. A film (``clip``) is played at its own rate from the stream's beginning, and its
    last frame stays when it has ended.
    """

    kind = KIND
    options: ClassVar = (
        ControlOption(
            "--video",
            "FILE",
            "for artifacts built with --strength: the video to turn into another one (MP4, WebM, picture); needs PyAV",
            MEDIA,
            file=True,
        ),
        ControlOption(
            "--strength",
            "S",
            "with --video: how much of the video is replaced, from 0 (nothing) to 1 (all); default: as built",
            MEDIA,
        ),
    )
    fits_recording = False  # recorded frames are no video

    def __init__(self, spec: ControlSpec, inputs: Mapping[str, InputSpec]) -> None:
        super().__init__(spec, inputs)
        self.takes, own = parameters_of(VideoInParameters, spec), inputs[FRAMES]
        p = self.takes
        if own.shape[1:] != (p.height, p.width, 3) or own.dtype != "uint8" or p.first_frames > own.shape[0]:
            raise UsageError(
                f"its input {own.name!r} is {own.dtype} {list(own.shape)}, expected uint8 [frames, {p.height}, "
                f"{p.width}, 3] with at least {p.first_frames} frames"
            )
        for word, size in ((STRENGTH, 1), (TIMES, 2)):
            if inputs[word].shape != (size,) or inputs[word].dtype != "float32":
                raise UsageError(f"its input {inputs[word].name!r} is no float32 [{size}]")
        if not p.shift > 0:
            raise UsageError(f"its shift is {p.shift}, expected a positive number")
        self.strength = self._checked_strength(p.strength)
        self._follows_motion = bool(p.first_time)
        self._clip: _Clip | None = None
        self.reset()

    @staticmethod
    def declared(frames: str, strength: str, times: str, parameters: VideoInParameters) -> ControlSpec:
        """Return the manifest's entry of an input video, whose inputs have these names."""
        return ControlSpec(KIND, KIND, {FRAMES: frames, STRENGTH: strength, TIMES: times}, asdict(parameters))

    def reset(self) -> None:
        """Forget the frames that came; a clip begins again, and the strength stays."""
        self._came: deque[tuple[NDArray[np.uint8], float]] = (
            deque()
        )  # frames since the last chunk, with their times
        self._last: NDArray[np.uint8] | None = None  # newest frame that a chunk has used
        self._ended = False
        self._made: _Made | None = None  # of the next chunk, while nothing has changed
        self._chunks = 0
        self._level = self.strength  # of the last chunk
        self._counts = dict.fromkeys((TAKEN, DROPPED, REPEATED), 0)
        if self._clip is not None:
            self._clip = _Clip(self._clip.source, self._clip.fps, self.takes.height, self.takes.width)

    @property
    def active(self) -> bool:
        """Whether a frame or a clip has come."""
        return self._clip is not None or self._last is not None or bool(self._came)

    @property
    def chunks(self) -> int | None:
        """Number of chunks that a clip lasts; None if its length is not known, or the video is live."""
        if self._clip is None or self._clip.seconds is None:
            return None
        frames = max(1, round(self._clip.seconds * self.takes.fps))
        each = self.inputs[FRAMES].shape[0]
        return 1 + max(0, -(-(frames - self.takes.first_frames) // each))

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers of frames: ``frames taken``, which came or were read of a film; ``dropped``, which no chunk has used;
        and ``repeated``, how often a chunk used a frame again because no newer one was there."""
        return {**self._counts}

    def ready(self) -> bool:
        """Return whether a frame has come, which the next chunk can use."""
        return self.active

    def describe(self) -> dict[str, Any]:
        """Return the events with their schemas, the ``video`` that a page sends, how strength is set, and the counts of
        the frames so far."""
        p = self.takes
        return {
            "events": {
                "frame": {
                    "frame": {
                        "type": "array",
                        "description": f"uint8 [rows, columns, 3], best {p.height} x {p.width}, or several",
                    },
                    "dropped": {"type": "integer", "minimum": 0},
                },
                "strength": {"strength": {"type": "number", "minimum": p.least, "maximum": 1}},
                "clip": {"clip": {"type": "array"}, "fps": {"type": "number", "exclusiveMinimum": 0}},
                "end": {"end": {"const": True}},
                **({"motion": {"motion": {"type": "boolean"}}} if p.first_time else {}),
            },
            "video": {"height": p.height, "width": p.width, "fps": p.fps},
            "strength": {"minimum": p.least, "maximum": 1, "default": p.strength, "value": self.strength},
            "frames": {**self._counts},
        }

    # -- events ------------------------------------------------------------------------------------------------

    def check(self, event: Event) -> Event:
        """Return an event with checked values.

        Parameters
        ----------
        event : mapping
            One of the following. Frames are uint8 [rows, columns, 3] of any size: the centre is cut out and resized.

            ``frame``: a frame that is shown from now on, or several that came one after another, [N, ...]; and
            ``dropped``, how many frames the sender has left out before it, for the counts.

            ``strength``: how much of the video is replaced, from 0 (nothing) to 1 (all of it).

            ``motion``: whether the strength falls where the video moves; for models that follow it.

            ``clip``: a whole video, which begins with the next chunk: [N, rows, columns, 3] at ``fps`` frames a second
            (default: the model's rate), or a `Film`, which has times of its own.

            ``end``: True, no frame follows: the last one stays.
        """
        known = {"frame": ("dropped",), "strength": (), "motion": (), "clip": ("fps",), "end": ()}
        which, values = one_of(event, known, "a video")
        if which == "strength":
            values["strength"] = self._checked_strength(values["strength"])
        elif which == "motion":
            if not self.takes.first_time:
                raise UsageError("the strength of this artifact does not follow motion; leave out motion")
            flag(values["motion"], "motion")
        elif which == "end":
            if not flag(values["end"], "end"):
                raise UsageError("end is False, expected True")
        elif which == "frame":
            values["frame"] = _frames(values["frame"], "a frame")
            if "dropped" in values:
                values["dropped"] = whole_number(values["dropped"], "dropped", 0)
        elif isinstance(values["clip"], Film):
            if "fps" in values:
                raise UsageError("fps is given beside a film, which has times of its own; leave it out")
        elif isinstance(values["clip"], str):
            raise UsageError(
                f"the clip is named {values['clip'][:200]!r} and not here: a recording does not hold the frames of a "
                "file; take the film itself"
            )
        else:
            values["clip"] = _frames(values["clip"], "a clip")
            if "fps" in values:
                values["fps"] = real_number(values["fps"], "fps", "a positive number of frames a second")
                if values["fps"] < _SLOWEST:
                    raise UsageError(
                        f"fps is {values['fps']}, expected a positive number of frames a second, from {_SLOWEST:g} on"
                    )
        return values

    def _as_recorded(self, event: Event) -> Event:
        """Return an event with a film's name in place of its frames."""
        film = event.get("clip")
        return {"clip": str(film.path)} if isinstance(film, Film) else event

    def _apply(self, event: Event) -> None:
        if "strength" in event:
            self.strength = event["strength"]
            return
        if "motion" in event:
            self._follows_motion = event["motion"]
            return
        if "end" in event:
            self._ended = True
            return
        self._made = None
        if "clip" in event:
            fps = event.get("fps", float(self.takes.fps))
            self._clip = _Clip(event["clip"], fps, self.takes.height, self.takes.width)
            self._chunks, self._last = 0, None
            self._came.clear()
            return
        self._clip, self._ended = None, False
        now = time.monotonic()
        for frame in event["frame"]:
            self._came.append((frame, now))
        over = len(self._came) - HELD_CHUNKS * self.inputs[FRAMES].shape[0]
        left_out = event.get("dropped", 0)
        self._count(taken=len(event["frame"]) + left_out, dropped=max(0, over) + left_out)
        for _ in range(over):
            self._came.popleft()

    def _checked_strength(self, value: object) -> float:
        strength = real_number(value, "strength", most=1)
        if strength < self.takes.least:
            raise UsageError(f"strength is {strength}, this artifact takes {self.takes.least:g} to 1")
        return strength

    def _count(self, *, taken: int = 0, dropped: int = 0, repeated: int = 0) -> None:
        for name, number in ((TAKEN, taken), (DROPPED, dropped), (REPEATED, repeated)):
            self._counts[name] += number

    # -- chunks ------------------------------------------------------------------------------------------------

    def next_chunk(self) -> Mapping[str, NDArray[Any]]:
        """Return the frames [T, H, W, 3] of the next chunk, of which a stream's first chunk uses the last ones, and the
        strength as the share of noise and as the factor of the passes' times.

        Raises
        ------
        UsageError
            If no frame has come.
        DecodingError
            If a film has no frame that can be decoded.
        """
        if not self.active:
            raise UsageError(
                f"no frame of the input video has come: give one to the control {self.name!r}, as "
                "{'frame': uint8 [rows, columns, 3]}, or the inputs "
                f"{', '.join(repr(spec.name) for spec in self.inputs.values())}"
            )
        if self._made is None:
            count = self.inputs[FRAMES].shape[0] if self._chunks else self.takes.first_frames
            made = self._live(count) if self._clip is None else self._of_clip(self._clip, count)
            empty = self.inputs[FRAMES].shape[0] - count
            padded = np.concatenate((np.zeros((empty, *made.frames.shape[1:]), np.uint8), made.frames))
            self._made = _Made(padded, made.dropped, made.repeated, made.came, made.taken)
        share, factors = self.takes.levels(self._next_level(self._made))
        return {
            self.inputs[FRAMES].name: self._made.frames,
            self.inputs[STRENGTH].name: share,
            self.inputs[TIMES].name: factors,
        }

    def _next_level(self, made: _Made) -> float:
        """Return the strength of the next chunk: what was said, or less of it where the video moves."""
        if not self._follows_motion:
            return self.strength
        own = made.frames if self._chunks else made.frames[-self.takes.first_frames :]
        seen = own if self._last is None or not self._chunks else np.concatenate((self._last[None], own))
        return moved(self.strength, self._level if self._chunks else self.strength, seen)

    def _live(self, count: int) -> _Made:
        """Return ``count`` frames of those that came since the last chunk."""
        came = [frame for frame, _ in self._came]
        if not came:
            if self._last is None:
                raise UsageError("no frame of the input video has come")
            return _Made(np.stack([self._last] * count), 0, count, None, 0)
        # the newest frame is always used
        chosen = [-(-(at + 1) * len(came) // count) - 1 for at in range(count)]
        fitted = {at: self._fitted(came[at]) for at in sorted({*chosen})}
        frames = np.stack([fitted[at] for at in chosen])
        used = len(fitted)
        return _Made(frames, len(came) - used, count - used, self._came[-1][1], len(came))

    def _of_clip(self, clip: _Clip, count: int) -> _Made:
        before = self._chunks and self.takes.first_frames + (self._chunks - 1) * self.inputs[FRAMES].shape[0]
        frames, taken, dropped, repeated = [], 0, 0, 0
        for at in range(count):
            passed, frame = clip.at((before + at) / self.takes.fps)
            taken += passed
            dropped += max(0, passed - 1)
            repeated += passed == 0
            frames.append(frame)
        return _Made(np.stack(frames), dropped, repeated, None, taken)

    def _fitted(self, frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return cover_pictures(frame, self.takes.height, self.takes.width)[0]

    def advance(self) -> None:
        """Move on by the chunk that `next_chunk` gave last."""
        made, self._made = self._made, None
        if made is None:  # the caller gave the frames
            self._chunks += 1
            return
        self._level = self._next_level(made)
        self._chunks += 1
        self._last = made.frames[-1]
        if self._clip is not None:
            self._count(taken=made.taken, dropped=made.dropped, repeated=made.repeated)
            return
        for _ in range(min(made.taken, len(self._came))):
            self._came.popleft()
        self._count(dropped=made.dropped, repeated=made.repeated)

    def heard_at(self) -> float | None:
        """Return the time, by `time.monotonic`, at which the newest frame of the next chunk came."""
        return None if self._made is None else self._made.came

    def state(self) -> dict[str, Any]:
        """Return the strength, and the frames that wait or stay, for `load`; a clip goes on only as its last frame."""
        return {
            "strength": self.strength,
            "motion": self._follows_motion,
            "level": self._level,
            "last": self._last,
            "came": [self._fitted(frame) for frame, _ in self._came],
            "chunks": self._chunks,
            "counts": {**self._counts},
        }

    def beside_state(self) -> Sequence[Event]:
        """Return the clip."""
        if self._clip is None:
            return ()
        own_rate = isinstance(self._clip.source, Film)
        return ({"clip": self._clip.source, **({} if own_rate else {"fps": self._clip.fps})},)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned; UsageError for any other value."""
        try:
            strength = self._checked_strength(state["strength"])
            motion, level = flag(state["motion"], "motion"), real_number(state["level"], "level", most=1)
            last, came = of_json(state["last"]), [of_json(frame) for frame in state["came"]]
            shape = self.inputs[FRAMES].shape[1:]
            for frame in (*came, *([] if last is None else [last])):
                if frame.shape != shape or frame.dtype != np.uint8:
                    raise ValueError(f"a frame is {frame.dtype} {list(frame.shape)}")
            if len(came) > HELD_CHUNKS * self.inputs[FRAMES].shape[0]:
                raise ValueError(f"{len(came)} frames wait")
            chunks = whole_number(state["chunks"], "chunks", 0)
            counts = {name: whole_number(state["counts"][name], name, 0) for name in self._counts}
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, UsageError) as fault:
            raise UsageError(f"this is no state of an input video: {fault}; take what state() gave") from None
        self._clip = None
        self.reset()
        self.strength, self._last, self._chunks, self._counts = strength, last, chunks, counts
        self._follows_motion, self._level = motion and bool(self.takes.first_time), level
        self._came.extend((frame, time.monotonic()) for frame in came)

    def go_to(self, frame: int) -> None:
        """Go on at a latent frame; only the first chunk of a stream differs from others."""
        chunks = max(self._chunks, 1) if frame else 0
        if chunks != self._chunks:
            self._chunks, self._made = chunks, None

    # -- command line ------------------------------------------------------------------------------------------

    @classmethod
    def events_of(cls, given: Mapping[str, Any]) -> list[Event]:
        """Return the events of ``--video`` and ``--strength``."""
        events: list[Event] = []
        if "--strength" in given:
            try:
                events.append({"strength": float(given["--strength"])})
            except ValueError:
                raise UsageError(
                    f"--strength {given['--strength']!r}: expected a number from 0 to 1"
                ) from None
        if "--video" in given:
            events.append({"clip": Film(Path(given["--video"]))})
        return events

    @classmethod
    def lacking(cls, inputs: Sequence[InputSpec]) -> str:
        """Return why an artifact takes no video."""
        del inputs
        return "this artifact takes no video; rebuild it with --strength S and a VAE that encodes"


@dataclass(frozen=True)
class _Made:
    """The frames of a chunk, uint8 [T, H, W, 3]; how many were dropped before it, repeated in it, and taken for it; and
    the time at which the newest one came."""

    frames: NDArray[np.uint8]
    dropped: int
    repeated: int
    came: float | None
    taken: int


class _Clip:
    """A clip that is played from its beginning: frames [N, rows, columns, 3] at a rate, or a film."""

    def __init__(self, source: NDArray[np.uint8] | Film, fps: float, height: int, width: int) -> None:
        self.source, self.fps = source, fps
        self._size = (height, width)
        self._frames: Iterator[tuple[float, NDArray[np.uint8]]] = (
            source.frames(height, width)
            if isinstance(source, Film)
            else ((number / fps, frame) for number, frame in enumerate(source))
        )
        self._shown: NDArray[np.uint8] | None = None
        self._following = next(self._frames, None)

    @property
    def seconds(self) -> float | None:
        """Length of the clip in seconds; None if it is not known."""
        return self.source.duration_s if isinstance(self.source, Film) else len(self.source) / self.fps

    def at(self, second: float) -> tuple[int, NDArray[np.uint8]]:
        """Return how many frames were read since the last call, and the frame that is shown at a time, which must not
        be before that of the last call."""
        passed, newest = 0, None
        while self._following is not None:
            if self._following[0] > second + _EARLY and not (self._shown is None and newest is None):
                break
            newest, passed = self._following[1], passed + 1
            self._following = next(self._frames, None)
        if newest is not None:
            self._shown = cover_pictures(newest, *self._size)[0]
        if self._shown is None:
            raise UsageError("the clip has no frame")
        return passed, self._shown


def _frames(value: object, what: str) -> NDArray[np.uint8]:
    """Return frames [N, rows, columns, 3], a copy, of one frame or several."""
    array = as_array(value, what)
    if array.ndim == _AXES:
        array = array[None]
    if array.ndim != _AXES + 1 or array.shape[-1] != 3 or 0 in array.shape or array.dtype != np.uint8:
        raise UsageError(
            f"{what} is {array.dtype} {list(np.shape(array))}, expected uint8 [rows, columns, 3]: red, green, blue"
        )
    return np.array(array)
