"""Attention in parts of the keys: where they are written, and how they become one. What both attention ops share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels.triton.attention_fp8 import COMBINE_WARPS, attention_combine_kernel

SPLITS = range(2, 17)
# Of `waves.cut`, where the parts run in the launch of the whole tiles: what a wave of them costs besides its keys.
WAVE_OF_PARTS_KEYS = 1600


class Parts(NamedTuple):
    """What programs with a part of the keys write.

    Parameters
    ----------
    out : Tensor
        ``[B * splits, max(tokens, 1), H, D]`` bfloat16.
    lse : Tensor
        ``[B * splits, H, max(tokens, 1)]`` float32, base-2 logarithms of a part's sum.
    tokens, splits : int
        Queries that see the keys in parts, and the parts.
    """

    out: Tensor
    lse: Tensor
    tokens: int
    splits: int

    @classmethod
    def of(cls, whole: Tensor, tokens: int, splits: int) -> Parts:
        """Return memory for parts of an attention whose result is ``whole`` ``[B, T, H, D]``."""
        batch, _, heads, head_dim = whole.shape
        rows = (batch * splits, max(tokens, 1))
        out = torch.empty((*rows, heads, head_dim), dtype=whole.dtype, device=whole.device)
        lse = torch.empty((rows[0], heads, rows[1]), dtype=torch.float32, device=whole.device)
        return cls(out, lse, tokens, splits)

    def programs(self, whole_tokens: int, tile: int, batch: int, heads: int) -> tuple[int, tuple[int, ...]]:
        """Return how many programs one launch of whole tiles and parts has, and the last ints that its kernel takes.

        Parameters
        ----------
        whole_tokens : int
            Queries that see all keys at once.
        tile : int
            Queries of a program.
        batch, heads : int
            B and H.
        """
        tiles, rest_tiles = -(-whole_tokens // tile), -(-self.tokens // tile)
        whole = tiles * heads * batch
        ints = (max(tiles, 1), whole, whole_tokens, self.splits, self.tokens)
        return whole + rest_tiles * heads * batch * self.splits, ints

    def combine(self, whole: Tensor) -> None:
        """Write the last queries of ``whole`` ``[B, T, H, D]``, if any see the keys in parts."""
        batch, query_tokens, heads, head_dim = whole.shape
        if not self.tokens:
            return
        wrap_triton(attention_combine_kernel)[(self.tokens, batch)](
            self.out,
            self.lse,
            whole,
            self.tokens,
            query_tokens,
            HEADS=heads,
            HEAD_DIM=head_dim,
            SPLITS=self.splits,
            BLOCK_H=triton.next_power_of_2(heads),
            num_warps=COMBINE_WARPS,
        )


def use_torchs_memory() -> None:
    """Give Triton memory for tensor descriptors, for which it asks its host; a compiled engine brings its own."""
    triton.set_allocator(_descriptor_memory)


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> Tensor:  # noqa: ARG001 - Triton's protocol
    return torch.empty(size, dtype=torch.int8, device="cuda")
