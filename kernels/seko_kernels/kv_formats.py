"""How a KV cache is stored: the protocol, the exact format, NVFP4, the lookup by name. No bit arithmetic.

A format works on the caches of **one layer**, flat over tokens (``[N, *token_shape]``; N counts batch rows
too). Another format (int8, int4, fp8) is one more frozen dataclass with these members and a line in
`kv_format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from seko_kernels import reference
from seko_kernels.errors import KvCalibrationError, KvSchemeError, KvShapeError
from seko_kernels.formats import NVFP4_BLOCK, CacheTensor, ScaleTensor
from seko_kernels.ops import nvfp4_expand, nvfp4_expand_keys, nvfp4_write

EXACT_SCHEMES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCHEMES = (*EXACT_SCHEMES, "fp4")


@dataclass(frozen=True)
class ChannelStatistics:
    """What a calibration knows of the keys or the values of one layer, each ``[H, D]`` float32.

    Parameters
    ----------
    lowest, highest, mean : Tensor
        Of each channel, over the tokens that were looked at.

    Raises
    ------
    KvShapeError
        If they are not of one shape with two axes.
    KvCalibrationError
        If they are not float32 and finite, or a lowest number is above the highest.
    """

    lowest: Tensor
    highest: Tensor
    mean: Tensor

    def __post_init__(self) -> None:
        for name, x in (("lowest", self.lowest), ("highest", self.highest), ("mean", self.mean)):
            if x.dim() != 2 or x.shape != self.lowest.shape:
                raise KvShapeError(
                    f"{name} has shape {tuple(x.shape)}, lowest {tuple(self.lowest.shape)}: expected one "
                    "[heads, head_dim]"
                )
            if x.dtype != torch.float32:
                raise KvCalibrationError(f"{name} is {x.dtype}, expected torch.float32")
            if not bool(torch.isfinite(x).all()):
                raise KvCalibrationError(f"{name} is not finite everywhere; is an activation NaN?")
        if bool((self.lowest > self.highest).any()):
            raise KvCalibrationError("the lowest number of a channel is above its highest")

    def amax(self, centre: Tensor | float = 0.0) -> Tensor:
        """Return ``[H]`` float32: the largest distance of a head's numbers from ``centre``."""
        return torch.maximum(self.highest - centre, centre - self.lowest).amax(-1)


