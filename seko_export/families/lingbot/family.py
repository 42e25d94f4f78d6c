"""The family object of lingbot-world, which implements `families.base.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.sources import shown
from seko_export.families.base import ModelGraph
from seko_export.families.lingbot.keys import KEYS
from seko_export.families.lingbot.model import CONTROLS, NO_CAMERA, PER_CHUNK, LingbotModel
from seko_export.families.lingbot.presets import PRESETS, V1, V2
from seko_export.families.recognition import Fact, Recognised, Source, stream_facts
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_export.families.wan_layout.recognise import Seen, unused_fields

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.config.video import VideoBuild
    from seko_export.families.layers.choice import LayerChoice

_VERSIONS = {"lingbot_world_fast": V1, "transformers": V2}  # the authors' folder name for each version
_CONTROL = "control_type"
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
        from seko_export.families.layers.choice import (
            INTRINSICS,
            POSES,
            ChunkModule,
            LayerChoice,
            camera_inputs,
        )
        from seko_export.families.layers.rank_split import rank_tokens
        from seko_export.families.lingbot import camera
        from seko_export.families.wan_layout import picture_condition as condition

        model, dtype = LingbotModel.of(config.model), config.target.dtype
        picture_inputs, picture = condition.picture_inputs(config)
        still = LayerChoice(
            picture_inputs, condition.ConditionedEmbed, (condition.ROWS,), chunk_modules=(picture,)
        )
        if model.camera == NO_CAMERA:
            return still
        inputs = (*picture_inputs, *camera_inputs(config))
        per_token = ((rank_tokens(config), model.dim), dtype)
        names = (POSES, INTRINSICS)
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
            return replace(
                still,
                inputs=inputs,
                after_attention=camera.KeptCamera,
                after_attention_inputs=tuple(by_layer),
                chunk_modules=(picture, tokens, injection),
            )
        return replace(
            still,
            inputs=inputs,
            after_attention=camera.CameraInLayer,
            after_attention_inputs=(camera.TOKENS,),
            chunk_modules=(picture, tokens),
        )

    def recognised(self, seen: Seen) -> Recognised | None:
        """Return what is known of a model with the tensors of a camera.

        The two versions of lingbot-world-fast have the same shapes. Their config.json differs only in sink and window,
        which a user may also choose. The folder's name distinguishes the versions. Any other folder name counts as the
        second version of lingbot-world, unless --preset names the first.
        """
        control = seen.config_json.get(_CONTROL)
        if control is not None:
            if not isinstance(control, str) or control not in CONTROLS:
                raise NotACheckpointError(
                    f"{_CONTROL} in the config.json of {seen.where} is {shown(repr(control))}, expected one of "
                    f"{', '.join(CONTROLS)}"
                )
            seen.facts.learn("control_channels", Fact(CONTROLS[control], Source.CONFIG, _CONTROL))
        seen.facts.learn("camera", Fact(PER_CHUNK, Source.FAMILY))
        named = [version for folder, version in _VERSIONS.items() if folder in _folders(seen.where)]
        version = named[0] if named else V2
        preset = PRESETS[version]
        usual = stream_facts(preset.stream, Source.ASSUMED, version)
        if named:
            usual["chunk_frames"] = Fact(preset.stream.chunk_frames, Source.FAMILY, version)
        return seen.as_in(
            version,
            preset,
            stream=usual | seen.layout,
            schedule=Fact(preset.schedule, Source.ASSUMED, version),
            unused=unused_fields(seen.config_json, window=False),
        )

    def graph(self, config: VideoBuild) -> ModelGraph:
        """Return the engines, programs, buffers and inputs of a lingbot-world build."""
        from seko_export.families.wan_layout import picture_condition as condition

        return condition.with_picture_program(super().graph(config), config)

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the inputs of the golden (the recorded chunks): a random condition for the session, and for each chunk
        a camera that moves and turns."""
        import torch

        from seko_export.families.layers.choice import INTRINSICS, POSES
        from seko_export.families.wan_layout import picture_condition as condition

        model, s = LingbotModel.of(config.model), config.workload.stream
        generator = torch.Generator().manual_seed(7 if chunk is None else 1000 + chunk)
        if chunk is None:
            return {condition.TABLE: condition.golden_table(config, generator)}
        if model.camera == NO_CAMERA:
            return {}
        turn = 0.2 * torch.randn(s.batch, s.chunk_frames, 3, generator=generator)
        poses = torch.cat((_rotation(turn), torch.randn(*turn.shape, 1, generator=generator)), -1)
        frame = torch.tensor([0.6 * s.width, 0.6 * s.width, s.width / 2, s.height / 2])
        return {POSES: poses, INTRINSICS: frame.expand(s.batch, s.chunk_frames, 4).contiguous()}


def _rotation(axis_angle: Tensor) -> Tensor:
    """Return the rotation matrices [..., 3, 3] about the vectors [..., 3]; a vector's length is the angle in
    radians."""
    import torch

    x, y, z = axis_angle.unbind(-1)
    zero = torch.zeros_like(x)
    cross = torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), -1).unflatten(-1, (3, 3))
    turned: Tensor = torch.linalg.matrix_exp(cross)
    return turned


def _folders(where: str) -> set[str]:
    """Return the names of a checkpoint's folder and of its known subfolders."""
    path = Path(where)
    home = path if path.is_dir() else path.parent
    return {home.name, *(name for name in _VERSIONS if path.is_dir() and (path / name).is_dir())}


FAMILY = LingbotFamily()
