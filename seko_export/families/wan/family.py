"""The family object of Wan 2.1 and Self-Forcing; see `families.base.Family`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from seko_export.checkpoints.key_table import KeyTable
from seko_export.checkpoints.sources import OpenedFiles
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import Piece
from seko_export.engines.weight_source import WeightSource
from seko_export.families.base import MediaTensors, ModelGraph
from seko_export.families.layers.layer_pieces import BLOCK
from seko_export.families.layers.pieces import make_buffers, make_pieces, make_programs
from seko_export.families.layers.weights import model_weights
from seko_export.families.recognition import Recognised
from seko_export.families.video import CacheProbe, Preset, VideoFamily
from seko_export.families.wan.keys import KEYS
from seko_export.families.wan.presets import PRESETS
from seko_export.families.wan_layout.recognise import is_config, recognise


class WanFamily(VideoFamily):
    """Wan 2.1 text-to-video transformers, made causal as in Self-Forcing."""

    name = "wan"
    splits_over_ranks = True

    @property
    def presets(self) -> Mapping[str, Preset]:
        """Named defaults, for ``--preset``."""
        return PRESETS

    @property
    def keys(self) -> KeyTable:
        """Wan's own names, diffusers', and those of Self-Forcing's `.pt`."""
        return KEYS

    def recognise(self, where: str, opened: OpenedFiles, told: Mapping[str, Any] | None) -> Recognised | None:
        """Return what a checkpoint tells about its model, or None if it is not one of Wan's."""
        return recognise(where, opened, told, family=self.name, keys=KEYS)

    def is_config(self, told: Mapping[str, Any]) -> bool:
        """Return whether a config.json may be that of a Wan model."""
        return is_config(told)

    def graph(self, config: VideoBuild) -> ModelGraph:
        """Return engines, programs and buffers of a build."""
        pieces = make_pieces(config)
        return ModelGraph(pieces, make_programs(pieces), make_buffers(config))

    def weights(
        self, pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the artifact's weights by name."""
        return model_weights(pieces, checkpoint, media)

    def cache_probe(self, config: VideoBuild) -> CacheProbe:
        """Return the blocks, with cache arguments ``caches.k`` and ``caches.v``, and the embedding."""
        del config
        return CacheProbe(BLOCK, "embed")


FAMILY = WanFamily()
