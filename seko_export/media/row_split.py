"""Division of a VAE's pictures among ranks (GPUs): each rank has some pixel rows of the full width. Rank 0 has the
uppermost pixel rows.

All ranks run the same engines of the VAE: a tensor with the rank's number selects the rank's own rows and its
neighbours. The collectives between ranks are functional, so that `torch.export` traces them. The collectives of the VAE
use a process group of their own, `LANE_GROUP`, because a chunk may be decoded while the next one is computed. Within
one process group every rank must queue its collectives in the same order.

In shapes B is the number of rows of the batch, C the number of channels, T the number of frames, H the number of pixel
or cell rows of one rank, W the number of columns, and R the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_export.engines.collectives import gathered
from seko_runtime.format.manifest import LANE_GROUP


@dataclass(frozen=True)
class RowSplit:
    """The pixel rows of a picture that belong to one rank (GPU).

    Parameters
    ----------
    ranks : int
        Number R of ranks, at least 2; it divides the number of rows of the latents.
    rank : Tensor
        Number of this rank, [1] int64.
    """

    ranks: int
    rank: Tensor

    def own_rows(self, x: Tensor) -> Tensor:
        """Return the rows of this rank [B, C, T, H, W] from x [B, C, T, R*H, W]."""
        own: Tensor = x.unflatten(3, (self.ranks, -1)).index_select(3, self.rank).squeeze(3)
        return own

    def with_neighbours(self, x: Tensor) -> Tensor:
        """Return x with the last row of the rank above and the first row of the rank below, in the shape [B, C, T, 1 +
        H + 1, W].

        Above and below the whole picture the neighbouring rows are zeros, like a convolution's padding. The memory of
        the result is channels-last.
        """
        return self.each_with_neighbours((x,))[0]

    def each_with_neighbours(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return `with_neighbours` of tensors that differ in T only, whose rows are exchanged together."""
        owns = [part.permute(0, 2, 3, 4, 1) for part in parts]  # [B, T, H, W, C]
        outer = [torch.stack((own[:, :, -1], own[:, :, 0])) for own in owns]  # [2, B, T, W, C]
        edges = self._gathered(outer[0] if len(outer) == 1 else torch.cat(outer, dim=2))
        around = F.pad(edges, (*(0, 0) * 5, 1, 1))  # zeros before the first rank and behind the last
        frames = [own.shape[1] for own in owns]
        above = around[:, 0].index_select(0, self.rank).permute(1, 2, 0, 3, 4).split(frames, dim=1)
        below = around[:, 1].index_select(0, self.rank + 2).permute(1, 2, 0, 3, 4).split(frames, dim=1)
        joined = [torch.cat(rows, dim=2) for rows in zip(above, owns, below, strict=True)]
        return [part.permute(0, 4, 1, 2, 3) for part in joined]

    def every_place(self, x: Tensor) -> Tensor:
        """Return the pixels of all R ranks, [N, R*P, C], from the P pixels of this rank, x [N, P, C]."""
        whole: Tensor = self._gathered(x).transpose(0, 1).flatten(1, 2)
        return whole

    def _gathered(self, x: Tensor) -> Tensor:
        """Return the tensor x of every rank as [R, *x.shape], in the order of ranks."""
        return gathered(x, self.ranks, LANE_GROUP)
