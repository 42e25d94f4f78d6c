"""How the ranks of a build share a chunk: tokens outside attention, heads inside it (Ulysses, arXiv 2309.14509).

A rank is one process with one GPU. Every rank has the same share of each latent frame's tokens, so that what is given
per frame needs no change, and the same share of the heads, in order. The collectives are functional, which
`torch.export` traces; engines find the ranks' process group by `RANK_GROUP`. All ranks run the same engines: which
tokens are a rank's own is selected by a tensor that holds its number.

Inside attention the tokens stand in the ranks' order: all tokens of rank 0, then all of rank 1, and so on. An exchange
leaves them so, and attention gives the same in any order. `in_ranks_order` reorders what says where they are cached.

Shapes: B rows, F latent frames of the chunk, n tokens of a latent frame, T = F*n, R ranks, H heads, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seko_export.config.build import BuildConfig
from seko_export.engines.piece import Argument
from seko_runtime.executor.buffers_check import RANK
from seko_runtime.format.manifest import RANK_GROUP


@dataclass(frozen=True)
class RankSplit:
    """The split of a chunk over ranks.

    Parameters
    ----------
    ranks : int
        R, at least 2; divides H and n.
    chunk_frames : int
        F.
    """

    ranks: int
    chunk_frames: int

    def own_tokens(self, x: Tensor, rank: Tensor) -> Tensor:
        """Return the rank's tokens [B, T/R, ...] of x [B, T, ...]; rank [1] int64."""
        shares = x.unflatten(1, (self.chunk_frames, self.ranks, -1))  # [B, F, R, n/R, ...]
        own: Tensor = shares.index_select(2, rank).flatten(1, 3)
        return own

    def in_ranks_order(self, x: Tensor, rows: int) -> Tensor:
        """Return x [B*T], which has a number for each token of the chunk, with each of B rows in the ranks' order."""
        shares = x.unflatten(0, (rows, self.chunk_frames, self.ranks, -1))  # [B, F, R, n/R]
        ordered: Tensor = shares.transpose(1, 2).flatten()
        return ordered

    def own_heads(self, x: Tensor, rank: Tensor) -> Tensor:
        """Return the rank's heads [H/R, ...] of x [H, ...]; rank [1] int64."""
        own: Tensor = x.unflatten(0, (self.ranks, -1)).index_select(0, rank).flatten(0, 1)
        return own

    def heads_of_each(self, tensors: Mapping[str, Tensor], rank: Tensor) -> dict[str, Tensor]:
        """Return `own_heads` of each tensor, by name."""
        return {name: self.own_heads(one, rank) for name, one in tensors.items()}

    def to_heads(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Give each rank its heads of all tokens, in one exchange.

        Parts [B, T/R, H, D] each become [B, T, H/R, D], in the ranks' order; with one row they are strided views of
        what was received. What is sent is written once, in the order of sending.
        """
        shares = [one.unflatten(2, (self.ranks, -1)).permute(2, 0, 1, 3, 4) for one in parts]
        x = self._exchanged(torch.stack(shares, dim=3))  # [R, B, T/R, P, H/R, D], axis 0: whose tokens
        heads: tuple[Tensor, ...] = x.transpose(0, 1).flatten(1, 2).unbind(2)
        return heads

    def to_tokens(self, y: Tensor) -> Tensor:
        """Give each rank its tokens of all heads: y [B, T, H/R*D], in the ranks' order, becomes [B, T/R, H*D]."""
        shares = y.unflatten(1, (self.ranks, -1)).transpose(0, 1)  # [R, B, T/R, H/R*D]
        x = self._exchanged(shares)  # axis 0: whose heads
        tokens: Tensor = x.permute(1, 2, 0, 3).flatten(2)
        return tokens

    def every_token(self, x: Tensor) -> Tensor:
        """Give each rank all tokens: x [B, T/R, C] becomes [B, T, C]."""
        shares = self._gathered(x).unflatten(2, (self.chunk_frames, -1))  # [R, B, F, n/R, C]
        whole: Tensor = shares.permute(1, 2, 0, 3, 4).flatten(1, 3)
        return whole

    def _exchanged(self, x: Tensor) -> Tensor:
        """Send part r of axis 0 to rank r; return what each rank sent here, in the ranks' order."""
        ones = [1] * self.ranks
        sent = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), ones, ones, RANK_GROUP)
        received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
        return received

    def _gathered(self, x: Tensor) -> Tensor:
        """Return x of every rank as [R, *x.shape], in the ranks' order."""
        sent = torch.ops._c10d_functional.all_gather_into_tensor(
            x.unsqueeze(0).contiguous(), self.ranks, RANK_GROUP
        )
        received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
        return received


def rank_split(config: BuildConfig) -> RankSplit | None:
    """Return how ranks share a chunk; None for a build of one rank."""
    return None if config.ranks == 1 else RankSplit(config.ranks, config.stream.chunk_frames)


def rank_argument(config: BuildConfig) -> tuple[Argument, ...]:
    """Return the argument that holds the rank's number; nothing for a build of one rank."""
    return () if config.ranks == 1 else (Argument("rank", f"buffer:{RANK}", (1,), torch.int64),)
