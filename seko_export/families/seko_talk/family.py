"""The family object of Seko-Talk AR, which implements `families.base.Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from seko_export.config.schedule import Schedule
from seko_export.errors import UsageError
from seko_export.families.recognition import Recognised
from seko_export.families.seko_talk.keys import IN_LAYER, KEYS, PROJECTOR
from seko_export.families.seko_talk.model import SekoTalkModel
from seko_export.families.seko_talk.presets import PRESETS
from seko_export.families.seko_talk.recognise import recognised
from seko_export.families.seko_talk.run_config import read_run_config
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_export.families.wan_layout.picture_sizes import BRANCH_NAMES
from seko_export.families.wan_layout.recognise import Seen
from seko_runtime.controls.voice import FEATURES, NORMALISED, PLAIN, WINDOW
from seko_runtime.format.manifest import InputSpec
from seko_runtime.video.contract import PICTURE_CHANNELS
from seko_runtime.video.schedule import OF_TIMES

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.config.video import VideoBuild
    from seko_export.engines.weight_source import WeightSource
    from seko_export.families.layers.choice import ChunkModule, LayerChoice, PromptModule

# Replacements from the artifact's names of weights, which contain the module, to the checkpoint's names.
_NAMES = {**BRANCH_NAMES, ".tail.": f".{IN_LAYER}."}


class SekoTalkFamily(WanLayoutFamily):
    """The family Seko-Talk AR, whose inputs are a portrait, text, and a voice."""

    name = "seko_talk"
    presets = PRESETS
    keys = KEYS
    module_names = _NAMES

    def layer_choice(self, config: VideoBuild) -> LayerChoice:
        """Return the modules and inputs that Seko-Talk adds to the shared transformer layers.

        Raises
        ------
        UsageError
            If all passes of the build share one KV cache, or the build has no reference frame.
        """
        import torch

        from seko_export.families.layers.choice import SESSION, ChunkModule, LayerChoice
        from seko_export.families.layers.rank_split import rank_tokens
        from seko_export.families.seko_talk import audio, picture
        from seko_export.families.wan_layout import picture_branch
        from seko_export.media.pieces import AUDIO_ENCODER

        model, s, dtype = SekoTalkModel.of(config.model), config.workload.stream, config.target.dtype
        if not s.pass_caches:
            raise UsageError(
                "Seko-Talk has a cache for each denoise pass: give --pass-caches, not --context-pass"
            )
        if not s.reference_frames:
            raise UsageError(
                f"Seko-Talk begins with a reference picture: give --reference-frames 1, not {s.reference_frames}"
            )
        voices = (model.speakers, s.chunk_frames)
        heads = (model.heads, model.head_dim)
        features = (*voices, model.audio_frames, model.audio_dim)
        heard = InputSpec(audio.AUDIO, features, "float32", f"input.{audio.AUDIO}", "chunk", kind=FEATURES)
        encoder: tuple[ChunkModule, ...] = ()
        if config.workload.audio is not None:
            encoded = {audio.HEARD: (features, dtype)}
            encoder = (ChunkModule(AUDIO_ENCODER, audio.AudioFeatures, (audio.AUDIO,), lambda _: encoded),)
            heard = replace(
                heard, shape=(*voices, WINDOW), kind=NORMALISED if config.workload.audio.normalised else PLAIN
            )
        inputs = [heard]
        if model.speakers > 1:
            masks = (model.speakers, s.frame_tokens)
            inputs.append(
                InputSpec(
                    audio.MASKS, masks, "float32", f"input.{audio.MASKS}", per=SESSION, kind="speaker_masks"
                )
            )
        tokens = {
            audio.TOKENS: ((*voices, model.audio_tokens, model.audio_width), dtype),
            audio.GATE: ((model.speakers, rank_tokens(config)), torch.float32),
        }
        projected_heads = ((*voices, model.audio_tokens, *heads), dtype)
        projected = (
            audio.HEARD if encoder else audio.AUDIO,
            *(model_input.name for model_input in inputs[1:]),
        )
        modules = (
            *encoder,
            ChunkModule(PROJECTOR, audio.AudioTokens, projected, lambda _: tokens, numbered=True, split=True),
            ChunkModule(
                IN_LAYER,
                audio.AudioKv,
                (audio.TOKENS,),
                lambda _: dict.fromkeys((audio.KEYS, audio.VALUES), projected_heads),
                per_layer=True,
            ),
        )
        prompt_modules: tuple[PromptModule, ...] = ()
        if model.image_dim:
            seen, prompt_modules = picture_branch.picture_branch(config, picture.portrait_branch(config))
            inputs.append(seen)
        return LayerChoice(
            tuple(inputs),
            picture.ReferenceEmbed,
            tail=audio.AudioAttention,
            tail_inputs=(audio.KEYS, audio.VALUES, audio.GATE, audio.TIMES),
            chunk_modules=modules,
            prompt_modules=prompt_modules,
            extra_text=(picture_branch.KEYS, picture_branch.VALUES) if prompt_modules else (),
            pass_tables={audio.TIMES: ((3, model.dim), dtype)},
        )

    def recognised(self, seen: Seen) -> Recognised | None:
        """Return what is known of a Seko-Talk model, from the files of transformer and audio adapter."""
        return recognised(seen)

    def tables(self, config: VideoBuild, checkpoint: WeightSource) -> Mapping[str, Tensor]:
        """Return the audio adapter's shift, scale and gate of each pass."""
        from seko_export.families.seko_talk import audio

        times = config.workload.schedule.every_timestep
        table = audio.time_table(checkpoint, config.model, times, config.target.dtype)
        return {f"{OF_TIMES}{audio.TIMES}": table}

    def run_config(self, where: str, config_json: Mapping[str, Any]) -> tuple[Mapping[str, Any], Schedule]:
        """Return the fields of the stream's layout and the schedule that a run configuration of LightX2V states."""
        return read_run_config(where, config_json)

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the inputs of the golden (the recorded chunks): random features of the picture for the session; for
        each chunk random audio features, or noise as audio."""
        import torch

        from seko_export.families.seko_talk import audio, picture
        from seko_export.families.wan_layout import picture_branch

        model, s = SekoTalkModel.of(config.model), config.workload.stream
        generator = torch.Generator().manual_seed(7 if chunk is None else 1000 + chunk)
        if chunk is not None:
            heard = (model.audio_frames, model.audio_dim) if config.workload.audio is None else (WINDOW,)
            voices = (s.batch, model.speakers, s.chunk_frames, *heard)
            return {audio.AUDIO: torch.randn(voices, generator=generator)}
        inputs = {}
        if config.workload.image is not None:
            portraits = (s.batch, s.height, s.width, PICTURE_CHANNELS)
            inputs[picture.PORTRAIT] = torch.randint(256, portraits, generator=generator, dtype=torch.uint8)
        elif model.image_dim:
            features = (s.batch, model.image_tokens, model.image_dim)
            inputs[picture_branch.FEATURES] = torch.randn(features, generator=generator)
        if model.speakers > 1:
            places = torch.randint(model.speakers, (s.batch, 1, s.frame_tokens), generator=generator)
            inputs[audio.MASKS] = (places == torch.arange(model.speakers)[:, None]).float()
        return inputs


FAMILY = SekoTalkFamily()
