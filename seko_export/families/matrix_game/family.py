"""The family object of Matrix-Game 2.0; see `families.base.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.key_table import layer_of
from seko_export.families.base import ModelGraph
from seko_export.families.matrix_game.keys import ACTION, KEYS, VIDEO_PER_LATENT
from seko_export.families.matrix_game.model import GAMES, HEAD, MOUSE, MatrixGameModel, no_game
from seko_export.families.matrix_game.presets import PRESETS
from seko_export.families.recognition import Fact, Recognised, Source, fill, learn_config
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_export.families.wan_layout.recognise import Seen
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.video.manifest import VideoManifest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from seko_export.config.video import VideoBuild
    from seko_export.families.layers.choice import LayerChoice

_FOUNDATION_LAYER = 15  # the distilled models have action modules in the layers before it
_TEXT = ("text_dim", "text_tokens")  # fields that a config.json may have, and the model has not
_KEYBOARD = "keyboard"  # name of a chunk module, with which its weights' names begin


class MatrixGameFamily(WanLayoutFamily):
    """The family of Matrix-Game 2.0's distilled models: universal, GTA and TempleRun."""

    name = "matrix_game"
    presets = PRESETS
    keys = KEYS
    splits_over_ranks = False  # a position attends over time, and ranks share a chunk by its frames
    module_names: ClassVar = {
        ".picture.": ".cross_attn.",
        f".{_KEYBOARD}.": f".{ACTION}.",
        ".after_cross.": f".{ACTION}.",
    }

    def recognised(self, seen: Seen) -> Recognised | None:
        """Return what is known of a model with action modules. The keyboard's width and the mouse tell the games apart,
        and so their keys, rings and times.

        Raises
        ------
        NotACheckpointError
            If the file holds the foundation model, or a keyboard that no game has.
        """
        layers = {layer_of(name) for name in seen.shapes if f".{ACTION}." in name}
        if _FOUNDATION_LAYER in layers:
            raise NotACheckpointError(
                f"{seen.where} is Matrix-Game 2.0's foundation model (it has blocks.{_FOUNDATION_LAYER}.{ACTION}), "
                "which makes no video in few passes: take one of the distilled models, such as "
                "base_distilled_model/base_distill.safetensors"
            )
        facts = seen.facts
        for name in _TEXT:
            facts.known.pop(name, None)
        facts.learn("mouse", Fact(f"blocks.0.{ACTION}.mouse_mlp.0.weight" in seen.shapes, Source.SHAPES))
        facts.learn("action_layers", Fact(len(layers), Source.SHAPES))
        window = seen.shapes[f"blocks.0.{ACTION}.keyboard_attn_kv.weight"][1]
        width = facts.known["keyboard_width"].value
        facts.learn("seen_latents", Fact(window // (VIDEO_PER_LATENT * width), Source.SHAPES))
        keys = (facts.known["keyboard"].value, facts.known["mouse"].value)
        if keys not in GAMES:
            raise NotACheckpointError(f"{seen.where}: {no_game(*keys)}")
        models = ((name, MatrixGameModel.of(preset.model)) for name, preset in PRESETS.items())
        name = next(name for name, model in models if (model.keyboard, model.mouse) == keys)
        learn_config(facts, seen.config_json, {"image_tokens": ("image_tokens",)})
        fill(facts, {"image_tokens": MatrixGameModel.image_tokens}, Source.ASSUMED, name)
        own = {"text_dim": 0, "text_tokens": 0, "image_eps": MatrixGameModel.image_eps}
        fill(facts, own | {"action_theta": MatrixGameModel.action_theta}, Source.FAMILY, "Matrix-Game")
        return seen.as_in(name, PRESETS[name])

    def layer_choice(self, config: VideoBuild) -> LayerChoice:
        """Return the family's additions: the picture's condition and features, of which the features stand in place of
        a text, and the action modules of the first layers."""
        import torch

        from seko_export.families.layers.choice import ChunkModule, LayerChoice
        from seko_export.families.matrix_game import actions
        from seko_export.families.wan_layout import picture_branch, picture_condition

        model, s, dtype = MatrixGameModel.of(config.model), config.workload.stream, config.target.dtype
        frames, heads = actions.input_frames(config), (model.action_heads, HEAD)
        picture, condition = picture_condition.picture_inputs(config)
        branch = picture_branch.squashed_branch(config, model.image_eps)
        seen, prompt_modules = picture_branch.picture_branch(config, branch)
        keyboard = _input(actions.KEYBOARD_INPUT, frames, model.keyboard)
        mouse = (_input(actions.MOUSE_INPUT, frames, MOUSE),) if model.mouse else ()
        turns = (s.chunk_frames, 4)
        shown: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            actions.COS: (turns, torch.float32),
            actions.SIN: (turns, torch.float32),
            actions.KEYS: ((s.chunk_frames, actions.history_frames(config), model.keyboard), dtype),
        }
        kept: dict[str, tuple[int, ...]] = {actions.KEY_K_CACHE: heads, actions.KEY_V_CACHE: heads}
        if model.mouse:
            shown[actions.MOVES] = ((s.chunk_frames, MOUSE * actions.history_frames(config)), dtype)
            of_mouse = (s.frame_tokens, *heads)
            kept |= {actions.MOUSE_K_CACHE: of_mouse, actions.MOUSE_V_CACHE: of_mouse}
        of_keys = dict.fromkeys((actions.KEY_K, actions.KEY_V), ((s.chunk_frames, *heads), dtype))
        return LayerChoice(
            (*picture, seen, keyboard, *mouse),
            picture_condition.ConditionedEmbed,
            (picture_condition.ROWS,),
            after_cross=lambda _, dtype: actions.ActionModule(model, s, dtype, fused=config.target.fused),
            after_cross_inputs=(
                actions.COS,
                actions.SIN,
                *((actions.MOVES,) if model.mouse else ()),
                *of_keys,
            ),
            first_layers=model.action_layers,
            recall={name: (shape, dtype) for name, shape in kept.items()},
            chunk_modules=(
                condition,
                ChunkModule(
                    "actions",
                    actions.SeenActions,
                    (keyboard.name, *(spec.name for spec in mouse)),
                    lambda _: shown,
                    numbered=True,
                ),
                ChunkModule(
                    _KEYBOARD,
                    actions.KeyboardKv,
                    (actions.KEYS, actions.COS, actions.SIN),
                    lambda _: of_keys,
                    per_layer=True,
                ),
            ),
            prompt_modules=prompt_modules,
            context=(picture_branch.KEYS, picture_branch.VALUES),
        )

    def graph(self, config: VideoBuild) -> ModelGraph:
        """Return the engines, programs, buffers and inputs of a build."""
        from seko_export.families.wan_layout import picture_condition

        return picture_condition.with_picture_program(super().graph(config), config)

    def controls(self, config: VideoBuild, manifest: VideoManifest) -> tuple[ControlSpec, ...]:
        """Return keys and mouse by the game's bindings, beside the runtime's own controls of the build's inputs: the
        picture is cropped and averaged to the video's size, before CLIP sees it, too."""
        from seko_export.families.matrix_game.bindings import actions_of

        usual = super().controls(config, manifest)
        fitted = {"averaged": True, "seen_fitted": True}
        own = (
            replace(spec, parameters={**spec.parameters, **fitted}) if spec.kind == "pictures" else spec
            for spec in usual
        )
        return (*own, actions_of(config))

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the golden's inputs: a random condition and random features or pictures for the session, and for each
        chunk keys that change from video frame to video frame and a mouse that moves."""
        import torch

        from seko_export.families.matrix_game import actions
        from seko_export.families.wan_layout import picture_branch, picture_condition

        model, s = MatrixGameModel.of(config.model), config.workload.stream
        generator = torch.Generator().manual_seed(7 if chunk is None else 1000 + chunk)
        if chunk is None:
            return {
                picture_condition.TABLE: picture_condition.golden_table(config, generator),
                **picture_branch.golden_pictures(config, generator),
            }
        frames = (s.batch, actions.input_frames(config))
        pressed = torch.rand(*frames, model.keyboard, generator=generator).round()
        inputs = {actions.KEYBOARD_INPUT: pressed}
        if model.mouse:
            inputs[actions.MOUSE_INPUT] = 0.2 * torch.rand(*frames, MOUSE, generator=generator) - 0.1
        return inputs


def _input(name: str, frames: int, numbers: int) -> InputSpec:
    return InputSpec(name, (frames, numbers), "float32", f"input.{name}", "chunk", kind="actions")


FAMILY = MatrixGameFamily()
