"""The family object of Wan's image-to-video models; see `families.base.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from seko_export.checkpoints.sources import OpenedFiles
from seko_export.config.video import VideoBuild
from seko_export.families.base import ModelGraph
from seko_export.families.layers.choice import LayerChoice
from seko_export.families.recognition import Recognised
from seko_export.families.wan_i2v.keys import KEYS, i2v_model
from seko_export.families.wan_i2v.presets import PRESETS
from seko_export.families.wan_i2v.recognise import recognise
from seko_export.families.wan_layout import picture_branch, picture_condition
from seko_export.families.wan_layout.family import WanLayoutFamily

GOLDEN_LAST_FRAME = 3  # frame of the golden's last picture, in one of the recorded chunks


class WanI2vFamily(WanLayoutFamily):
    """The family of Wan 2.1 I2V and FLF2V and of Wan 2.2 I2V A14B's experts, made causal."""

    name = "wan_i2v"
    presets = PRESETS
    keys = KEYS
    module_names = picture_branch.MODULE_NAMES

    def recognise(
        self, where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None
    ) -> Recognised | None:
        """Return the facts that a checkpoint states about its model; None if it is no image-to-video checkpoint."""
        return recognise(where, opened, config_json)

    def layer_choice(self, config: VideoBuild) -> LayerChoice:
        """Return the modules and inputs that the family adds to the shared layers: the picture's condition, and the
        picture branch if the model has one."""
        model = i2v_model(config.model)
        inputs, condition = picture_condition.picture_inputs(config, last=model.last_picture)
        embed, taken = picture_condition.ConditionedEmbed, (picture_condition.ROWS,)
        if not model.image_dim:
            return LayerChoice(inputs, embed, taken, chunk_modules=(condition,))
        branch = picture_branch.squashed_branch(config, model.image_eps, positions=model.last_picture)
        seen, modules = picture_branch.picture_branch(config, branch)
        return LayerChoice(
            (*inputs, seen),
            embed,
            taken,
            chunk_modules=(condition,),
            prompt_modules=modules,
            extra_text=(picture_branch.KEYS, picture_branch.VALUES),
        )

    def graph(self, config: VideoBuild) -> ModelGraph:
        """Return the engines, programs, buffers and inputs of an image-to-video build."""
        last = i2v_model(config.model).last_picture
        return picture_condition.with_picture_program(super().graph(config), config, last=last)

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the golden's inputs for the session: a random condition, and random pictures or features for the
        picture branch."""
        model, s = i2v_model(config.model), config.workload.stream
        if chunk is not None:
            return {}
        generator = torch.Generator().manual_seed(7)
        table = picture_condition.golden_table(config, generator, last=model.last_picture)
        inputs: dict[str, Tensor] = {picture_condition.TABLE: table}
        if model.last_picture:
            frames = torch.full((s.batch, 1), GOLDEN_LAST_FRAME, dtype=torch.int64)
            inputs[picture_condition.LAST_FRAME] = frames
        return inputs | picture_branch.golden_pictures(config, generator)


FAMILY = WanI2vFamily()
