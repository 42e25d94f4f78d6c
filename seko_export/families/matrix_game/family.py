"""The family object of Matrix-Game 2.0; see `families.base.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from seko_export.checkpoints.sources import OpenedFiles
from seko_export.config.video import VideoBuild
from seko_export.families.base import ModelGraph
from seko_export.families.layers.choice import ChunkModule, LayerChoice
from seko_export.families.matrix_game import actions
from seko_export.families.matrix_game.bindings import actions_of
from seko_export.families.matrix_game.keys import ACTION, KEYS, matrix_game_model
from seko_export.families.matrix_game.model import HEAD, MOUSE
from seko_export.families.matrix_game.presets import PRESETS
from seko_export.families.matrix_game.recognise import recognise
from seko_export.families.recognition import Recognised
from seko_export.families.wan_layout import picture_branch, picture_condition
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.video.manifest import VideoManifest

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

    def recognise(
        self, where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None
    ) -> Recognised | None:
        """Return the facts that a checkpoint states about its model; None if it is no Matrix-Game 2.0 checkpoint."""
        return recognise(where, opened, config_json)

    def layer_choice(self, config: VideoBuild) -> LayerChoice:
        """Return the family's additions: the picture's condition and features, of which the features stand in place of
        a text, and the action modules of the first layers."""
        model, s, dtype = matrix_game_model(config.model), config.workload.stream, config.target.dtype
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
            after_cross=lambda _, dtype: actions.ActionModule(model, s, dtype),
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
        return picture_condition.with_picture_program(super().graph(config), config)

    def controls(self, config: VideoBuild, manifest: VideoManifest) -> tuple[ControlSpec, ...]:
        """Return keys and mouse by the game's bindings, beside the runtime's own controls of the build's inputs: the
        picture is cropped and averaged to the video's size, before CLIP sees it, too."""
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
        model, s = matrix_game_model(config.model), config.workload.stream
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
