"""CLIP's image encoder: from a picture to the features after all blocks except the last.

The encoder is written in this module instead of imported from transformers, because an engine must not change with a
library's internals. A test checks that this encoder and that of transformers give equal results. Attribute names of the
modules are those of Wan's CLIP file.

In shapes N is the number of patches of a picture, without the class token, and d is the width. The maths of the image
encoder is from CLIP (arXiv 2103.00020), open_clip's ViT-H/14.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.media import ClipConfig

MEAN = (0.48145466, 0.4578275, 0.40821073)
DEVIATION = (0.26862954, 0.26130258, 0.27577711)


class ClipFeatures(nn.Module):
    """The module that computes the hidden state after all blocks of the file except the last, without a final
    norm."""

    def __init__(self, config: ClipConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.side, d, p = config.side, config.dim, config.patch
        self.patch_embedding = nn.Conv2d(3, d, p, stride=p, bias=False, dtype=dtype)
        self.cls_embedding = nn.Parameter(torch.empty(1, 1, d, dtype=dtype))
        self.pos_embedding = nn.Parameter(torch.empty(1, config.tokens, d, dtype=dtype))
        self.pre_norm = _norm(config)
        self.transformer = nn.ModuleList(_Block(config, dtype) for _ in range(config.layers))

    def forward(self, pictures: Tensor) -> Tensor:
        """Return features [B, N + 1, d] in the weights' dtype, with the class token first, of pictures [B, H, W, 3]
        uint8."""
        dtype = self.patch_embedding.weight.dtype
        x = self.patch_embedding(self.pixels(pictures).to(dtype)).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_embedding.expand(x.shape[0], -1, -1), x), 1) + self.pos_embedding
        x = self.pre_norm(x.float()).to(dtype)
        hidden: Tensor = x
        for block in self.transformer:
            hidden = block(hidden)
        return hidden

    def pixels(self, pictures: Tensor) -> Tensor:
        """Return pictures [B, 3, side, side] float32, resized by cubic convolution and normalised as in Wan's
        code."""
        # numbers, not a tensor copied to the device
        channels = zip(self.resized(pictures).unbind(1), MEAN, DEVIATION, strict=True)
        return torch.stack([(channel - mean) / deviation for channel, mean, deviation in channels], 1)

    def resized(self, pictures: Tensor) -> Tensor:
        """Return pictures [B, 3, side, side] float32 with levels 0 to 1, resized by cubic convolution. Wan's code
        resizes levels of -1 to 1, which gives the same pictures, because the resize is linear in the levels.
        """
        levels = pictures.permute(0, 3, 1, 2).float() / 255
        return F.interpolate(levels, (self.side, self.side), mode="bicubic")


class _Block(nn.Module):
    def __init__(self, config: ClipConfig, dtype: torch.dtype) -> None:
        super().__init__()
        d = config.dim
        self.norm1, self.norm2 = _norm(config), _norm(config)
        self.attn = _Attention(config, dtype)
        self.mlp = nn.Sequential(
            nn.Linear(d, config.ffn_dim, dtype=dtype), nn.GELU(), nn.Linear(config.ffn_dim, d, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x.float()).to(x.dtype))
        hidden: Tensor = x + self.mlp(self.norm2(x.float()).to(x.dtype))
        return hidden


class _Attention(nn.Module):
    def __init__(self, config: ClipConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, d = config.heads, config.dim
        self.to_qkv, self.proj = nn.Linear(d, 3 * d, dtype=dtype), nn.Linear(d, d, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, -1)
        )
        result: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result


def _norm(config: ClipConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.dim, config.norm_eps)
