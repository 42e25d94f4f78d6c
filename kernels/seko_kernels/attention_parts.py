"""Shared code of the 8-bit and the 16-bit attention op: the factor of attention scores, and attention split over parts
of the keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels.triton.attention_fp8 import COMBINE_WARPS, attention_combine_kernel

SPLITS = range(2, 17)
# Argument of `waves.cut` if parts and whole tiles share one launch: fixed cost of a wave of parts, in keys.
WAVE_OF_PARTS_KEYS = 1600


def softmax_scale(head_dim: int) -> float:
    """Return the factor of attention scores for a softmax with base 2, which is ``D ** -0.5 * log2(e)``."""
    scale: float = head_dim**-0.5 * math.log2(math.e)
    return scale


class Parts(NamedTuple):
    """Output buffers for programs that attend to only a part of the keys.

    Parameters
    ----------
    out : Tensor
        Attention to each part of the keys, ``[B * splits, max(tokens, 1), H, D]`` bfloat16.
    lse : Tensor
        Base-2 logarithm of each part's softmax sum, ``[B * splits, H, max(tokens, 1)]`` float32.
    tokens, splits : int
        Number of queries whose keys are split, and number of parts.
    """

    out: Tensor
    lse: Tensor
    tokens: int
    splits: int

    @classmethod
    def of(cls, whole: Tensor, tokens: int, splits: int) -> Parts:
        """Allocate the output buffers of parts for an attention with the result ``whole`` ``[B, T, H, D]``."""
        batch, _, heads, head_dim = whole.shape
        rows = (batch * splits, max(tokens, 1))
        out = torch.empty((*rows, heads, head_dim), dtype=whole.dtype, device=whole.device)
        lse = torch.empty((rows[0], heads, rows[1]), dtype=torch.float32, device=whole.device)
        return cls(out, lse, tokens, splits)

    def programs(self, whole_tokens: int, tile: int, batch: int, heads: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of programs in a launch, for whole tiles and parts together, and the last int arguments of
        the kernel.

        Parameters
        ----------
        whole_tokens : int
            Number of queries whose keys are not split.
        tile : int
            Number of queries that one program handles.
        batch, heads : int
            Numbers of rows and of heads, B and H.
        """
        tiles, rest_tiles = -(-whole_tokens // tile), -(-self.tokens // tile)
        whole = tiles * heads * batch
        # Torch's compiler would make a constant of a 1, and another kernel, for whose loops the registers are too few.
        splits = max(self.splits, 2)
        ints = (max(tiles, 1), whole, whole_tokens, splits, self.tokens)
        return whole + rest_tiles * heads * batch * self.splits, ints

    def combine(self, whole: Tensor) -> None:
        """Combine the parts into the results of the last queries of ``whole`` ``[B, T, H, D]``, if any queries are
        split."""
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
    """Make Triton allocate memory for tensor descriptors through torch. A compiled engine has its own allocator for the
    memory of tensor descriptors."""
    triton.set_allocator(_descriptor_memory)


def _descriptor_memory(size: int, alignment: int, stream: int | None) -> Tensor:  # noqa: ARG001 - Triton's protocol
    return torch.empty(size, dtype=torch.int8, device="cuda")
