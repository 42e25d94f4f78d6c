"""From a checkpoint's tensors to the artifact's: fused q, k, v; the patch embedding as a matrix; each dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from seko_export.pieces import Piece


class WanTensors(Protocol):
    """A checkpoint seen through Wan's names: `checkpoints.load.Checkpoint`, or a dictionary in tests."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of one Wan name."""


def model_weights(pieces: Mapping[str, Piece], checkpoint: WanTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the artifact's model weights in the order in which a chunk uses them.

    Parameters
    ----------
    pieces : mapping of str to Piece
        The build's pieces: they say which weights there are, with shape and dtype.
    checkpoint : WanTensors
        Source, by Wan's names.

    Yields
    ------
    tuple of str and Tensor
        Name in the artifact; CPU tensor, contiguous, in the dtype that the engine takes.
    """
    seen: set[str] = set()
    for piece in pieces.values():
        for layer in range(max(1, piece.layers)):
            for argument in piece.parameters:
                name = argument.ref.removeprefix("weight:").replace("{layer}", str(layer))
                if name not in seen:  # the masked and the unmasked block share theirs
                    seen.add(name)
                    yield (
                        name,
                        _gather(name, checkpoint).reshape(argument.shape).to(argument.dtype).contiguous(),
                    )


def _gather(name: str, checkpoint: WanTensors) -> Tensor:
    if ".self_attn.qkv." in name:
        return torch.cat([checkpoint[name.replace(".qkv.", f".{part}.")] for part in "qkv"])
    return checkpoint[name]
