"""The controls that an artifact's inputs make possible, by the inputs' kinds: for builds whose family declares no
others, and for artifacts whose manifest does not list its controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from seko_runtime.controls.camera import CameraControl
from seko_runtime.controls.masks import KIND as MASKS
from seko_runtime.controls.masks import MasksControl
from seko_runtime.controls.voice import KINDS as VOICE_KINDS
from seko_runtime.controls.voice import RATE as VOICE_RATE
from seko_runtime.controls.voice import VoiceControl
from seko_runtime.format.manifest import ControlSpec, InputSpec


class Layout(Protocol):
    """The part of a video stream's layout that controls need."""

    @property
    def height(self) -> int:
        """Height of the video in pixels."""

    @property
    def width(self) -> int:
        """Width of the video in pixels."""

    @property
    def fps(self) -> int:
        """Video frames a second."""

    @property
    def video_frames_per_latent(self) -> int:
        """Video frames of a latent frame after the first."""

    @property
    def cache_frames(self) -> int:
        """Latent frames that the cache holds, by which a session may step back."""

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of a latent frame."""

    @property
    def frame_tokens(self) -> int:
        """Tokens of a latent frame."""


def derived_controls(inputs: Sequence[InputSpec], stream: Layout) -> tuple[ControlSpec, ...]:
    """Return the controls for the inputs that a caller supplies."""
    by_kind = {spec.kind: spec.name for spec in inputs}
    kinds = {spec.name: spec.kind for spec in inputs}
    specs = []
    if {"camera_poses", "camera_intrinsics"} <= set(by_kind):
        poses, intrinsics = by_kind["camera_poses"], by_kind["camera_intrinsics"]
        specs.append(CameraControl.declared(stream.height, stream.width, poses, intrinsics))
    heard = next((name for name, kind in kinds.items() if kind in VOICE_KINDS), None)
    if heard is not None and VOICE_RATE % stream.fps == 0:
        specs.append(
            VoiceControl.declared(
                heard,
                fps=stream.fps,
                per_latent=stream.video_frames_per_latent,
                normalised=VOICE_KINDS[str(kinds[heard])],
                kept_frames=stream.cache_frames,
            )
        )
    if MASKS in by_kind:
        _, rows, columns = stream.latent_shape
        side = round((rows * columns / stream.frame_tokens) ** 0.5)  # of a token, in latent cells
        layout = {
            "height": stream.height,
            "width": stream.width,
            "rows": rows // side,
            "columns": columns // side,
        }
        specs.append(MasksControl.declared(by_kind[MASKS], **layout))
    return tuple(specs)
