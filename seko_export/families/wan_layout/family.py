"""Base class of families with Wan's layers and key names. It and the families import torch where a build needs it:
checkpoints are recognised without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from seko_export.checkpoints.sources import OpenedFiles
from seko_export.errors import UsageError
from seko_export.families.base import MediaTensors, ModelGraph
from seko_export.families.recognition import Facts, Recognised
from seko_export.families.video import CacheProbe, VideoFamily
from seko_export.families.wan_layout.recognise import Seen, is_config, recognise

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.config.video import VideoBuild
    from seko_export.engines.piece import Piece
    from seko_export.engines.weight_source import WeightSource
    from seko_export.families.layers.choice import LayerChoice


class WanLayoutFamily(VideoFamily):
    """A family whose transformer is built from `families.layers`; `layer_choice` returns what the family adds to these
    layers."""

    splits_over_ranks = True
    module_names: ClassVar[Mapping[str, str]] = {}
    """For each part of a weight's name in the artifact: the text that replaces the part in the checkpoint's name; see
    `RenamedWeights`."""

    def layer_choice(self, config: VideoBuild) -> LayerChoice:
        """Return the family's additions to the shared transformer layers of a build."""
        from seko_export.families.layers.choice import PLAIN

        del config
        return PLAIN

    def recognise(
        self, where: str, opened: OpenedFiles, config_json: Mapping[str, Any] | None
    ) -> Recognised | None:
        """Return what Wan's tensors, and the family's own by `recognised`, state about a checkpoint's model."""
        wan = recognise(where, opened, config_json, family=self.name, keys=self.keys)
        if wan is None:
            return None
        shapes = self.keys.naming_of(opened).shapes_in(opened)
        return self.recognised(Seen(where, shapes, config_json or {}, wan, Facts(where, dict(wan.model))))

    def recognised(self, seen: Seen) -> Recognised | None:
        """Return what is known of a model that has all tensors from which the family reads sizes; None if it is of
        another family. The errors are those of `recognise`."""
        return seen.wan

    def is_config(self, config_json: Mapping[str, Any]) -> bool:
        """Return whether a config.json has fields of a Wan model."""
        return is_config(config_json)

    def graph(self, config: VideoBuild) -> ModelGraph:
        """Return the engines, programs, buffers and inputs of a build."""
        from seko_export.families.layers.choice import PLAIN
        from seko_export.families.layers.pieces import make_buffers, make_pieces, make_programs
        from seko_export.families.layers.rolling_pieces import rolling_graph
        from seko_export.families.layers.video_in import video_inputs

        choice = self.layer_choice(config)
        if config.workload.stream.rolling:
            if choice is not PLAIN:
                raise UsageError(
                    f"--rolling: layers of the family {self.name!r} are built for passes over one chunk; leave it out"
                )
            return rolling_graph(config)
        pieces = make_pieces(config, choice)
        inputs = (*choice.inputs, *video_inputs(config))
        programs = make_programs(pieces, config.workload.stream)
        return ModelGraph(pieces, programs, make_buffers(config, choice), inputs)

    def weights(
        self, pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of the artifact by name."""
        from seko_export.families.layers.weights import RenamedWeights, model_weights

        return model_weights(pieces, RenamedWeights(checkpoint, self.module_names), media)

    def cache_probe(self, config: VideoBuild) -> CacheProbe:
        """Return the block as the engine that writes the cache (arguments ``caches.k`` and ``caches.v``), and the
        embedding as the engine that begins each pass."""
        from seko_export.families.layers.layer_pieces import BLOCK

        del config
        return CacheProbe(BLOCK, "embed")
