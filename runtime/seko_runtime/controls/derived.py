"""The controls that an artifact's inputs make possible, by the inputs' kinds: for builds whose family declares no
others, and for artifacts whose manifest does not list its controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from seko_runtime.controls.camera import CameraControl
from seko_runtime.format.manifest import ControlSpec, InputSpec


class Layout(Protocol):
    """The part of a video stream's layout that controls need."""

    @property
    def height(self) -> int:
        """Height of the video in pixels."""

    @property
    def width(self) -> int:
        """Width of the video in pixels."""


def derived_controls(inputs: Sequence[InputSpec], stream: Layout) -> tuple[ControlSpec, ...]:
    """Return the controls for the inputs that a caller supplies."""
    by_kind = {spec.kind: spec.name for spec in inputs}
    specs = []
    if {"camera_poses", "camera_intrinsics"} <= set(by_kind):
        poses, intrinsics = by_kind["camera_poses"], by_kind["camera_intrinsics"]
        specs.append(CameraControl.declared(stream.height, stream.width, poses, intrinsics))
    return tuple(specs)
