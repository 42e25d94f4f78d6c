"""The family object of ABot-World, which implements `families.base.Family`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from seko_export.families.abot.keys import ADAPTER, CONV, KEYS
from seko_export.families.abot.model import KEY_BITS
from seko_export.families.abot.presets import ABOT, PRESETS
from seko_export.families.base import MediaTensors
from seko_export.families.recognition import Fact, Recognised, Source, fill, learn_config, stream_facts
from seko_export.families.wan_layout.family import WanLayoutFamily
from seko_export.families.wan_layout.recognise import Seen, unused_fields
from seko_runtime.controls.actions import BITS, ActionsControl, Binding
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.video.manifest import VideoManifest

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.config.video import VideoBuild
    from seko_export.engines.piece import Piece
    from seko_export.engines.weight_source import WeightSource
    from seko_export.families.layers.choice import LayerChoice

_CHANNELS = 48  # of the latents of Wan 2.2's VAE
_REFERENCES = ("references", "reference_side")
_MOVE, _LOOK = "Move", "Look"  # groups of keys on the page
_MEANINGS = {
    "W": (_MOVE, "ahead"),
    "A": (_MOVE, "left"),
    "S": (_MOVE, "back"),
    "D": (_MOVE, "right"),
    "I": (_LOOK, "up"),
    "J": (_LOOK, "left"),
    "K": (_LOOK, "down"),
    "L": (_LOOK, "right"),
}
_OPPOSITES = ("WS", "AD", "IK", "JL")
_ARROWS = {"I": "ArrowUp", "J": "ArrowLeft", "K": "ArrowDown", "L": "ArrowRight"}
_GAMEPAD = {
    f"axis{axis}{half}": f"Key{key}"
    for axis, keys in enumerate(("AD", "WS", "JL", "IK"))
    for half, key in zip("-+", keys, strict=True)
}


class AbotFamily(WanLayoutFamily):
    """The family of ABot-World, whose inputs are text, a first picture and keys."""

    name = "abot"
    presets = PRESETS
    keys = KEYS
    splits_over_ranks = False

    def layer_choice(self, config: VideoBuild) -> LayerChoice:
        """Return the additions of ABot-World to the shared transformer layers: the keys, which are added to the
        tokens, and the reference tokens before the stream."""
        from seko_export.families.abot import actions
        from seko_export.families.layers.choice import ChunkModule, LayerChoice

        s = config.workload.stream
        shape = (s.chunk_frames, len(KEY_BITS))
        bits = InputSpec(
            actions.ACTIONS, shape, "uint8", f"input.{actions.ACTIONS}", "chunk", default="zeros"
        )
        tokens = {actions.TOKENS: ((s.chunk_tokens, config.model.dim), config.target.dtype)}
        return LayerChoice(
            (bits,),
            actions.KeyedEmbed,
            (actions.TOKENS,),
            front=actions.References if config.model.front_tokens else None,
            chunk_modules=(ChunkModule(ADAPTER, actions.KeyTokens, (actions.ACTIONS,), lambda _: tokens),),
        )

    def recognised(self, seen: Seen) -> Recognised | None:
        """Return what is known of a model with the latents of Wan 2.2's VAE and the adapter of keys; None if it is no
        ABot-World model. No file shows how many reference pictures the model takes, nor its passes: they are its
        authors', unless a config.json states the pictures."""
        if seen.wan.model["in_channels"].value != _CHANNELS:
            return None
        preset, known = PRESETS[ABOT], {"window_positions": Fact(True, Source.FAMILY, ABOT)}
        learn_config(seen.facts, seen.config_json, {name: (name,) for name in _REFERENCES})
        usual = {name: getattr(preset.model, name) for name in _REFERENCES}
        fill(seen.facts, usual, Source.ASSUMED, ABOT)
        return seen.as_in(
            ABOT,
            preset,
            stream=stream_facts(preset.stream, Source.ASSUMED, ABOT) | known | seen.layout,
            schedule=Fact(preset.schedule, Source.FAMILY, ABOT),
            unused=unused_fields(seen.config_json, window=False),
        )

    def weights(
        self, pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the artifact by name."""
        return super().weights(pieces, _SummedKeys(checkpoint), media)

    def controls(self, config: VideoBuild, manifest: VideoManifest) -> tuple[ControlSpec, ...]:
        """Return the control of the keys, looked at once a chunk, as the authors' client does."""
        from seko_export.families.abot import actions

        s = config.workload.stream
        bindings = [
            Binding(
                key,
                (f"Key{key}", *([_ARROWS[key]] if key in _ARROWS else [])),
                key,
                label=f"{pad} {word}",
                pad=pad,
            )
            for key, (pad, word) in _MEANINGS.items()
        ]
        keys = ActionsControl.declared(
            bindings,
            {BITS: actions.ACTIONS},
            chunk_frames=s.chunk_frames,
            temporal_stride=s.temporal_stride,
            fps=s.fps,
            bits=KEY_BITS,
            opposites=tuple(map(tuple, _OPPOSITES)),
            gamepad=_GAMEPAD,
        )
        return (*super().controls(config, manifest), keys)

    def golden_inputs(self, config: VideoBuild, chunk: int | None) -> Mapping[str, Tensor]:
        """Return the inputs of the golden (the recorded chunks): other keys for each latent frame of each chunk."""
        import torch

        from seko_export.families.abot import actions

        if chunk is None:
            return {}
        s, generator = config.workload.stream, torch.Generator().manual_seed(1000 + chunk)
        shape = (s.batch, s.chunk_frames, len(KEY_BITS))
        return {actions.ACTIONS: torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator)}


class _SummedKeys:
    """A checkpoint's weights, with those of the keys summed; see `actions.KeyTokens`."""

    def __init__(self, checkpoint: WeightSource) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> Tensor:
        from seko_export.families.abot import actions

        weight = self._checkpoint[name]
        return actions.summed(weight) if name == f"{CONV}.weight" else weight

    def row_codes(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the e4m3 codes of a stored matrix and a scale for each row; None if it is not stored in e4m3."""
        from seko_export.engines.weight_source import CodedWeights

        return self._checkpoint.row_codes(name) if isinstance(self._checkpoint, CodedWeights) else None


FAMILY = AbotFamily()
