"""Recognition of a Matrix-Game 2.0 model by its keys and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.key_table import layer_of
from seko_export.checkpoints.sources import OpenedFiles
from seko_export.families.matrix_game.keys import ACTION, KEYS, VIDEO_PER_LATENT, matrix_game_model
from seko_export.families.matrix_game.model import GAMES, MatrixGameModel, no_game
from seko_export.families.matrix_game.presets import PRESETS
from seko_export.families.recognition import Fact, Facts, Recognised, Source, fill, learn_config, stream_facts
from seko_export.families.wan_layout.recognise import recognise as recognise_wan

_FOUNDATION_LAYER = 15  # the distilled models have action modules in the layers before it
_TEXT = ("text_dim", "text_tokens")  # fields that a config.json may have, and the model has not


def recognise(where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None) -> Recognised | None:
    """Return the facts that a checkpoint states about a Matrix-Game 2.0 model; None if it holds none.

    The keyboard's width and the mouse tell the games apart, and so their keys, rings and times.

    Raises
    ------
    NotACheckpointError
        If the file holds the foundation model, or a keyboard that no game has.
    """
    wan_model = recognise_wan(where, opened, config_json, family="matrix_game", keys=KEYS)
    if wan_model is None:
        return None
    shapes = KEYS.naming_of(opened).shapes_in(opened)
    layers = {layer_of(name) for name in shapes if f".{ACTION}." in name}
    if _FOUNDATION_LAYER in layers:
        raise NotACheckpointError(
            f"{where} is Matrix-Game 2.0's foundation model (it has blocks.{_FOUNDATION_LAYER}.{ACTION}), which makes "
            "no video in few passes: take one of the distilled models, such as "
            "base_distilled_model/base_distill.safetensors"
        )
    facts = Facts(where, {name: fact for name, fact in wan_model.model.items() if name not in _TEXT})
    mouse = f"blocks.0.{ACTION}.mouse_mlp.0.weight"
    facts.learn("mouse", Fact(mouse in shapes, Source.SHAPES))
    facts.learn("action_layers", Fact(len(layers), Source.SHAPES))
    window = shapes[f"blocks.0.{ACTION}.keyboard_attn_kv.weight"][1]
    facts.learn(
        "seen_latents",
        Fact(window // (VIDEO_PER_LATENT * facts.known["keyboard_width"].value), Source.SHAPES),
    )
    keys = (facts.known["keyboard"].value, facts.known["mouse"].value)
    if keys not in GAMES:
        raise NotACheckpointError(f"{where}: {no_game(*keys)}")
    name = next(
        name
        for name, preset in PRESETS.items()
        if (model := matrix_game_model(preset.model)) and (model.keyboard, model.mouse) == keys
    )
    preset = PRESETS[name]
    stated = {field: value for field, value in (config_json or {}).items() if value is not None}
    learn_config(facts, stated, {"image_tokens": ("image_tokens",)})
    fill(facts, {"image_tokens": MatrixGameModel.image_tokens}, Source.ASSUMED, name)
    own = {"text_dim": 0, "text_tokens": 0, "image_eps": MatrixGameModel.image_eps}
    fill(facts, own | {"action_theta": MatrixGameModel.action_theta}, Source.FAMILY, "Matrix-Game")
    layout = {field: fact for field, fact in wan_model.stream.items() if fact.is_read}
    return replace(
        wan_model,
        model=facts.known,
        stream=stream_facts(preset.stream, Source.ASSUMED, name) | layout,
        schedule=wan_model.schedule or Fact(preset.schedule, Source.ASSUMED, name),
        kind=MatrixGameModel,
    )
