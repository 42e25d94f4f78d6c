"""The interface of KV cache formats, and the exact format. The module `lossy_kv` has the quantised cache formats, and
`kv_schemes` the names of formats.

A format works on the caches of **one layer**, ``[N, *token_shape]``, where N is the number of tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seko_kernels.errors import KernelsError, KvSchemeError
from seko_kernels.formats import CacheTensor, ScaleTensor
from seko_kernels.reference import rotate_keys

EXACT_SCHEMES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class ChannelStatistics:
    """Statistics of the keys or the values of one layer for the calibration, each ``[H, D]`` float32.

    Parameters
    ----------
    lowest, highest, mean : Tensor
        Minimum, maximum and mean of each channel over the calibration's tokens.

    Raises
    ------
    KernelsError
        If the tensors do not have the same shape with two axes, are not float32 and finite, or a minimum is above the
        maximum.
    """

    lowest: Tensor
    highest: Tensor
    mean: Tensor

    def __post_init__(self) -> None:
        for name, x in (("lowest", self.lowest), ("highest", self.highest), ("mean", self.mean)):
            if x.dim() != 2 or x.shape != self.lowest.shape:
                raise KernelsError(
                    f"{name} has shape {tuple(x.shape)}, lowest {tuple(self.lowest.shape)}: expected one "
                    "[heads, head_dim]"
                )
            if x.dtype != torch.float32:
                raise KernelsError(f"{name} is {x.dtype}, expected torch.float32")
            if not bool(torch.isfinite(x).all()):
                raise KernelsError(f"{name} is not finite everywhere; is an activation NaN?")
        if bool((self.lowest > self.highest).any()):
            raise KernelsError("the lowest number of a channel is above its highest")

    def amax(self, centre: Tensor | float = 0.0) -> Tensor:
        """Return ``[H]`` float32: the largest distance of a head's numbers from ``centre``."""
        return torch.maximum(self.highest - centre, centre - self.lowest).amax(-1)


