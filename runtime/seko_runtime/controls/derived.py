"""The controls that an artifact's inputs make possible, by the inputs' kinds: for builds whose family declares no
others, and for artifacts whose manifest does not list its controls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from seko_runtime.controls.camera import CameraControl
from seko_runtime.controls.masks import KIND as MASKS
from seko_runtime.controls.masks import MasksControl
from seko_runtime.controls.pictures import CONDITION_KIND, WORDS
from seko_runtime.controls.voice import KINDS as VOICE_KINDS
from seko_runtime.controls.voice import RATE as VOICE_RATE
from seko_runtime.controls.voice import VoiceControl
from seko_runtime.format.manifest import ControlSpec, InputSpec

# Buffers of pictures: of the encoder, and of the program that makes a condition of one or two.
IMAGE, PICTURE_LEVELS, LAST_PICTURE_LEVELS = "image", "picture.levels", "picture.last_levels"


class Layout(Protocol):
    """The part of a video stream's layout that controls need."""

    @property
    def height(self) -> int:
        """Height of the video in pixels."""

    @property
    def width(self) -> int:
        """Width of the video in pixels."""

    @property
    def chunk_frames(self) -> int:
        """Latent frames of a chunk."""

    @property
    def reference_frames(self) -> int:
        """Largest number of reference pictures."""

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


def derived_controls(
    inputs: Sequence[InputSpec],
    stream: Layout,
    programs: Collection[str],
    pictures: Mapping[str, tuple[int, ...]],
    lacking: int,
) -> tuple[ControlSpec, ...]:
    """Return the controls for the inputs that a caller supplies.

    Parameters
    ----------
    inputs : sequence of InputSpec
        The inputs.
    stream : Layout
        The layout of the stream.
    programs : collection of str
        Names of the artifact's programs.
    pictures : mapping of str to tuple of int
        Shapes of the buffers of pictures, by name.
    lacking : int
        Video frames that the first latent frame lacks.
    """
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
    levels = CONDITION_KIND in by_kind and "condition" in programs
    size = pictures.get(PICTURE_LEVELS if levels else IMAGE, (stream.height, stream.width))
    encodes = levels or "encode" in programs
    if encodes or stream.reference_frames:
        parameters: dict[str, object] = {
            "height": size[0],
            "width": size[1],
            "chunk_frames": stream.chunk_frames,
            "per_latent": stream.video_frames_per_latent,
            "lacking": lacking,
            "fps": stream.fps,
            "start": encodes,
            "last": LAST_PICTURE_LEVELS in pictures,
            "levels": levels,
            "reference_frames": stream.reference_frames,
            "portrait": bool(stream.reference_frames) and heard is not None,
        }
        names = {word: by_kind[kind] for word, kind in WORDS.items() if kind in by_kind}
        specs.append(ControlSpec("pictures", "pictures", names, parameters))
    return tuple(specs)
