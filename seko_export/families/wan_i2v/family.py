"""The family object of Wan's image-to-video models; see `families.base.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seko_export.families.base import ModelGraph
from seko_export.families.recognition import Fact, Recognised, Source, fill, learn_config
from seko_export.families.wan_i2v.keys import KEYS, POSITIONS
from seko_export.families.wan_i2v.model import WanI2vModel
from seko_export.families.wan_i2v.presets import A14B, FLF2V, I2V, PRESETS
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_export.families.wan_layout.keys import PROJECTION
from seko_export.families.wan_layout.picture_sizes import BRANCH_NAMES
from seko_export.families.wan_layout.recognise import Seen

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.config.video import VideoBuild
    from seko_export.families.layers.choice import LayerChoice

GOLDEN_LAST_FRAME = 3  # frame of the golden's last picture, in one of the recorded chunks


class WanI2vFamily(WanLayoutFamily):
    """The family of Wan 2.1 I2V and FLF2V and of Wan 2.2 I2V A14B's experts, made causal."""

    name = "wan_i2v"
    presets = PRESETS
    keys = KEYS
    module_names = BRANCH_NAMES

    def recognised(self, seen: Seen) -> Recognised | None:
        """Return what is known of a model whose input has a picture's condition, too; None for any other.

        The keys show whether the model has a picture branch, and whether the branch takes one picture or two. They do
        not show the number of features of a single picture, which is CLIP's, unless config.json states another.
        """
        if not seen.has_condition:
            return None
        facts, shapes = seen.facts, seen.shapes
        width, positions = shapes.get(f"{PROJECTION}.1.weight", ()), shapes.get(POSITIONS, ())
        pictures = 2 if len(positions) == 3 else 1
        facts.learn("image_dim", Fact(width[0] if width else 0, Source.SHAPES))
        facts.learn("pictures", Fact(pictures, Source.SHAPES))
        if pictures > 1:
            facts.learn("image_tokens", Fact(positions[1] // pictures, Source.SHAPES))
        learn_config(facts, seen.config_json, {name: (name,) for name in ("image_dim", "image_tokens")})
        name = FLF2V if pictures > 1 else I2V if width else A14B
        fill(facts, {"image_tokens": WanI2vModel.image_tokens}, Source.ASSUMED, name)
        fill(facts, {"image_eps": WanI2vModel.image_eps}, Source.FAMILY, "Wan")
        return seen.as_in(name, PRESETS[name], stream=seen.wan.stream)

    def layer_choice(self, config: VideoBuild) -> LayerChoice:
        """Return the modules and inputs that the family adds to the shared layers: the picture's condition, and the
        picture branch if the model has one."""
        from seko_export.families.layers.choice import LayerChoice
        from seko_export.families.wan_layout import picture_branch, picture_condition

        model = WanI2vModel.of(config.model)
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
        from seko_export.families.wan_layout import picture_condition

        last = WanI2vModel.of(config.model).last_picture
        return picture_condition.with_picture_program(super().graph(config), config, last=last)

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the golden's inputs for the session: a random condition, and random pictures or features for the
        picture branch."""
        import torch

        from seko_export.families.wan_layout import picture_branch, picture_condition

        model, s = WanI2vModel.of(config.model), config.workload.stream
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
