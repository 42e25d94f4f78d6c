"""How held keys move a camera: the size of a step, and where a camera stands that walks or flies."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seko_runtime.arguments import LARGEST, real_number, shown, whole_number
from seko_runtime.controls.poses import Array, checked_poses, checked_unit
from seko_runtime.errors import UsageError

# What a direction does in a step: distance ahead, to the right and up, turns up and to the right.
STEPS = {
    "ahead": (1, 0, 0, 0, 0),
    "back": (-1, 0, 0, 0, 0),
    "left": (0, -1, 0, 0, 0),
    "right": (0, 1, 0, 0, 0),
    "up": (0, 0, 1, 0, 0),
    "down": (0, 0, -1, 0, 0),
    "look_up": (0, 0, 0, 1, 0),
    "look_down": (0, 0, 0, -1, 0),
    "look_left": (0, 0, 0, 0, -1),
    "look_right": (0, 0, 0, 0, 1),
}
MAX_STEPS_PER_FRAME = 1000
_STRAIGHT = 90.0  # degrees, the largest limit
_LEAST_LENGTH = 1e-6  # the authors' code adds this to a length before dividing by it


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
        turn the camera at all, as in the authors' tool: steps of 2 degrees end at 84 with a limit of 85. A camera that
        flies has no limit.
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
        for name, most in (("move", LARGEST), ("yaw", 180.0), ("pitch", 90.0), ("pitch_limit", _STRAIGHT)):
            expected = f"a number from 0 to {most:g}"
            if not 0 <= real_number(getattr(self, name), name, expected) <= most:
                raise UsageError(f"{name} is {getattr(self, name)}, expected {expected}")
        if self.unit is not None:
            checked_unit(self.unit)

    @property
    def length(self) -> float:
        """The distance of camera movement that becomes 1 in the model's camera input."""
        return self.unit or self.steps_per_frame * self.move or 1.0


@dataclass(frozen=True)
class Stand:
    """Where the camera stands: position and angles in float64, so that rounding errors do not add up."""

    place: Array = field(default_factory=lambda: np.zeros(3))
    yaw: float = 0.0
    pitch: float = 0.0

    @property
    def pose(self) -> Array:
        """The camera's pose [4, 4], camera to world."""
        pose = np.eye(4)
        pose[:3, :3] = _about_y(self.yaw) @ _about_x(self.pitch)
        pose[:3, 3] = self.place
        return pose

    def stepped(self, held: Collection[str], how: KeySettings) -> Stand:
        """Turn the camera, then move it over the ground in the direction in which it looks."""
        forward, aside, rise, up, turn = _summed(held)
        pitch = self.pitch + math.radians(how.pitch) * up
        # Where the limit was lowered, the camera may be beyond it, and steps back are taken.
        if abs(pitch) > max(math.radians(how.pitch_limit), abs(self.pitch)):
            pitch = self.pitch
        yaw = self.yaw + math.radians(how.yaw) * turn
        # The camera's axes projected to the ground: the axis ahead has the length cos(pitch), the axis to the right
        # 1.
        level = math.cos(pitch)
        ahead = np.array([math.sin(yaw), 0.0, math.cos(yaw)]) * (level / (level + _LEAST_LENGTH))
        right = np.array([math.cos(yaw), 0.0, -math.sin(yaw)]) / (1 + _LEAST_LENGTH)
        above = np.array([0.0, -1.0, 0.0])
        return Stand(self.place + how.move * (forward * ahead + aside * right + rise * above), yaw, pitch)

    def state(self) -> dict[str, Any]:
        """Return the numbers as a JSON value."""
        return {"place": self.place.tolist(), "yaw": self.yaw, "pitch": self.pitch}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Stand:
        """Return the stand of a `state`; ValueError or UsageError if there is none."""
        stand = cls(
            finite_numbers(state["place"], (3,)),
            real_number(state["yaw"], "yaw"),
            real_number(state["pitch"], "pitch"),
        )
        if abs(stand.pitch) > math.radians(_STRAIGHT):
            raise ValueError("pitch is beyond straight up or down")
        return stand


@dataclass(frozen=True)
class Flight:
    """Where a camera stands that flies: its pose [4, 4], camera to world, in float64."""

    pose: Array = field(default_factory=lambda: np.eye(4))

    def stepped(self, held: Collection[str], how: KeySettings) -> Flight:
        """Turn the camera, then move it, both along its own axes."""
        forward, aside, rise, up, turn = _summed(held)
        pose = self.pose.copy()
        pose[:3, :3] @= _about_y(math.radians(how.yaw) * turn) @ _about_x(math.radians(how.pitch) * up)
        pose[:3, 3] += how.move * (pose[:3, :3] @ np.array([aside, -rise, forward]))
        return Flight(pose)

    def state(self) -> dict[str, Any]:
        """Return the pose as a JSON value."""
        return {"pose": self.pose.tolist()}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Flight:
        """Return the stand of a `state`; ValueError or UsageError if there is none."""
        return cls(checked_poses(finite_numbers(state["pose"], (4, 4))[None])[0])


def _summed(held: Collection[str]) -> tuple[int, ...]:
    """Return the steps of held directions: ahead, to the right, up, turned up, turned to the right."""
    ahead, right, up, look_up, look_right = (sum(STEPS[word][axis] for word in held) for axis in range(5))
    return ahead, right, up, look_up, look_right


def finite_numbers(value: object, shape: tuple[int, ...]) -> Array:
    """Return finite numbers of this shape as float64; ValueError for other values."""
    array = np.array(value, np.float64)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"{shown(value)} is no {list(shape)} of finite numbers")
    return array


def _about_x(angle: float) -> Array:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])


def _about_y(angle: float) -> Array:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[c, 0.0, s], [0.0, 1.0, 0.0], [-s, 0.0, c]])
