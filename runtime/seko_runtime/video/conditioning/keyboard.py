"""A camera that a person steers with keys: w, s, a and d move it, i and k look up and down, j and l turn left and
right."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import iterates, real_number, shown, whole_number
from seko_runtime.errors import UsageError
from seko_runtime.video.conditioning.poses import (
    Array,
    checked_size,
    checked_unit,
    framewise,
    inputs_of,
    recorded_intrinsics,
)
from seko_runtime.video.inputs import LARGEST

KEYS = "wasdijkl"
NONE = "none"
MAX_STEPS = 1_000_000  # most steps that a key string may name
_PART = re.compile(rf"({NONE}|[{KEYS}]+)-([0-9]{{1,7}})", re.ASCII | re.IGNORECASE)
_FULL_WIDTH_COMMA = "\N{FULLWIDTH COMMA}"
_LEAST_LENGTH = 1e-6  # the authors' code adds this to a length before dividing by it
MAX_STEPS_PER_FRAME = 1000
_USUAL_FOCAL_LENGTH = 500.0  # default focal length in pixels, for every picture size


@dataclass(frozen=True)
class KeySettings:
    """The distance and angle by which a held key moves the camera in one step.

    Parameters
    ----------
    steps_per_frame : int
        Number of steps in a latent frame: 4 is a step for each video frame, as in the authors' tool; 1 is a step for
        each latent frame.
    move : float
        Distance that the camera moves in a step.
    yaw, pitch : float
        Angle in degrees by which the camera turns left or right (yaw), and up or down (pitch), in a step.
    pitch_limit : float
        Largest angle, in degrees, by which the camera looks up or down. A step that would exceed the limit does not
        turn the camera at all, as in the authors' tool: steps of 2 degrees end at 84 with a limit of 85.
    unit : float or None
        Distance that becomes 1 in the model's camera input. Default: the distance of a latent frame's steps straight
        ahead.

    Raises
    ------
    UsageError
        If a number of the settings is out of range.
    """

    steps_per_frame: int = 4
    move: float = 0.05
    yaw: float = 2.0
    pitch: float = 2.0
    pitch_limit: float = 85.0
    unit: float | None = None

    def __post_init__(self) -> None:
        whole_number(self.steps_per_frame, "steps_per_frame", 1, MAX_STEPS_PER_FRAME)
        for name, most in (("move", LARGEST), ("yaw", 180.0), ("pitch", 90.0), ("pitch_limit", 90.0)):
            expected = f"a number from 0 to {most:g}"
            if not 0 <= real_number(getattr(self, name), name, expected) <= most:
                raise UsageError(f"{name} is {getattr(self, name)}, expected {expected}")
        if self.unit is not None:
            checked_unit(self.unit)

    @property
    def length(self) -> float:
        """The distance of camera movement that becomes 1 in the model's camera input."""
        return self.unit or self.steps_per_frame * self.move or 1.0


def key_rows(text: str) -> list[frozenset[str]]:
    """Parse a string such as ``w-10,iw-15,none-5`` (keys, a dash, number of steps) to the held keys of each step.

    As in the authors' tool, letters may be upper case, blanks are ignored, and commas may be full-width.

    Raises
    ------
    UsageError
        If a part of the string has another form, or there are too many steps.
    """
    if not isinstance(text, str):
        raise UsageError(f"keys are {shown(text)}, expected a text such as w-10,iw-15,none-5")
    rows: list[frozenset[str]] = []
    for part in "".join(text.replace(_FULL_WIDTH_COMMA, ",").split()).split(","):
        match = _PART.fullmatch(part)
        if match is None or not int(match[2]):
            raise UsageError(
                f"keys {part[:40]!r}: expected keys of {KEYS}, or {NONE}, a dash and a number of steps, as in "
                "w-10,iw-15,none-5"
            )
        if len(rows) + int(match[2]) > MAX_STEPS:
            raise UsageError(f"keys for more than {MAX_STEPS} steps: give fewer")
        keys = match[1].lower()
        rows += [frozenset() if keys == NONE else frozenset(keys)] * int(match[2])
    return rows


