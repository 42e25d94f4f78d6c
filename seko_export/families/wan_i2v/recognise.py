"""Recognition of an image-to-video model by its keys, shapes and config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seko_export.checkpoints.sources import OpenedFiles
from seko_export.families.recognition import Fact, Facts, Recognised, Source, fill, learn_config
from seko_export.families.wan_i2v.keys import KEYS, POSITIONS
from seko_export.families.wan_i2v.model import WanI2vModel
from seko_export.families.wan_i2v.presets import A14B, FLF2V, I2V, PRESETS
from seko_export.families.wan_layout.keys import PROJECTION
from seko_export.families.wan_layout.picture_sizes import has_condition
from seko_export.families.wan_layout.recognise import recognise as recognise_wan

_FIELDS = {"image_dim": ("image_dim",), "image_tokens": ("image_tokens",)}


def recognise(where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None) -> Recognised | None:
    """Return the facts that a checkpoint and its config.json state about an image-to-video model. The result is None if
    the checkpoint holds no image-to-video model, that is, no model whose input also has a mask and a picture's latents
    besides the noisy latents.

    The keys of a checkpoint show whether the model has a picture branch, and whether the picture branch takes one
    picture or two. The keys of an image-to-video checkpoint do not show the number of features of a single picture.
    This number is CLIP's, unless config.json states another.

    Raises
    ------
    CheckpointError
        If config.json contradicts the keys.
    """
    wan_model = recognise_wan(where, opened, config_json, family="wan_i2v", keys=KEYS)
    if wan_model is None or not has_condition(
        *(wan_model.model[f"{side}_channels"].value for side in ("in", "out"))
    ):
        return None
    facts = Facts(where, dict(wan_model.model))
    shapes = KEYS.naming_of(opened).shapes_in(opened)
    width, positions = shapes.get(f"{PROJECTION}.1.weight", ()), shapes.get(POSITIONS, ())
    pictures = 2 if len(positions) == 3 else 1
    facts.learn("image_dim", Fact(width[0] if width else 0, Source.SHAPES))
    facts.learn("pictures", Fact(pictures, Source.SHAPES))
    if pictures > 1:
        facts.learn("image_tokens", Fact(positions[1] // pictures, Source.SHAPES))
    stated = {name: value for name, value in (config_json or {}).items() if value is not None}
    learn_config(facts, stated, _FIELDS)
    preset = PRESETS[FLF2V if pictures > 1 else I2V if width else A14B]
    fill(facts, {"image_tokens": WanI2vModel.image_tokens}, Source.ASSUMED, preset.model.name)
    fill(facts, {"image_eps": WanI2vModel.image_eps}, Source.FAMILY, "Wan")
    schedule = wan_model.schedule or Fact(preset.schedule, Source.ASSUMED, preset.model.name)
    return replace(wan_model, model=facts.known, schedule=schedule, kind=WanI2vModel)
