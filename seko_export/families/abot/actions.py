"""The modules of the keys and of the reference tokens.

Shapes use the letters that `layers.causal_dit` defines; h and w are the rows and columns of a latent frame's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.stream import PATCH
from seko_export.config.video import VideoBuild
from seko_export.families.abot.model import KEY_BITS, AbotModel
from seko_export.families.layers.causal_dit import Embed
from seko_export.families.layers.front_tokens import FrontEmbed

ACTIONS = "actions"  # name of the caller's input
TOKENS = "action_tokens"
_REFERENCE_STEP = 256  # least distance of two reference pictures along time


class KeyTokens(nn.Module):
    """The adapter of keys: what is added to each token of a chunk, computed once a chunk.

    The authors spread each key over a picture of constant channels, unshuffle its pixels and apply a convolution of 2 x
    2 with stride 2. Every patch of such a picture is the same, so `conv` has for each key the sum of the weights of its
    channels, pixels and patch (`summed`). The convolutions after it see zeros outside of the picture, so tokens near
    its border differ.
    """

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        d, dtype, s = config.model.dim, config.target.dtype, config.workload.stream
        self.grid = (s.latent_height // PATCH, s.latent_width // PATCH)
        self.conv = nn.Linear(len(KEY_BITS), d, dtype=dtype)
        self.residual_blocks = nn.ModuleList([ResidualBlock(d, dtype)])

    def forward(self, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return what is added to the tokens, [B, T, d], from bits [B, F, 8] uint8."""
        bits = conditioning[ACTIONS]
        x = self.conv(bits.to(self.conv.weight.dtype)).flatten(0, 1)  # [B*F, d]
        x = x[..., None, None].expand(-1, -1, *self.grid)
        for block in self.residual_blocks:
            x = block(x)
        tokens: Tensor = x.unflatten(0, bits.shape[:2]).flatten(3).transpose(2, 3).flatten(1, 2)
        return tokens


class ResidualBlock(nn.Module):
    """Two convolutions of 3 x 3 with zero padding, and the input added to their result."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, dtype=dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the result [N, d, h, w] for x of the same shape."""
        result: Tensor = x + self.conv2(F.relu(self.conv1(x)))
        return result


def summed(weight: Tensor) -> Tensor:
    """Return the weights [d, 8] of keys from those of the authors' first convolution, [d, channels, 2, 2]."""
    result: Tensor = weight.float().unflatten(1, (len(KEY_BITS), -1)).sum((2, 3, 4)).to(weight.dtype)
    return result


class KeyedEmbed(Embed):
    """The embedding of ABot-World, which adds the keys to the tokens."""

    def tokens(self, patches: Tensor, frames: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return the embedded patches with the keys, [B, T, d]."""
        return super().tokens(patches, frames, conditioning) + conditioning[TOKENS]


class References(FrontEmbed):
    """The reference tokens of a stream without pictures of a person: zeros, at the positions of the pictures."""

    def positions(self, device: torch.device) -> Tensor:
        """Return the positions of the reference tokens, [3, P] int64: each picture has its own time, far before the
        stream, and the rows and columns of its tokens."""
        model = AbotModel.of(self.model)
        count, side = model.references, model.reference_side
        step = max(_REFERENCE_STEP, side * side)
        times, places = torch.arange(-count, 0, device=device) * step, torch.arange(side, device=device)
        return torch.cartesian_prod(times, places, places).T
