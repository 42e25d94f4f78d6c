"""The family object of lingbot-world, which implements `families.base.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from seko_export.checkpoints.sources import OpenedFiles
from seko_export.config.video import VideoBuild
from seko_export.families.base import ModelGraph
from seko_export.families.layers.choice import ChunkModule, LayerChoice
from seko_export.families.layers.rank_split import rank_tokens
from seko_export.families.lingbot import camera
from seko_export.families.lingbot.keys import KEYS, lingbot_model
from seko_export.families.lingbot.model import NO_CAMERA, PER_CHUNK
from seko_export.families.lingbot.presets import PRESETS
from seko_export.families.lingbot.recognise import recognise
from seko_export.families.recognition import Recognised
from seko_export.families.wan_layout import picture_condition as condition
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_runtime.format.manifest import InputSpec

_TOKENS, _LAYER = "camera", "injection"  # names of chunk modules, with which their weights' names begin
# Replacements from the artifact's names of weights to the checkpoint's, which has no such modules.
_NAMES = {f"{_TOKENS}.": "", f".{_LAYER}.": ".", ".after_attention.": "."}


class LingbotFamily(WanLayoutFamily):
    """The family of both versions of lingbot-world-fast, whose inputs are a first picture, text, and a camera."""

    name = "lingbot"
    presets = PRESETS
    keys = KEYS
    module_names = _NAMES

    def layer_choice(self, config: VideoBuild) -> LayerChoice:
        """Return the additions of lingbot-world to the shared transformer layers: the condition on the first picture
        and, if the build has a camera, the camera input."""
        model, s, dtype = lingbot_model(config.model), config.workload.stream, config.target.dtype
        picture_inputs, picture = condition.picture_inputs(config)
        if model.camera == NO_CAMERA:
            return LayerChoice(
                picture_inputs, condition.ConditionedEmbed, (condition.ROWS,), chunk_modules=(picture,)
            )
        inputs = (
            *picture_inputs,
            InputSpec(
                camera.POSES, (s.chunk_frames, 3, 4), "float32", "input.camera", "chunk", kind="camera_poses"
            ),
            InputSpec(
                camera.INTRINSICS,
                (s.chunk_frames, 4),
                "float32",
                "input.intrinsics",
                "chunk",
                kind="camera_intrinsics",
            ),
        )
        per_token = ((rank_tokens(config), model.dim), dtype)
        names = (camera.POSES, camera.INTRINSICS)
        tokens = ChunkModule(
            _TOKENS, camera.CameraTokens, names, lambda _: {camera.TOKENS: per_token}, split=True
        )
        if model.camera == PER_CHUNK:
            by_layer = {camera.SCALE: per_token, camera.SHIFT: per_token}
            injection = ChunkModule(
                _LAYER,
                lambda config: camera.ScaleShift(config.model, config.target.dtype),
                (camera.TOKENS,),
                lambda _: by_layer,
                per_layer=True,
            )
            return LayerChoice(
                inputs,
                condition.ConditionedEmbed,
                (condition.ROWS,),
                after_attention=camera.KeptCamera,
                after_attention_inputs=tuple(by_layer),
                chunk_modules=(picture, tokens, injection),
            )
        return LayerChoice(
            inputs,
            condition.ConditionedEmbed,
            (condition.ROWS,),
            after_attention=camera.CameraInLayer,
            after_attention_inputs=(camera.TOKENS,),
            chunk_modules=(picture, tokens),
        )

    def recognise(
        self, where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None
    ) -> Recognised | None:
        """Return the facts that a checkpoint states about its model; None if it is no lingbot-world checkpoint."""
        return recognise(where, opened, config_json)

    def graph(self, config: VideoBuild) -> ModelGraph:
        """Return the engines, programs, buffers and inputs of a lingbot-world build."""
        return condition.with_picture_program(super().graph(config), config)

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the inputs of the golden (the recorded chunks): a random condition for the session, and for each chunk
        a camera that moves and turns."""
        model, s = lingbot_model(config.model), config.workload.stream
        generator = torch.Generator().manual_seed(7 if chunk is None else 1000 + chunk)
        if chunk is None:
            return {condition.TABLE: condition.golden_table(config, generator)}
        if model.camera == NO_CAMERA:
            return {}
        turn = 0.2 * torch.randn(s.batch, s.chunk_frames, 3, generator=generator)
        poses = torch.cat((_rotation(turn), torch.randn(*turn.shape, 1, generator=generator)), -1)
        frame = torch.tensor([0.6 * s.width, 0.6 * s.width, s.width / 2, s.height / 2])
        return {camera.POSES: poses, camera.INTRINSICS: frame.expand(s.batch, s.chunk_frames, 4).contiguous()}


def _rotation(axis_angle: Tensor) -> Tensor:
    """Return the rotation matrices [..., 3, 3] about the vectors [..., 3]; a vector's length is the angle in
    radians."""
    x, y, z = axis_angle.unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), -1).unflatten(-1, (3, 3))
    turned: Tensor = torch.linalg.matrix_exp(cross)
    return turned


FAMILY = LingbotFamily()
