"""Arguments of expanding a cache: rotary tables of the keys, and the room for a separate sink."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from seko_kernels.errors import KernelsError


class KeyTables(NamedTuple):
    """Mean and rotary tables for reading keys stored before RoPE; `reference.nvfp4_decode_keys` has the formula.

    Parameters
    ----------
    mean : Tensor
        Mean of each key channel, ``[H, D]`` float32, contiguous.
    slot_rotary : Tensor
        Cosine and sine of the first A pairs of channels, by cache slot: ``[slots, A, 2]`` float32, contiguous.
    patch_rotary : Tensor
        Cosine and sine of the other pairs, by patch of a latent frame: ``[n, D // 2 - A, 2]`` float32, contiguous.
    """

    mean: Tensor
    slot_rotary: Tensor
    patch_rotary: Tensor

    def check(self, tokens: int, heads: int, head_dim: int) -> None:
        """Raise an error unless the tables have a cosine and sine for each token and channel pair.

        Raises
        ------
        KernelsError
            If a tensor has another shape, dtype or layout than documented here, or the tables are not for
            ``tokens`` tokens of ``head_dim`` channels.
        """
        check_mean(self.mean, heads, head_dim)
        for name, table in (("slot_rotary", self.slot_rotary), ("patch_rotary", self.patch_rotary)):
            if table.dtype != torch.float32:
                raise KernelsError(f"{name} is {table.dtype}, expected torch.float32")
            if table.dim() != 3 or table.shape[2] != 2 or not table.is_contiguous():
                raise KernelsError(
                    f"{name} has shape {tuple(table.shape)}, expected [places, pairs, 2], contiguous"
                )
        slot, patch = self.slot_rotary.shape, self.patch_rotary.shape
        if slot[0] * patch[0] != tokens or slot[1] + patch[1] != head_dim // 2:
            raise KernelsError(
                f"slot_rotary {tuple(slot)} and patch_rotary {tuple(patch)} do not make up {tokens} tokens of "
                f"{head_dim // 2} pairs"
            )


class SinkApart(NamedTuple):
    """Layout of a cache whose sink is stored separately: the expanded result has room for the sink at the start of
    each row.

    Parameters
    ----------
    row_tokens : int
        Number of tokens of a row in the cache that is expanded.
    left_out : int
        Number of tokens of the sink, for which the result has room.
    """

    row_tokens: int
    left_out: int

    def check(self, tokens: int) -> None:
        """Refuse a cache of `tokens` that is not a whole number of rows.

        Raises
        ------
        KernelsError
            If `row_tokens` is below 1 or does not divide `tokens`.
        """
        if self.row_tokens < 1 or tokens % self.row_tokens or self.left_out < 0:
            raise KernelsError(f"a cache of {tokens} tokens is no whole number of rows of {self.row_tokens}")

    def lengthened(self, x: Tensor) -> Tensor:
        """Return ``x`` [N, H, D] with zeros for the sink's tokens before the tokens of each row, in the shape ``[N +
        rows * left_out, H, D]``."""
        rows = x.unflatten(0, (-1, self.row_tokens))
        return torch.nn.functional.pad(rows, (0, 0, 0, 0, self.left_out, 0)).flatten(0, 1)


def check_mean(mean: Tensor, heads: int, head_dim: int) -> None:
    """Refuse a mean that is not ``[heads, head_dim]`` float32, contiguous; raises `KernelsError`."""
    if mean.dtype != torch.float32:
        raise KernelsError(f"mean is {mean.dtype}, expected torch.float32")
    if tuple(mean.shape) != (heads, head_dim) or not mean.is_contiguous():
        raise KernelsError(f"mean has shape {tuple(mean.shape)}, expected ({heads}, {head_dim}), contiguous")
