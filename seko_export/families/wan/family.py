"""The family object of Wan 2.1 and Self-Forcing; see `families.base.Family`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from seko_export.checkpoints.keys import wan_shapes
from seko_export.config.build import BuildConfig
from seko_export.config.model import ModelConfig
from seko_export.engines.piece import Piece
from seko_export.engines.weight_source import WeightSource
from seko_export.families.base import CacheProbe, Family, MediaTensors, ModelGraph, Preset
from seko_export.families.wan.layer_pieces import BLOCK
from seko_export.families.wan.pieces import make_buffers, make_pieces, make_programs
from seko_export.families.wan.presets import PRESETS
from seko_export.families.wan.weights import model_weights


class WanFamily(Family):
    """Wan 2.1 text-to-video transformers, made causal as Self-Forcing does."""

    name = "wan"

    @property
    def presets(self) -> Mapping[str, Preset]:
        """Named defaults, for ``--preset``."""
        return PRESETS

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor of a checkpoint, by Wan's own names."""
        return wan_shapes(model)

    def graph(self, config: BuildConfig) -> ModelGraph:
        """Return engines, programs and buffers of a build."""
        pieces = make_pieces(config)
        return ModelGraph(pieces, make_programs(pieces), make_buffers(config))

    def weights(
        self, pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the artifact's weights by name."""
        return model_weights(pieces, checkpoint, media)

    def cache_probe(self, config: BuildConfig) -> CacheProbe:
        """Return the blocks, whose cache arguments are ``caches.k`` and ``caches.v``, and the embedding."""
        del config
        return CacheProbe(BLOCK, "embed")


FAMILY = WanFamily()