class KvFormat(Protocol):
    """What a model, an exporter and a manifest need to know of a way to store keys and values."""

    @property
    def name(self) -> str:
        """Name of the bytes, as in the manifest's ``kv.scheme``."""

    @property
    def keys_before_rope(self) -> bool:
        """Whether keys are stored before RoPE, and turned when they are read."""

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """Tensors of one layer's cache, in the order that engines take them."""

    @property
    def scale_tensors(self) -> tuple[ScaleTensor, ...]:
        """Constants of one layer, in the order that engines take them."""

    @property
    def bits_per_number(self) -> float:
        """Cache bits per stored key or value channel, scale bytes included."""

    def pool_bytes(self, layers: int, tokens: int) -> int:
        """Bytes of the KV pool of `layers` layers that hold `tokens` tokens each, over all batch rows."""

    def write(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        token_index: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Store ``k[t]``, ``v[t]`` (``[T, H, D]``) at place ``token_index[t]`` (``[T]`` int64), in place.

        Keys as they are before RoPE where `keys_before_rope` says so.
        """

    def window(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return keys (after RoPE) and values of every place, ``[N, H, D]`` each, as `dtype`, for attention.

        ``places`` are the tables ``slot_rotary`` and ``patch_rotary`` of `ops.nvfp4_expand_keys` where
        `keys_before_rope`, else nothing.
        """

    def calibrate(self, k: ChannelStatistics, v: ChannelStatistics) -> dict[str, Tensor]:
        """Turn what is known of keys (before RoPE where `keys_before_rope`) and values into the constants
        `scale_tensors` names."""


def kv_format(scheme: str, heads: int, head_dim: int, exact_dtype: torch.dtype) -> KvFormat:
    """Return the format that `scheme` names.

    Parameters
    ----------
    scheme : str
        ``"bf16"`` or ``"fp32"`` (the model's own numbers, stored as they are) or ``"fp4"`` (NVFP4).
    heads, head_dim : int
        Attention heads and channels of each.
    exact_dtype : torch.dtype
        The dtype that the model computes in: bfloat16 on CUDA, float32 on a CPU. An exact scheme must name
        it.

    Returns
    -------
    KvFormat

    Raises
    ------
    KvSchemeError
        If there is no such scheme, or an exact scheme is not the model's dtype.
    KvShapeError
        If the format cannot store this head_dim.
    """
    if scheme == "fp4":
        return Nvfp4Kv(heads, head_dim)
    dtype = EXACT_SCHEMES.get(scheme)
    if dtype is None:
        raise KvSchemeError(f"no KV scheme {scheme!r}; there are {', '.join(SCHEMES)}")
    if dtype != exact_dtype:
        raise KvSchemeError(
            f"KV scheme {scheme!r} stores {dtype}, but the model computes in {exact_dtype}; "
            "choose the scheme of that dtype, or fp4"
        )
    return ExactKv(heads, head_dim, dtype)


@dataclass(frozen=True)
class ExactKv:
    """Keys and values as the model computes them.

    Parameters
    ----------
    heads, head_dim : int
        Attention heads and channels of each.
    dtype : torch.dtype
        bfloat16 or float32.

    Raises
    ------
    KvSchemeError
        If no scheme stores `dtype`.
    KvShapeError
        If a size is not positive.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _check_sizes(self.heads, self.head_dim)
        if self.dtype not in EXACT_SCHEMES.values():
            raise KvSchemeError(f"no exact KV scheme stores {self.dtype}; there are {EXACT_SCHEMES}")

    @property
    def name(self) -> str:
        """As in the manifest: the scheme's own name."""
        return next(name for name, dtype in EXACT_SCHEMES.items() if dtype == self.dtype)

    @property
    def keys_before_rope(self) -> bool:
        """No: attention reads them as they are stored."""
        return False

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """``k`` and ``v``, ``[heads, head_dim]`` a token."""
        shape = (self.heads, self.head_dim)
        return (CacheTensor("k", shape, self.dtype), CacheTensor("v", shape, self.dtype))

    @property
    def scale_tensors(self) -> tuple[ScaleTensor, ...]:
        """None."""
        return ()

    @property
    def bits_per_number(self) -> float:
        """16 or 32."""
        return self.dtype.itemsize * 8.0

    def pool_bytes(self, layers: int, tokens: int) -> int:
        """Bytes of the pool; see `KvFormat.pool_bytes`."""
        return _pool_bytes(self, layers, tokens)

    def write(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's; this format has none
        token_index: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Store keys and values in place; see `KvFormat.write`."""
        caches["k"].index_copy_(0, token_index, k.to(self.dtype))
        caches["v"].index_copy_(0, token_index, v.to(self.dtype))

    def window(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's; this format has none
        places: Mapping[str, Tensor],  # noqa: ARG002 - the protocol's; keys lie here after RoPE
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return the caches themselves, no copy.

        Raises
        ------
        KvSchemeError
            If `dtype` is not the stored one: a cast would copy the whole window on every call.
        """
        if dtype != self.dtype:
            raise KvSchemeError(f"the {self.name} KV cache cannot serve a window of {dtype} without a copy")
        return caches["k"], caches["v"]

    def calibrate(self, k: ChannelStatistics, v: ChannelStatistics) -> dict[str, Tensor]:
        """Return no constants."""
        _check_statistics(k, v, self.heads, self.head_dim)
        return {}


@dataclass(frozen=True)
class Nvfp4Kv:
    """Keys and values in NVFP4, four over six: 4.5 bits a number. Keys before RoPE, less a calibrated mean.

    Most of what a key holds is the same in every token of a head, as long as RoPE has not turned it: taken off there,
    the same bits store the rest more finely (docs/adr/0005).

    Parameters
    ----------
    heads, head_dim : int
        Attention heads and channels of each; head_dim a multiple of 16.

    Raises
    ------
    KvShapeError
        If a size is not positive or head_dim is no multiple of 16.
    """

    heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _check_sizes(self.heads, self.head_dim)
        if self.head_dim % NVFP4_BLOCK:
            raise KvShapeError(
                f"head_dim {self.head_dim} is no multiple of {NVFP4_BLOCK}, the NVFP4 scale block"
            )

    @property
    def name(self) -> str:
        """As in the manifest. ``fp4`` there names the first such format: keys after RoPE, no mean, top 6 alone."""
        return "fp4-before-rope"

    @property
    def keys_before_rope(self) -> bool:
        """Yes."""
        return True

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """Packed codes and e4m3 scale bytes, for keys and for values."""
        codes = (self.heads, self.head_dim // 2)
        scales = (self.heads, self.head_dim // NVFP4_BLOCK)
        return (
            CacheTensor("k_codes", codes, torch.uint8),
            CacheTensor("k_scales", scales, torch.uint8),
            CacheTensor("v_codes", codes, torch.uint8),
            CacheTensor("v_scales", scales, torch.uint8),
        )

    @property
    def scale_tensors(self) -> tuple[ScaleTensor, ...]:
        """One power of two per head, for keys and for values; the mean of each channel of the keys."""
        return (
            ScaleTensor("k_global_scale", (self.heads,), torch.float32),
            ScaleTensor("k_mean", (self.heads, self.head_dim), torch.float32),
            ScaleTensor("v_global_scale", (self.heads,), torch.float32),
        )

    @property
    def bits_per_number(self) -> float:
        """4.5: a 4-bit code and a sixteenth of a scale byte."""
        return 4 + 8 / NVFP4_BLOCK

    def pool_bytes(self, layers: int, tokens: int) -> int:
        """Bytes of the pool; see `KvFormat.pool_bytes`."""
        return _pool_bytes(self, layers, tokens)

    def write(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        token_index: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Quantise and store keys and values in place; see `KvFormat.write`."""
        for name, x in (("k", k), ("v", v)):
            nvfp4_write(
                x,
                token_index,
                caches[f"{name}_codes"],
                caches[f"{name}_scales"],
                scales[f"{name}_global_scale"],
                scales.get(f"{name}_mean"),
            )

    def window(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Expand and turn keys, expand values; see `KvFormat.window`. Places never written: the mean, and 0."""
        k = nvfp4_expand_keys(
            caches["k_codes"],
            caches["k_scales"],
            scales["k_global_scale"],
            scales["k_mean"],
            places["slot_rotary"],
            places["patch_rotary"],
            dtype,
        )
        return k, nvfp4_expand(caches["v_codes"], caches["v_scales"], scales["v_global_scale"], dtype)

    def calibrate(self, k: ChannelStatistics, v: ChannelStatistics) -> dict[str, Tensor]:
        """Choose the global scales and take the keys' mean.

        Parameters
        ----------
        k, v : ChannelStatistics
            Of the keys before RoPE, and of the values.

        Returns
        -------
        dict of str to Tensor
            The tensors that `scale_tensors` names.

        Raises
        ------
        KvShapeError
            If they are not of this format's channels.
        """
        _check_statistics(k, v, self.heads, self.head_dim)
        return {
            "k_global_scale": reference.nvfp4_global_scale(k.amax(k.mean)),
            "k_mean": k.mean,
            "v_global_scale": reference.nvfp4_global_scale(v.amax()),
        }


def _pool_bytes(form: KvFormat, layers: int, tokens: int) -> int:
    return layers * tokens * sum(tensor.token_bytes for tensor in form.cache_tensors)


def _check_sizes(heads: int, head_dim: int) -> None:
    if heads < 1 or head_dim < 1:
        raise KvShapeError(f"heads and head_dim must be at least 1, got {heads} and {head_dim}")


def _check_statistics(k: ChannelStatistics, v: ChannelStatistics, heads: int, head_dim: int) -> None:
    """Refuse statistics of another number of channels."""
    for name, found in (("k", k), ("v", v)):
        if tuple(found.mean.shape) != (heads, head_dim):
            raise KvShapeError(
                f"the statistics of {name} have shape {tuple(found.mean.shape)}, expected ({heads}, {head_dim})"
            )
