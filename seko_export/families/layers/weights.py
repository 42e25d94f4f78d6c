"""Conversion of a checkpoint's tensors to the artifact's weights: fuses q, k and v, reshapes the patch embedding,
casts, quantises to fp8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from seko_export.engines.piece import Piece
from seko_export.engines.weight_source import CodedWeights, WeightSource
from seko_export.families.base import MediaTensors
from seko_export.media.pieces import (
    AUDIO_ENCODER,
    IMAGE_ENCODER,
    TEXT_WEIGHTS,
    VAE_ENCODER_WEIGHTS,
    VAE_WEIGHTS,
)
from seko_kernels.matmul import quantise_weight

_QKV = ".self_attn.qkv."
BEFORE = ".before"  # names of the linear layers of `fused_block.FusedLayer`
# names of the tensors of a `fused_block.Fp8Linear`, which are quantised here
_FP8_WEIGHT, _FP8_SCALE = ".weight_fp8", ".weight_scale"


class RenamedWeights:
    """A view of a checkpoint's weights by the artifact's names, which contain the module of each weight.

    Parameters
    ----------
    checkpoint : WeightSource
        The weights by the checkpoint's own names.
    names : mapping of str to str
        For each part of a weight's name in the artifact: the text that replaces the part in the checkpoint's name.
    """

    def __init__(self, checkpoint: WeightSource, names: Mapping[str, str]) -> None:
        self._checkpoint, self._names = checkpoint, names

    def __getitem__(self, name: str) -> Tensor:
        return self._checkpoint[self._theirs(name)]

    def row_codes(self, name: str) -> tuple[Tensor, Tensor] | None:
        """Return the e4m3 codes of a stored matrix and a scale for each row; None if the matrix is not stored in
        e4m3.
        """
        checkpoint = self._checkpoint
        return checkpoint.row_codes(self._theirs(name)) if isinstance(checkpoint, CodedWeights) else None

    def _theirs(self, name: str) -> str:
        for ours, theirs in self._names.items():
            name = name.replace(ours, theirs, 1)
        return name


def model_weights(
    pieces: Mapping[str, Piece], checkpoint: WeightSource, media: MediaTensors | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the model for the artifact, in the order in which a chunk uses them.

    Parameters
    ----------
    pieces : mapping of str to Piece
        The engines of the build. Their signatures determine the weights, with shape and dtype.
    checkpoint : WeightSource
        Weights of the transformer, by Wan's names.
    media : MediaTensors, optional
        Weights of text encoder, VAE, audio and image encoder, if the build has them.

    Yields
    ------
    tuple of str and Tensor
        Name of a weight in the artifact, and a contiguous CPU tensor in the engine's dtype. The scales of an fp8 matrix
        follow the matrix.
    """
    sources = {
        TEXT_WEIGHTS: media and media.text,
        VAE_WEIGHTS: media and media.vae,
        VAE_ENCODER_WEIGHTS: media and media.vae_encoder,
        f"{AUDIO_ENCODER}.": media and media.audio,
        f"{IMAGE_ENCODER}.": media and media.image,
    }
    known_names: set[str] = set()
    for piece in pieces.values():
        there = (prefix for prefix, source in sources.items() if source is not None)
        own = next((prefix for prefix in there if piece.prefix.startswith(prefix)), "")
        source = sources.get(own) or checkpoint
        for layer in piece.served or (0,):
            for argument in piece.parameters:
                name = argument.ref.removeprefix("weight:").format(layer=layer)
                if name in known_names:  # engines may share weights, as the masked and the unmasked block do
                    continue
                known_names.add(name)
                if name.endswith(_FP8_WEIGHT):
                    values, scale = _in_fp8(name.removesuffix(_FP8_WEIGHT) + ".weight", source)
                    scale_name = name.removesuffix(_FP8_WEIGHT) + _FP8_SCALE
                    known_names.add(scale_name)
                    yield name, values
                    yield scale_name, scale
                    continue
                tensor = _gather(name.removeprefix(own), source)
                yield name, tensor.reshape(argument.shape).to(argument.dtype).contiguous()


def _in_fp8(name: str, checkpoint: WeightSource) -> tuple[Tensor, Tensor]:
    """Return a matrix in e4m3 with a scale for each row: as the checkpoint stores it if it is stored in e4m3, otherwise
    quantised."""
    parts = [name.replace(".qkv.", f".{part}.") for part in "qkv"] if _QKV in name else [name]
    if isinstance(checkpoint, CodedWeights):
        stored = [checkpoint.row_codes(part) for part in parts]
        coded = [pair for pair in stored if pair is not None]
        if len(coded) == len(parts):
            codes = torch.cat([pair[0].view(torch.uint8) for pair in coded]).view(coded[0][0].dtype)
            return codes, torch.cat([pair[1] for pair in coded])
    return quantise_weight(_gather(name, checkpoint))


def _gather(name: str, checkpoint: WeightSource) -> Tensor:
    # modulation of the previous layer; zeros for the first layer, whose update is zeros, too
    if name.endswith(BEFORE):
        before = int(name.split(".")[1]) - 1
        modulation = checkpoint[f"blocks.{max(before, 0)}.modulation"]
        # a copy, because a file holds no tensor twice
        return modulation.clone() if before >= 0 else torch.zeros_like(modulation)
    if _QKV in name:
        return torch.cat([checkpoint[name.replace(".qkv.", f".{part}.")] for part in "qkv"])
    return checkpoint[name]
