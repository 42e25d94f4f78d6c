"""The parts of a token embedding that stays on the host, cut from a checkpoint's."""

from __future__ import annotations

import torch
from torch import Tensor

from seko_export.config.media import TextEncoderConfig
from seko_export.engines.weight_source import WeightSource

EMBEDDING = "token_embedding.weight"
EMBEDDING_PARTS = "token_embedding.parts."


class WithEmbeddingParts:
    """The weights of a text encoder, in which the rows of the token embedding also have names of equal parts.

    Parameters
    ----------
    weights : WeightSource
        The weights by Wan's names.
    config : TextEncoderConfig
        The encoder's dimensions, which say how many parts there are.
    """

    def __init__(self, weights: WeightSource, config: TextEncoderConfig) -> None:
        self._weights, self._parts = weights, config.embedding_parts
        self._whole: Tensor | None = None  # while parts are asked for, so that a file is read once

    def __getitem__(self, name: str) -> Tensor:
        if not name.startswith(EMBEDDING_PARTS):
            return self._weights[name]
        part = int(name.removeprefix(EMBEDDING_PARTS).partition(".")[0])
        whole = self._weights[EMBEDDING] if self._whole is None else self._whole
        self._whole = None if part == self._parts - 1 else whole
        return torch.chunk(whole, self._parts)[part].clone()
