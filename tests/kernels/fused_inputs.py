"""Seeded inputs of the fused ops' tests: a chunk in a ring, an NVFP4 cache of outliers. No assertions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seko_kernels.attention import key_tiles, scratch_tokens, v_columns
from seko_kernels.fused_reference import FP8, fp8_scale
from seko_kernels.reference import nvfp4_encode, nvfp4_global_scale
from seko_kernels.scratch import KeyRotation

NAN_BYTE = 0x7F


@dataclass(frozen=True)
class Ring:
    """Sizes of a cache and a chunk, and where the rows stand."""

    heads: int
    head_dim: int
    frame_tokens: int
    cache_frames: int
    write_slots: tuple[tuple[int, ...], ...]
    valid_frames: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.write_slots)

    @property
    def tokens(self) -> int:
        """Of the chunk."""
        return len(self.write_slots[0]) * self.frame_tokens

    @property
    def cache_tokens(self) -> int:
        return self.cache_frames * self.frame_tokens

    def slots(self) -> Tensor:
        return torch.tensor(self.write_slots)

    def valid(self) -> Tensor:
        return torch.tensor(self.valid_frames) * self.frame_tokens

    def scratch(self) -> tuple[Tensor, Tensor, Tensor]:
        """K, its scales and transposed V of the past, of NaN and its byte."""
        past = scratch_tokens(self.cache_tokens - self.tokens)
        k = torch.full((self.batch, past, self.heads, self.head_dim), NAN_BYTE, dtype=torch.int8)
        scale = torch.full((self.batch, self.heads, key_tiles(past)), torch.nan)
        v = torch.full((self.batch, self.heads, self.head_dim, v_columns(past)), NAN_BYTE, dtype=torch.uint8)
        return k, scale, v.view(FP8)


RINGS = [
    Ring(2, 32, 13, 9, ((7, 8, 3),), (9,)),  # wrapped; no size a multiple of a tile
    Ring(3, 16, 20, 6, ((0, 1), (4, 5)), (2, 6)),  # rows at different fill
    Ring(1, 64, 64, 4, ((3,),), (4,)),  # half a tile of keys behind a whole one
    Ring(4, 128, 50, 9, ((2, 5), (0, 3)), (9, 6)),  # tiles of keys that lie around slots left out; rows apart
    Ring(1, 64, 32, 13, ((4,), (0,), (7,)), (13, 1, 9)),  # whole tiles of keys; a row without a past
]


def fp4_cache(ring: Ring) -> dict[str, Tensor]:
    """An NVFP4 cache of both, with its scales; an outlier channel, a head much larger than the others."""
    torch.manual_seed(ring.cache_tokens)
    cache = {}
    for name in ("k", "v"):
        x = torch.randn(ring.batch * ring.cache_tokens, ring.heads, ring.head_dim)
        x = x * torch.exp(torch.randn(ring.heads, 1) * 2)
        x[:, :, 3] *= 40
        g = nvfp4_global_scale(x.abs().amax((0, 2)))
        cache[f"{name}_codes"], cache[f"{name}_scales"] = nvfp4_encode(x, g)
        cache[f"{name}_global_scale"] = g
    cache["v_fp8_scale"] = fp8_scale(cache["v_global_scale"])
    return cache


def poisoned(ring: Ring, cache: dict[str, Tensor]) -> dict[str, Tensor]:
    """The cache with NaN as scale, or the largest one, of every place that is not of the past."""
    filler = torch.full((ring.cache_frames,), NAN_BYTE, dtype=torch.uint8)
    filler[1::2] = NAN_BYTE - 1
    slot = torch.arange(ring.cache_frames)
    past = torch.stack(
        [
            (slot < valid) & ~(slot[:, None] == torch.tensor(own)).any(1)
            for valid, own in zip(ring.valid_frames, ring.write_slots, strict=True)
        ]
    )  # [B, slots]
    keep, filler = (x.repeat_interleave(ring.frame_tokens, -1) for x in (past, filler.expand(past.shape)))
    changed = dict(cache)
    for name in ("k_scales", "v_scales"):
        changed[name] = torch.where(
            keep.flatten()[:, None, None], cache[name], filler.flatten()[:, None, None]
        )
    return changed


def key_rotation(ring: Ring) -> KeyRotation:
    """A mean larger than what it is taken off, angles of each slot and patch."""
    torch.manual_seed(ring.cache_tokens + 1)
    pairs = ring.head_dim // 2 - 2 * (ring.head_dim // 6)
    slots = torch.rand(ring.batch * ring.cache_frames, pairs) * 6.3
    patches = torch.rand(ring.frame_tokens, ring.head_dim // 2 - pairs) * 6.3
    tables = (torch.stack((angle.cos(), angle.sin()), dim=-1) for angle in (slots, patches))
    return KeyRotation(torch.randn(ring.heads, ring.head_dim) * 5, *tables)


@dataclass(frozen=True)
class Chunk:
    """A chunk's fused projection and what its norm and rotation need."""

    qkv: Tensor
    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor


def chunk_of(ring: Ring, dtype: torch.dtype) -> Chunk:
    """A chunk with an outlier channel in weights and values."""
    torch.manual_seed(ring.tokens)
    width = ring.heads * ring.head_dim
    qkv = torch.randn(ring.batch, ring.tokens, 3 * width) * 3
    qkv[..., 5] *= 30
    q_weight, k_weight = 1 + 0.3 * torch.randn(2, width)
    k_weight[1] = 12
    angle = torch.rand(ring.batch, ring.tokens, ring.head_dim // 2) * 6.3
    return Chunk(qkv.to(dtype), q_weight, k_weight, angle.cos(), angle.sin())
