"""The family object of minWM, which implements `families.base.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from seko_export.families.minwm.keys import KEYS, PROJECTION
from seko_export.families.minwm.model import NO_CAMERA, PER_CHUNK, MinwmModel
from seko_export.families.minwm.presets import MINWM, PRESETS
from seko_export.families.recognition import Fact, Recognised, Source
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_export.families.wan_layout.recognise import Seen
from seko_runtime.controls.camera import KEYS as LOOK_AND_MOVE
from seko_runtime.controls.camera import CameraControl
from seko_runtime.format.manifest import ControlSpec
from seko_runtime.video.manifest import VideoManifest

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.config.video import VideoBuild
    from seko_export.families.layers.choice import LayerChoice

_FOCAL = 0.5  # in sizes of the picture, as the authors' script has it
_STEP, _TURN = 0.08, 3.0  # of a key in a latent frame; degrees
_KEYS = {**LOOK_AND_MOVE, "KeyE": "up", "KeyQ": "down"}


class MinwmFamily(WanLayoutFamily):
    """The family of minWM's camera model, whose inputs are text and a camera."""

    name = "minwm"
    presets = PRESETS
    keys = KEYS
    splits_over_ranks = False
    module_names: ClassVar = {".extra_attention.": ".self_attn."}

    def recognised(self, seen: Seen) -> Recognised | None:
        """Return what is known of a model with a second projection behind self-attention; None if it is no minWM
        model. The layout of streams and the passes are its authors', unless a config.json states them."""
        if f"blocks.0.{PROJECTION}.weight" not in seen.shapes:
            return None
        seen.facts.learn("camera", Fact(PER_CHUNK, Source.FAMILY))
        return seen.as_in(MINWM, PRESETS[MINWM])

    def layer_choice(self, config: VideoBuild) -> LayerChoice:
        """Return the additions of minWM to the shared transformer layers: the camera's attention, if the build has a
        camera."""
        import torch

        from seko_export.families.layers.choice import (
            INTRINSICS,
            PLAIN,
            POSES,
            ChunkModule,
            LayerChoice,
            camera_inputs,
        )
        from seko_export.families.minwm import camera

        s = config.workload.stream
        if MinwmModel.of(config.model).camera == NO_CAMERA:
            return PLAIN
        turn = camera.CameraTurn(s.cache_frames)
        matrices = dict.fromkeys((camera.MATRIX, camera.INVERSE), ((s.chunk_frames, 4, 4), torch.float32))
        return LayerChoice(
            camera_inputs(config),
            extra_attention=lambda model, dtype: camera.CameraAttention(model, turn, dtype),
            extra_turn=turn,
            extra_attention_inputs=(camera.MATRIX, camera.INVERSE),
            recall={camera.KEPT: ((4, 4), torch.float32)},
            chunk_modules=(
                ChunkModule("matrices", camera.CameraMatrices, (POSES, INTRINSICS), lambda _: matrices),
            ),
        )

    def controls(self, config: VideoBuild, manifest: VideoManifest) -> tuple[ControlSpec, ...]:
        """Return the camera with the authors' steps and lens, beside the runtime's other controls."""
        from seko_export.families.layers.choice import INTRINSICS, POSES

        usual, s = super().controls(config, manifest), config.workload.stream
        own = CameraControl.declared(
            s.height,
            s.width,
            POSES,
            INTRINSICS,
            _KEYS,
            world=True,
            free=True,
            focal=(_FOCAL * s.width, _FOCAL * s.height),
            steps_per_frame=1,
            move=_STEP,
            yaw=_TURN,
            pitch=_TURN,
            unit=1.0,
        )
        return tuple(own if spec.kind == "camera" else spec for spec in usual)

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the inputs of the golden (the recorded chunks): another camera for each latent frame, turned and
        moved, with a lens that differs along x and y."""
        import torch

        from seko_export.families.layers.choice import INTRINSICS, POSES

        if chunk is None or MinwmModel.of(config.model).camera == NO_CAMERA:
            return {}
        s, generator = config.workload.stream, torch.Generator().manual_seed(1000 + chunk)
        rows = (s.batch, s.chunk_frames)
        turn = torch.linalg.qr(torch.eye(3) + 0.3 * torch.randn(*rows, 3, 3, generator=generator)).Q
        turn = turn * torch.linalg.det(turn)[..., None, None]  # rotations, and no reflections
        poses = torch.cat((turn, 0.5 * torch.randn(*rows, 3, 1, generator=generator)), -1)
        lens = torch.tensor([0.5 * s.width, 0.8 * s.height, 0.5 * s.width, 0.5 * s.height])
        return {POSES: poses, INTRINSICS: lens.expand(*rows, 4).contiguous()}


FAMILY = MinwmFamily()
