"""Division of a chunk among ranks (GPUs). Outside attention each rank has some of the tokens, and inside attention some
of the heads (Ulysses, arXiv 2309.14509).

A rank is one process with one GPU. Every rank has an equal share of each latent frame's tokens. Tensors with one entry
per frame are therefore the same on all ranks. Every rank also has an equal share of the heads: rank 0 the first heads,
and so on. The collectives between ranks are functional, so that `torch.export` traces them. Engines find the ranks'
process group by the name `CALL_GROUP`. All ranks run the same engines: a tensor with the rank's number selects the
tokens of the rank.

Inside attention tokens are in the order of ranks: all tokens of rank 0, then all of rank 1, and so on. The order by
rank is the order after the all-to-all, and attention does not depend on the order of tokens. `as_exchanged` puts the
indices of the tokens in the cache into the order of the ranks.

If the number of tokens in a latent frame is no multiple of the number of ranks, each frame is padded with zero tokens,
which go to the last ranks. Layers compute on padding as on tokens, since no op outside attention mixes tokens.
`to_heads` and `every_token` remove the padding, and `to_tokens` adds zeros again. Attention, caches and velocities
therefore have the chunk's tokens only. Removing the padding is a copy, which also puts the tokens into the chunk's own
order.

In shapes B is the number of rows, F the number of latent frames of the chunk, n the number of tokens of a latent frame,
R the number of ranks, H the number of heads, and D the number of channels. T is F*n. The quotient n/R is rounded up,
and T/R means F times the rounded n/R, which is the number of a rank's tokens with padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.video import VideoBuild
from seko_export.engines.collectives import RANK_ARGUMENT, gathered
from seko_export.engines.piece import Argument
from seko_runtime.format.manifest import CALL_GROUP


@dataclass(frozen=True)
class RankSplit:
    """The division of a chunk among R ranks (GPUs).

    Parameters
    ----------
    ranks : int
        Number R of ranks, at least 2; it divides the number of heads.
    chunk_frames, frame_tokens : int
        Number F of latent frames in a chunk, and number n of tokens in a latent frame.
    """

    ranks: int
    chunk_frames: int
    frame_tokens: int

    @property
    def share(self) -> int:
        """Number of tokens in each latent frame that belong to one rank: n/R, rounded up."""
        return -(-self.frame_tokens // self.ranks)

    @property
    def padding(self) -> int:
        """Number of zero tokens that pad each latent frame."""
        return self.share * self.ranks - self.frame_tokens

    @property
    def tokens(self) -> int:
        """Number of tokens in a chunk that belong to one rank, with padding, which is T/R."""
        return self.chunk_frames * self.share

    def own_tokens(self, x: Tensor, rank: Tensor) -> Tensor:
        """Return the tokens [B, T/R, ...] of rank ``rank`` [1] int64 from x [B, T, ...], with zeros as padding."""
        own: Tensor = self._in_shares(x).index_select(2, rank).flatten(1, 3)
        return own

    def as_exchanged(self, x: Tensor, rows: int) -> Tensor:
        """Return the elements of x [B*T], one for each token of each row, in the order that tokens have after
        `to_heads`.
        """
        if self.padding:
            return x
        shares = x.unflatten(0, (rows, self.chunk_frames, self.ranks, -1))  # [B, F, R, n/R]
        ordered: Tensor = shares.transpose(1, 2).flatten()
        return ordered

    def own_heads(self, x: Tensor, rank: Tensor) -> Tensor:
        """Return the heads [H/R, ...] of rank ``rank`` [1] int64 from x [H, ...]."""
        own: Tensor = x.unflatten(0, (self.ranks, -1)).index_select(0, rank).flatten(0, 1)
        return own

    def heads_of_each(self, tensors: Mapping[str, Tensor], rank: Tensor) -> dict[str, Tensor]:
        """Return the result of `own_heads` for each tensor of a mapping, by name."""
        return {name: self.own_heads(tensor, rank) for name, tensor in tensors.items()}

    def to_heads(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Exchange tensors in one all-to-all, so that each rank gets its own heads of all tokens.

        The parts [B, T/R, H, D] each become [B, T, H/R, D], as `shares_to_heads` returns them. The send buffer is
        written once, with the values for each rank side by side.
        """
        shares = [part.unflatten(2, (self.ranks, -1)).permute(2, 0, 1, 3, 4) for part in parts]
        return self.shares_to_heads(torch.stack(shares, dim=3))

    def shares_to_heads(self, shares: Tensor) -> tuple[Tensor, ...]:
        """Exchange P tensors by the ranks to which their heads go, [R, B, T/R, P, H/R, D], in one all-to-all; return
        each as [B, T, H/R, D], in the order of `as_exchanged`.

        With one row and no padding the results are strided views of the received tensor; otherwise each is contiguous.
        """
        x = self._exchanged(shares)  # axis 0: whose tokens
        heads: tuple[Tensor, ...]
        if self.padding:
            by_frame = x.unflatten(2, (self.chunk_frames, -1))  # [R, B, F, n/R, P, H/R, D]
            heads = self._joined(by_frame.permute(1, 2, 0, 3, 4, 5, 6)).unbind(2)
        else:
            heads = x.transpose(0, 1).flatten(1, 2).unbind(2)
        if self.padding or x.shape[1] > 1:
            # The compiler copies each part where eager torch copies all into one tensor: strides would differ.
            return tuple(part.contiguous() for part in heads)
        return heads

    def to_tokens(self, y: Tensor) -> Tensor:
        """Exchange tensors so that each rank gets all heads of its own tokens: y [B, T, H/R*D], in the order of
        `to_heads`, becomes [B, T/R, H*D]."""
        tokens: Tensor = self.to_shares_of_tokens(y).permute(1, 2, 0, 3).flatten(2)
        return tokens

    def to_shares_of_tokens(self, y: Tensor) -> Tensor:
        """Return what `to_tokens` does as it arrives: [R, B, T/R, H/R*D], by the ranks whose heads it is of."""
        if self.padding:
            shares = self._in_shares(y).permute(2, 0, 1, 3, 4).flatten(2, 3)
        else:
            shares = y.unflatten(1, (self.ranks, -1)).transpose(0, 1)  # [R, B, T/R, H/R*D]
        return self._exchanged(shares)

    def every_token(self, x: Tensor) -> Tensor:
        """Gather all tokens on each rank: x [B, T/R, C] becomes [B, T, C]."""
        shares = self._gathered(x).unflatten(2, (self.chunk_frames, -1))  # [R, B, F, n/R, C]
        return self._joined(shares.permute(1, 2, 0, 3, 4))

    def _in_shares(self, x: Tensor) -> Tensor:
        """Return the tokens of x [B, T, ...] by rank: [B, F, R, n/R, ...], padding as zeros."""
        if not self.padding:
            whole: Tensor = x.unflatten(1, (self.chunk_frames, self.ranks, -1))
            return whole
        frames = x.unflatten(1, (self.chunk_frames, -1))  # [B, F, n, ...]
        padded = F.pad(frames, (*(0, 0) * (frames.dim() - 3), 0, self.padding))
        shares: Tensor = padded.unflatten(2, (self.ranks, -1))
        return shares

    def _joined(self, shares: Tensor) -> Tensor:
        """Return [B, T, ...] from a result of `_in_shares`, without the padding."""
        if not self.padding:
            return shares.flatten(1, 3)
        return shares.flatten(2, 3).narrow(2, 0, self.frame_tokens).flatten(1, 2)

    def _exchanged(self, x: Tensor) -> Tensor:
        """Send part r of axis 0 to rank r; return the parts that this rank received, in the order of ranks."""
        ones = [1] * self.ranks
        sent = torch.ops._c10d_functional.all_to_all_single(x.contiguous(), ones, ones, CALL_GROUP)
        received: Tensor = torch.ops._c10d_functional.wait_tensor(sent)
        return received

    def _gathered(self, x: Tensor) -> Tensor:
        """Return the tensor x of every rank as [R, *x.shape], in the order of ranks."""
        return gathered(x, self.ranks, CALL_GROUP)


class Ranked(nn.Module):
    """Base class of modules whose tokens or heads may be split across ranks.

    Attributes
    ----------
    split : RankSplit or None
        How ranks (GPUs) share a chunk; None for a single rank.
    """

    split: RankSplit | None = None


def rank_split(config: VideoBuild) -> RankSplit | None:
    """Return how ranks share a chunk; None for a build of one rank."""
    s = config.workload.stream
    return (
        None if config.target.ranks == 1 else RankSplit(config.target.ranks, s.chunk_frames, s.frame_tokens)
    )


def rank_tokens(config: VideoBuild) -> int:
    """Return the number of a chunk's tokens that each rank computes, including padding."""
    split = rank_split(config)
    return config.workload.stream.chunk_tokens if split is None else split.tokens


def rank_argument(config: VideoBuild) -> tuple[Argument, ...]:
    """Return the argument with the rank's number; an empty tuple for a build of one rank."""
    return () if config.target.ranks == 1 else (RANK_ARGUMENT,)