class KeyboardCamera:
    """The camera of one stream, steered by pressing and releasing keys; each chunk follows the keys held since the
    last chunk.

    A key that is pressed and released between two chunks counts for one latent frame. The camera's pose is kept as
    position and angles in float64, so that rounding errors do not add up in a long stream.

    Parameters
    ----------
    height, width : int
        The video's size in pixels.
    chunk_frames : int
        Latent frames of a chunk.
    settings : KeySettings
        Length and angle of the camera's steps.
    intrinsics : array, optional
        Camera intrinsics, [4] or [N, 4], of which the first is used: focal lengths and centre in pixels of a picture of
        480 x 832, as `CameraPath` takes them. Default: a focal length of 500 pixels of the video, for any size, and the
        picture's middle.
    keys : str or iterable of sets of str
        Keys that are held in the first steps, as `key_rows` takes or returns them; keys that the person presses follow
        after these steps.

    Raises
    ------
    UsageError
        If the size, the intrinsics or a key is invalid.
    """

    def __init__(
        self,
        height: int,
        width: int,
        chunk_frames: int,
        settings: KeySettings = KeySettings(),
        *,
        intrinsics: object = None,
        keys: str | Iterable[Iterable[str]] = (),
    ) -> None:
        height, width, chunk_frames = checked_size(height, width, chunk_frames)
        if not isinstance(settings, KeySettings):
            raise UsageError(f"settings are {shown(settings)}, expected KeySettings")
        usual = np.array([_USUAL_FOCAL_LENGTH, _USUAL_FOCAL_LENGTH, width / 2, height / 2])
        own = usual if intrinsics is None else recorded_intrinsics(intrinsics, height, width)[0]
        self._intrinsics = np.broadcast_to(own, (chunk_frames, 4))
        self._chunk_frames, self.settings = chunk_frames, settings
        rows = key_rows(keys) if isinstance(keys, str) else _checked_rows(keys)
        self._script = tuple(rows)
        self.reset()

    def reset(self) -> None:
        """Return the camera to its beginning: at the origin, no key held, the keys of the first steps still to come."""
        self._place, self._yaw, self._pitch = np.zeros(3), 0.0, 0.0
        self._pressed: set[str] = set()
        self._pulses: set[str] = set()
        self._queue = deque(self._script)
        self._begun = False

    @property
    def pose(self) -> Array:
        """The camera's pose [4, 4], camera to world."""
        pose = np.eye(4)
        pose[:3, :3] = _about_y(self._yaw) @ _about_x(self._pitch)
        pose[:3, 3] = self._place
        return pose

    @property
    def steps_left(self) -> int:
        """Number of steps still to come among the steps whose keys were passed to the constructor."""
        return len(self._queue)

    def press(self, keys: Iterable[str]) -> None:
        """Hold keys down, from the next chunk on."""
        pressed = _checked(keys)
        self._pulses |= pressed
        self._pressed |= pressed

    def release(self, keys: Iterable[str]) -> None:
        """Release keys that are held down. A key that was pressed since the last chunk still counts for a latent
        frame."""
        self._pressed -= _checked(keys)

    def next_chunk(self) -> dict[str, NDArray[np.float32]]:
        """Move the camera on by a chunk, and return the chunk's camera inputs by name: poses ``camera`` [F, 3, 4], and
        ``intrinsics`` [F, 4].

        The first latent frame of a stream shows the camera's start. Before each later latent frame the camera makes
        `KeySettings.steps_per_frame` steps.
        """
        before = self.pose if self._begun else None
        poses = []
        pulses = set(self._pulses)
        self._pulses.clear()
        for _ in range(self._chunk_frames):
            if self._begun:
                for _ in range(self.settings.steps_per_frame):
                    self._step(self._queue.popleft() if self._queue else self._pressed | pulses)
                pulses.clear()
            self._begun = True
            poses.append(self.pose)
        moved = framewise(np.stack(poses), before)
        moved[:, :, 3] /= self.settings.length
        return inputs_of(moved, self._intrinsics)

    def state(self) -> dict[str, Any]:
        """Return the camera's state as a JSON value, for `load`. Snapshots of a session do not contain the camera's
        state."""
        return {
            "place": self._place.tolist(),
            "yaw": self._yaw,
            "pitch": self._pitch,
            "held": "".join(sorted(self._pressed)),
            "pulses": "".join(sorted(self._pulses)),
            "steps_left": len(self._queue),
            "begun": self._begun,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` of a camera with the same settings and first steps returned.

        Raises
        ------
        UsageError
            If the value is no state of a keyboard camera.
        """
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"a {type(state).__name__}")
            place = np.array(state["place"], np.float64)
            yaw, pitch = real_number(state["yaw"], "yaw"), real_number(state["pitch"], "pitch")
            left = state["steps_left"]
            pressed, pulses = _checked(state["held"]), _checked(state["pulses"])
            begun = state["begun"]
        except (KeyError, TypeError, ValueError, OverflowError) as fault:
            raise UsageError(
                f"this is no state of a keyboard's camera: {fault}; take what state() gave"
            ) from None
        numbers = np.array([*place.ravel(), yaw, pitch])
        whole = type(left) is int and 0 <= left <= len(self._script) and type(begun) is bool
        # a pitch beyond the limit could not be turned back by any step
        level = abs(pitch) <= math.radians(self.settings.pitch_limit)
        if place.shape != (3,) or not np.isfinite(numbers).all() or not whole or not level:
            raise UsageError(
                "this state does not fit this camera; take what state() gave, with the same first steps"
            )
        self._place, self._yaw, self._pitch = place, yaw, pitch
        self._pressed, self._pulses, self._begun = set(pressed), set(pulses), begun
        self._queue = deque(self._script[len(self._script) - left :])

    def _step(self, keys: Iterable[str]) -> None:
        """Turn the camera, then move it over the ground in the direction in which it looks."""
        s, pressed = self.settings, set(keys)

        def signed(forward: str, back: str) -> int:
            return (forward in pressed) - (back in pressed)

        pitch = self._pitch + math.radians(s.pitch) * signed("i", "k")
        if abs(pitch) <= math.radians(s.pitch_limit):
            self._pitch = pitch
        self._yaw += math.radians(s.yaw) * signed("l", "j")
        # The camera's axes projected to the ground: the axis ahead has the length cos(pitch), the axis to the right
        # 1.
        level = math.cos(self._pitch)
        ahead = np.array([math.sin(self._yaw), 0.0, math.cos(self._yaw)]) * (level / (level + _LEAST_LENGTH))
        right = np.array([math.cos(self._yaw), 0.0, -math.sin(self._yaw)]) / (1 + _LEAST_LENGTH)
        self._place = self._place + s.move * (signed("w", "s") * ahead + signed("d", "a") * right)


def _checked_rows(rows: object) -> list[frozenset[str]]:
    """Return the keys of each step; refuse sets and mappings, which have no order, and bytes."""
    if not iterates(rows) or isinstance(rows, Set | Mapping | bytes | bytearray):
        raise UsageError(
            f"keys are {shown(rows)}, expected a text such as w-10, or a list with the keys of each step"
        )
    checked = [_checked(row) for row in islice(cast("Iterable[Iterable[str]]", rows), MAX_STEPS + 1)]
    if len(checked) > MAX_STEPS:
        raise UsageError(f"keys for more than {MAX_STEPS} steps: give fewer")
    return checked


def _checked(keys: Iterable[str]) -> frozenset[str]:
    if (
        not isinstance(keys, Collection)
        or not iterates(keys)
        or isinstance(keys, Mapping | bytes | bytearray)
    ):
        raise UsageError(f"keys are {shown(keys)}, expected some of {', '.join(KEYS)}, as a text or a set")
    names = {key if isinstance(key, str) else shown(key) for key in keys}
    if odd := sorted(key for key in names if key not in tuple(KEYS)):
        raise UsageError(f"key {str(odd[0])[:40]!r} is not known, expected one of {', '.join(KEYS)}")
    return frozenset(names)


def _about_x(angle: float) -> Array:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])


def _about_y(angle: float) -> Array:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])
