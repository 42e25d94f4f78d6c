"""From checkpoints' tensors to the artifact's: fused q, k, v; the patch embedding as a matrix; each dtype, fp8 too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seko_export.config.media import VaeConfig
from seko_export.engines.piece import Piece
from seko_export.media.pieces import TEXT_WEIGHTS, VAE_WEIGHTS
from seko_export.media.wan_vae import latent_statistics
from seko_kernels.matmul import quantise_weight

BEFORE = ".before"  # of `fused_block.FusedLayer`
_FP8_WEIGHT, _FP8_SCALE = ".weight_fp8", ".weight_scale"  # of a `fused_block.Fp8Linear`, quantised here


class WanTensors(Protocol):
    """A checkpoint seen through Wan's names: `checkpoints.load.Checkpoint`, or a dictionary in tests."""

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of one Wan name."""


@dataclass(frozen=True)
class MediaTensors:
    """Checkpoints of what stands around the transformer, each by its own names; None where the build has none."""

    text: WanTensors | None = None
    vae: WanTensors | None = None


class VaeTensors:
    """A VAE's checkpoint with the statistics of its latents, which are its config's.

    Parameters
    ----------
    checkpoint : WanTensors
        By Wan's names.
    config : VaeConfig
        Of that VAE.
    """

    def __init__(self, checkpoint: WanTensors, config: VaeConfig) -> None:
        self._checkpoint, self._statistics = checkpoint, latent_statistics(config, torch.float32)

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of one parameter of `VaeDecode` or `VaeEncode`."""
        return self._statistics[name] if name in self._statistics else self._checkpoint[name]


def model_weights(
    pieces: Mapping[str, Piece], checkpoint: WanTensors, media: MediaTensors | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the artifact's model weights in the order in which a chunk uses them.

    Parameters
    ----------
    pieces : mapping of str to Piece
        The build's pieces: they say which weights there are, with shape and dtype.
    checkpoint : WanTensors
        The transformer's, by Wan's names.
    media : MediaTensors, optional
        Those of the other pieces, if the build has them.

    Yields
    ------
    tuple of str and Tensor
        Name in the artifact; CPU tensor, contiguous, in the dtype that the engine takes. A matrix in fp8 is followed
        by its scales.
    """
    sources = {TEXT_WEIGHTS: media and media.text, VAE_WEIGHTS: media and media.vae}
    seen: set[str] = set()
    for piece in pieces.values():
        source = sources.get(piece.prefix) or checkpoint
        own = piece.prefix if piece.prefix in sources else ""
        for layer in piece.served or (0,):
            for argument in piece.parameters:
                name = argument.ref.removeprefix("weight:").replace("{layer}", str(layer))
                if name in seen:  # as the masked and the unmasked block share theirs
                    continue
                seen.add(name)
                if name.endswith(_FP8_WEIGHT):
                    matrix = _gather(name.removesuffix(_FP8_WEIGHT) + ".weight", source)
                    values, scale = quantise_weight(matrix)
                    scale_name = name.removesuffix(_FP8_WEIGHT) + _FP8_SCALE
                    seen.add(scale_name)
                    yield name, values
                    yield scale_name, scale
                    continue
                tensor = _gather(name.removeprefix(own), source)
                yield name, tensor.reshape(argument.shape).to(argument.dtype).contiguous()


def _gather(name: str, checkpoint: WanTensors) -> Tensor:
    if name.endswith(BEFORE):  # of the layer before; the first one's gate meets an update of zeros
        before = int(name.split(".")[1]) - 1
        held = checkpoint[f"blocks.{max(before, 0)}.modulation"]
        return held.clone() if before >= 0 else torch.zeros_like(held)  # files hold no tensor twice
    if ".self_attn.qkv." in name:
        return torch.cat([checkpoint[name.replace(".qkv.", f".{part}.")] for part in "qkv"])
    return checkpoint[name]