class KvFormat(Protocol):
    """Storage format of cached keys and values: the interface for models, the exporter and the manifest."""

    @property
    def name(self) -> str:
        """Name of the format, which is the field ``kv.scheme`` of the manifest."""

    @property
    def keys_before_rope(self) -> bool:
        """Whether keys are stored before RoPE and rotated when they are read."""

    @property
    def exact(self) -> tuple[bool, bool]:
        """Pair of flags: whether keys, and whether values, are read exactly as they were written."""

    @property
    def read_in_8_bits(self) -> bool:
        """Whether 8-bit attention can read a cache of this format; the module `scratch` expands the cache for 8-bit
        attention."""

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """Tensors of one layer's KV cache, in the order of the engines' inputs."""

    @property
    def scale_tensors(self) -> tuple[ScaleTensor, ...]:
        """Calibrated constants of one layer's KV cache, in the order of the engines' inputs."""

    @property
    def sink_tensors(self) -> tuple[str, str] | None:
        """Names of the cache tensors that hold the sink's keys and values as they were written; None if the sink is
        quantised."""

    @property
    def bits_per_number(self) -> float:
        """Stored bits for each key or value channel, scale bytes included."""

    def write(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        token_index: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Store keys ``k[t]`` and values ``v[t]`` (``[T, H, D]``) as token ``token_index[t]`` (``[T]`` int64) of the
        cache, in place.

        Where `keys_before_rope` is true, ``k`` are the keys before RoPE.
        """

    def expand(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        key_rotary: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return keys (after RoPE) and values of every cached token, ``[N, H, D]`` each, as `dtype`, for attention.

        ``key_rotary`` has the tables ``slot_rotary`` and ``patch_rotary`` of `kv_tables.KeyTables` if
        `keys_before_rope` is true; otherwise it is empty.
        """

    def calibrate(self, k: ChannelStatistics, v: ChannelStatistics) -> dict[str, Tensor]:
        """Compute the constants that `scale_tensors` names, from statistics of keys (before RoPE if `keys_before_rope`
        is true) and values.
        """


@dataclass(frozen=True)
class ExactKv:
    """The exact cache format: keys and values in the model's dtype.

    Parameters
    ----------
    heads, head_dim : int
        Number of attention heads, and number of channels of a head.
    dtype : torch.dtype
        Dtype of the cache: bfloat16 or float32.
    before_rope : bool
        Whether keys are stored before RoPE, for caches in which positions change after a key is stored.

    Raises
    ------
    KvSchemeError
        If no KV cache format stores numbers of `dtype`.
    KernelsError
        If the number of heads or of channels is not positive.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    before_rope: bool = False

    def __post_init__(self) -> None:
        check_sizes(self.heads, self.head_dim)
        if self.dtype not in EXACT_SCHEMES.values():
            raise KvSchemeError(f"no exact KV scheme stores {self.dtype}; there are {EXACT_SCHEMES}")

    @property
    def name(self) -> str:
        """Name of the format in the manifest."""
        name = next(name for name, dtype in EXACT_SCHEMES.items() if dtype == self.dtype)
        return f"{name}-before-rope" if self.before_rope else name

    @property
    def keys_before_rope(self) -> bool:
        """Whether keys are stored before RoPE: the constructor's `before_rope`."""
        return self.before_rope

    @property
    def exact(self) -> tuple[bool, bool]:
        """Pair of flags: whether keys, and whether values, are read exactly as they were written. Keys stored before
        RoPE are not read as they were written, because reading rotates them."""
        return not self.before_rope, True

    @property
    def read_in_8_bits(self) -> bool:
        """False, because 8-bit attention reads only quantised caches."""
        return False

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """The tensors ``k`` and ``v`` of the cache, ``[heads, head_dim]`` for each token."""
        shape = (self.heads, self.head_dim)
        return (CacheTensor("k", shape, self.dtype), CacheTensor("v", shape, self.dtype))

    @property
    def scale_tensors(self) -> tuple[ScaleTensor, ...]:
        """Empty, because the exact format has no calibrated constants."""
        return ()

    @property
    def sink_tensors(self) -> tuple[str, str]:
        """The tensors ``k`` and ``v``, which hold the whole cache."""
        return "k", "v"

    @property
    def bits_per_number(self) -> float:
        """Number of stored bits of a number: 16 for bfloat16, 32 for float32."""
        return self.dtype.itemsize * 8.0

    def write(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's; this format has none
        token_index: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Store keys and values in the cache, in place; see `KvFormat.write`."""
        caches["k"].index_copy_(0, token_index, k.to(self.dtype))
        caches["v"].index_copy_(0, token_index, v.to(self.dtype))

    def expand(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's; this format has none
        key_rotary: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return the cache tensors themselves; keys stored before RoPE are returned as a rotated copy.

        Raises
        ------
        KvSchemeError
            If `dtype` is not the cache's dtype: a cast would copy all cached tokens on every call.
        """
        if dtype != self.dtype:
            raise KvSchemeError(f"the {self.name} KV cache cannot serve a window of {dtype} without a copy")
        if not self.before_rope:
            return caches["k"], caches["v"]
        return rotate_keys(
            caches["k"].float(), key_rotary["slot_rotary"], key_rotary["patch_rotary"], dtype
        ), caches["v"]

    def calibrate(self, k: ChannelStatistics, v: ChannelStatistics) -> dict[str, Tensor]:
        """Return an empty dict, because the exact format has no constants."""
        check_statistics(k, v, self.heads, self.head_dim)
        return {}


def check_sizes(heads: int, head_dim: int) -> None:
    """Raise `KernelsError` if a size is not positive."""
    if heads < 1 or head_dim < 1:
        raise KernelsError(f"heads and head_dim must be at least 1, got {heads} and {head_dim}")


def check_statistics(k: ChannelStatistics, v: ChannelStatistics, heads: int, head_dim: int) -> None:
    """Raise `KernelsError` if calibration statistics have another number of heads or channels than the format."""
    for name, statistics in (("k", k), ("v", v)):
        if tuple(statistics.mean.shape) != (heads, head_dim):
            raise KernelsError(
                f"the statistics of {name} have shape {tuple(statistics.mean.shape)}, expected ({heads}, {head_dim})"
            )
