"""How a KV cache is stored: the protocol, the exact format, NVFP4, the lookup by name. No bit arithmetic.

A format works on the caches of **one layer**, flat over tokens (``[N, *token_shape]``; N counts batch rows
too). Another format (int8, int4, fp8) is one more frozen dataclass with these six members and a line in
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
from seko_kernels.ops import nvfp4_expand, nvfp4_write

EXACT_SCHEMES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCHEMES = (*EXACT_SCHEMES, "fp4")


class KvFormat(Protocol):
    """What a model, an exporter and a manifest need to know of a way to store keys and values."""

    @property
    def name(self) -> str:
        """Scheme name, as in the manifest."""

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
        """Store ``k[t]``, ``v[t]`` (``[T, H, D]``) at place ``token_index[t]`` (``[T]`` int64), in place."""

    def window(
        self, caches: Mapping[str, Tensor], scales: Mapping[str, Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of every place, ``[N, H, D]`` each, as `dtype`, for attention."""

    def calibrate(self, k_amax: Tensor, v_amax: Tensor) -> dict[str, Tensor]:
        """Turn the largest magnitudes per head (``[H]`` float32) into the constants `scale_tensors` names."""


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
        """Scheme name, as in the manifest."""
        return next(name for name, dtype in EXACT_SCHEMES.items() if dtype == self.dtype)

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

    def calibrate(self, k_amax: Tensor, v_amax: Tensor) -> dict[str, Tensor]:
        """Return no constants."""
        _check_amax(k_amax, self.heads)
        _check_amax(v_amax, self.heads)
        return {}


@dataclass(frozen=True)
class Nvfp4Kv:
    """Keys and values in NVFP4: 4.5 bits a number.

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
        """Scheme name, as in the manifest."""
        return "fp4"

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
        """One power of two per head, for keys and for values."""
        return (
            ScaleTensor("k_global_scale", (self.heads,), torch.float32),
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
            )

    def window(
        self, caches: Mapping[str, Tensor], scales: Mapping[str, Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Expand keys and values exactly; see `KvFormat.window`. Places never written are 0."""
        k, v = (
            nvfp4_expand(
                caches[f"{name}_codes"], caches[f"{name}_scales"], scales[f"{name}_global_scale"], dtype
            )
            for name in ("k", "v")
        )
        return k, v

    def calibrate(self, k_amax: Tensor, v_amax: Tensor) -> dict[str, Tensor]:
        """Choose the global scales.

        Parameters
        ----------
        k_amax, v_amax : Tensor
            ``[heads]`` float32: largest magnitude of the keys (as they are written) and values, per head.

        Returns
        -------
        dict of str to Tensor
            The tensors that `scale_tensors` names.

        Raises
        ------
        KvCalibrationError
            If a magnitude is negative or not finite.
        KvShapeError
            If there is not one magnitude a head.
        """
        _check_amax(k_amax, self.heads)
        _check_amax(v_amax, self.heads)
        return {
            "k_global_scale": reference.nvfp4_global_scale(k_amax),
            "v_global_scale": reference.nvfp4_global_scale(v_amax),
        }


def _pool_bytes(form: KvFormat, layers: int, tokens: int) -> int:
    return layers * tokens * sum(tensor.token_bytes for tensor in form.cache_tensors)


def _check_sizes(heads: int, head_dim: int) -> None:
    if heads < 1 or head_dim < 1:
        raise KvShapeError(f"heads and head_dim must be at least 1, got {heads} and {head_dim}")


def _check_amax(amax: Tensor, heads: int) -> None:
    """Refuse what is not one finite magnitude per head, float32."""
    if tuple(amax.shape) != (heads,):
        raise KvShapeError(f"amax has shape {tuple(amax.shape)}, expected ({heads},): one a head")
    if amax.dtype != torch.float32:
        raise KvCalibrationError(f"amax is {amax.dtype}, expected torch.float32")
    if not bool(((amax >= 0) & torch.isfinite(amax)).all()):
        raise KvCalibrationError(f"amax must be finite and >= 0, got {amax.tolist()}; is an activation NaN?")
