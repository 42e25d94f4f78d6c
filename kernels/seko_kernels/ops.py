"""The ops that a model calls: checks, then the Triton kernel (CUDA) or the reference (CPU).

The device at trace time decides. The CUDA half is a `torch.library.triton_op`, which AOTInductor compiles into its
package; an ordinary custom op would be opaque and need this module at run time. The CPU half is plain torch and
compiles like the rest of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from seko_kernels import reference
from seko_kernels.errors import KvDeviceError, KvDtypeError, KvShapeError
from seko_kernels.formats import NVFP4_BLOCK
from seko_kernels.kv_tables import KeyTables, SinkApart, check_mean
from seko_kernels.triton.nvfp4_expand import EXPAND_TILE, EXPAND_WARPS, nvfp4_expand_kernel
from seko_kernels.triton.nvfp4_expand_keys import (
    EXPAND_KEYS_HEADS,
    EXPAND_KEYS_TILE,
    EXPAND_KEYS_WARPS,
    nvfp4_expand_keys_kernel,
)
from seko_kernels.triton.nvfp4_write import WRITE_TILE, WRITE_WARPS, nvfp4_write_kernel

FLOAT_DTYPES = (torch.float32, torch.bfloat16)
_PLAIN = ContextVar("seko_plain_torch", default=False)
_STAND_INS: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("seko_stand_ins", default={})  # noqa: B039 - never written


def nvfp4_write(
    x: Tensor,
    token_index: Tensor,
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    mean: Tensor | None = None,
) -> None:
    """Quantise `x` minus a mean to NVFP4 and store token ``t`` as token ``token_index[t]`` of the cache, in place.

    Parameters
    ----------
    x : Tensor
        ``[T, H, D]`` float32 or bfloat16, finite; needs no copy if its channels are contiguous.
    token_index : Tensor
        ``[T]`` int64, distinct, in ``[0, N)``. The CUDA kernel skips tokens outside.
    codes : Tensor
        ``[N, H, D // 2]`` uint8, contiguous; mutated.
    scales : Tensor
        ``[N, H, D // 16]`` uint8, contiguous; mutated.
    global_scale : Tensor
        ``[H]`` float32, powers of two (see `reference.nvfp4_global_scale`).
    mean : Tensor, optional
        ``[H, D]`` float32, contiguous: subtracted before rounding.

    Raises
    ------
    KvShapeError
        If shapes disagree, D is no multiple of 16, or a cache is not contiguous.
    KvDtypeError
        If a dtype is not the one above.
    KvDeviceError
        If the tensors lie on different devices, or on one that is neither CPU nor CUDA.
    """
    heads, head_dim = check_written(x, token_index)
    _check_nvfp4_cache(codes, scales, global_scale, heads, head_dim)
    tensors = [x, token_index, codes, scales, global_scale]
    if mean is not None:
        check_mean(mean, heads, head_dim)
        tensors.append(mean)
    by_kernel = takes_kernels(*tensors)
    if whole := stand_in("nvfp4_write"):
        new_codes, new_scales = whole(*tensors)
        codes.copy_(new_codes)
        scales.copy_(new_scales)
        return
    if by_kernel:
        _nvfp4_write_cuda(x, token_index, codes, scales, global_scale, mean)
        return
    new_codes, new_scales = reference.nvfp4_encode(x, global_scale, mean)
    codes.index_copy_(0, token_index, new_codes)
    scales.index_copy_(0, token_index, new_scales)


def nvfp4_expand(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype,
    apart: SinkApart | None = None,
) -> Tensor:
    """Expand an NVFP4 cache, exactly. Bytes that were never written (zeros) expand to 0.

    Parameters
    ----------
    codes : Tensor
        ``[N, H, D // 2]`` uint8, contiguous.
    scales : Tensor
        ``[N, H, D // 16]`` uint8, contiguous.
    global_scale : Tensor
        ``[H]`` float32, powers of two.
    dtype : torch.dtype
        float32 or bfloat16: both hold every value exactly.
    apart : SinkApart, optional
        For a cache without the sink: leaves room for the sink's tokens at the start of each row.

    Returns
    -------
    Tensor
        ``[N, H, D]`` of `dtype`, new and contiguous. With ``apart`` it is longer, and the sink's tokens are
        undefined.

    Raises
    ------
    KvShapeError, KvDtypeError, KvDeviceError
        As in `nvfp4_write`.
    """
    if codes.dim() != 3:
        raise KvShapeError(f"codes have shape {tuple(codes.shape)}, expected [tokens, heads, head_dim // 2]")
    _check_nvfp4_cache(codes, scales, global_scale, codes.shape[1], codes.shape[2] * 2)
    if dtype not in FLOAT_DTYPES:
        raise KvDtypeError(
            f"cannot expand to {dtype}, expected one of {FLOAT_DTYPES}, which hold every value"
        )
    if apart is not None:
        apart.check(codes.shape[0])
    by_kernel = takes_kernels(codes, scales, global_scale)
    expanded: Tensor
    if whole := stand_in("nvfp4_expand"):
        expanded = whole(codes, scales, global_scale, dtype)
        return expanded
    if by_kernel:
        expanded = _nvfp4_expand_cuda(codes, scales, global_scale, dtype, *(apart or (codes.shape[0], 0)))
        return expanded
    expanded = reference.nvfp4_decode(codes, scales, global_scale, dtype)
    return expanded if apart is None else apart.lengthened(expanded)


def nvfp4_expand_keys(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    mean: Tensor,
    slot_rotary: Tensor,
    patch_rotary: Tensor,
    dtype: torch.dtype,
    apart: SinkApart | None = None,
) -> Tensor:
    """Expand NVFP4 keys stored before RoPE: add the mean that the write subtracted, and rotate.

    `reference.nvfp4_decode_keys` has the formula. Bytes that were never written (zeros) expand to the rotated mean.

    Parameters
    ----------
    codes : Tensor
        ``[N, H, D // 2]`` uint8, contiguous; N = slots * n, slot by slot.
    scales : Tensor
        ``[N, H, D // 16]`` uint8, contiguous.
    global_scale : Tensor
        ``[H]`` float32, powers of two.
    mean : Tensor
        ``[H, D]`` float32, contiguous.
    slot_rotary : Tensor
        ``[slots, A, 2]`` float32, contiguous: cosine and sine of the first A channel pairs, for the frame in each
        slot.
    patch_rotary : Tensor
        ``[n, D // 2 - A, 2]`` float32, contiguous: of the other pairs, by patch of a latent frame.
    dtype : torch.dtype
        float32 or bfloat16.
    apart : SinkApart, optional
        As `nvfp4_expand` takes it; ``slot_rotary`` is of the slots that this cache holds.

    Returns
    -------
    Tensor
        As `nvfp4_expand` gives it.

    Raises
    ------
    KvShapeError, KvDtypeError, KvDeviceError
        As in `nvfp4_write`.
    """
    if codes.dim() != 3:
        raise KvShapeError(f"codes have shape {tuple(codes.shape)}, expected [tokens, heads, head_dim // 2]")
    tokens, heads, half_dim = codes.shape
    _check_nvfp4_cache(codes, scales, global_scale, heads, half_dim * 2)
    KeyTables(mean, slot_rotary, patch_rotary).check(tokens, heads, half_dim * 2)
    if apart is not None:
        apart.check(tokens)
    if dtype not in FLOAT_DTYPES:
        raise KvDtypeError(f"cannot expand keys to {dtype}, expected one of {FLOAT_DTYPES}")
    tensors = (codes, scales, global_scale, mean, slot_rotary, patch_rotary)
    by_kernel = takes_kernels(*tensors)
    if whole := stand_in("nvfp4_expand_keys"):
        stood: Tensor = whole(*tensors, dtype)
        return stood
    if by_kernel:
        made: Tensor = _nvfp4_expand_keys_cuda(*tensors, dtype, *(apart or (tokens, 0)))
        return made
    expanded = reference.nvfp4_decode_keys(*tensors, dtype)
    return expanded if apart is None else apart.lengthened(expanded)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Use the reference on CUDA too, inside this context.

    For exported programs that are opened where this package is missing: they may contain none of its ops. The bytes
    are the same; torch's compiler fuses what it can.
    """
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def takes_kernels(*tensors: Tensor) -> bool:
    """Return whether an op on these tensors runs its kernel (CUDA) or its reference (CPU, or `plain_torch`).

    Raises
    ------
    KvDeviceError
        If the tensors lie on different devices, or on one that is neither CPU nor CUDA.
    """
    return _device_type(*tensors) == "cuda" and not _PLAIN.get()


@contextmanager
def stand_ins(by_name: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside this context, call the caller's functions instead of ops, after the ops' own checks.

    For graphs in another language that represent an op as one node. A stand-in writes nothing in place.

    Parameters
    ----------
    by_name : Mapping[str, Callable]
        ``nvfp4_write`` and ``fp8_expand`` take the op's tensors and return whole new ones of what the op writes;
        others are called as the op is.
    """
    token = _STAND_INS.set(by_name)
    try:
        yield
    finally:
        _STAND_INS.reset(token)


def stand_in(name: str) -> Callable[..., Any] | None:
    """Return the function that `stand_ins` set for an op of another module, or None."""
    return _STAND_INS.get().get(name)


@triton_op("seko::nvfp4_write", mutates_args={"codes", "scales"})
def _nvfp4_write_cuda(
    x: Tensor, token_index: Tensor, codes: Tensor, scales: Tensor, global_scale: Tensor, mean: Tensor | None
) -> None:
    tokens, heads, head_dim = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    head_blocks = head_dim // NVFP4_BLOCK
    blocks = tokens * heads * head_blocks
    wrap_triton(nvfp4_write_kernel)[((blocks + WRITE_TILE - 1) // WRITE_TILE,)](
        x,
        token_index,
        codes,
        scales,
        global_scale,
        global_scale if mean is None else mean,
        blocks,
        codes.shape[0],
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        HEAD_BLOCKS=head_blocks,
        CENTRED=mean is not None,
        TILE=WRITE_TILE,
        num_warps=WRITE_WARPS,
    )


@triton_op("seko::nvfp4_expand", mutates_args=())
def _nvfp4_expand_cuda(
    codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype, row_tokens: int, left_out: int
) -> Tensor:
    tokens, heads, half_dim = codes.shape
    window = tokens + tokens // row_tokens * left_out
    expanded = torch.empty((window, heads, half_dim * 2), dtype=dtype, device=codes.device)
    head_blocks = half_dim * 2 // NVFP4_BLOCK
    blocks = tokens * heads * head_blocks
    wrap_triton(nvfp4_expand_kernel)[((blocks + EXPAND_TILE - 1) // EXPAND_TILE,)](
        codes,
        scales,
        global_scale,
        expanded,
        blocks,
        row_tokens,
        left_out,
        HEADS=heads,
        HEAD_BLOCKS=head_blocks,
        APART=left_out > 0,
        TILE=EXPAND_TILE,
        num_warps=EXPAND_WARPS,
    )
    return expanded


@triton_op("seko::nvfp4_expand_keys", mutates_args=())
def _nvfp4_expand_keys_cuda(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    mean: Tensor,
    slot_rotary: Tensor,
    patch_rotary: Tensor,
    dtype: torch.dtype,
    row_tokens: int,
    left_out: int,
) -> Tensor:
    tokens, heads, half_dim = codes.shape
    window = tokens + tokens // row_tokens * left_out
    expanded = torch.empty((window, heads, half_dim * 2), dtype=dtype, device=codes.device)
    head_blocks = half_dim * 2 // NVFP4_BLOCK
    parts = tokens * head_blocks
    grid = (
        (parts + EXPAND_KEYS_TILE - 1) // EXPAND_KEYS_TILE,
        (heads + EXPAND_KEYS_HEADS - 1) // EXPAND_KEYS_HEADS,
    )
    wrap_triton(nvfp4_expand_keys_kernel)[grid](
        codes,
        scales,
        global_scale,
        mean,
        slot_rotary,
        patch_rotary,
        expanded,
        parts,
        patch_rotary.shape[0],
        row_tokens,
        left_out,
        HEADS=heads,
        HEAD_BLOCKS=head_blocks,
        SLOT_PAIRS=slot_rotary.shape[1],
        GROUP=EXPAND_KEYS_HEADS,
        APART=left_out > 0,
        TILE=EXPAND_KEYS_TILE,
        num_warps=EXPAND_KEYS_WARPS,
    )
    return expanded


def check_written(x: Tensor, token_index: Tensor) -> tuple[int, int]:
    """Check a write's input, indices and constants; return heads and channels. Raises `KvShapeError`,
    `KvDtypeError`.
    """
    if x.dim() != 3:
        raise KvShapeError(f"x has shape {tuple(x.shape)}, expected [tokens, heads, head_dim]")
    tokens, heads, head_dim = x.shape
    if tuple(token_index.shape) != (tokens,):
        raise KvShapeError(
            f"token_index has shape {tuple(token_index.shape)}, expected ({tokens},): one a token"
        )
    if x.dtype not in FLOAT_DTYPES:
        raise KvDtypeError(f"x is {x.dtype}, expected one of {FLOAT_DTYPES}")
    if token_index.dtype != torch.int64:
        raise KvDtypeError(f"token_index is {token_index.dtype}, expected torch.int64")
    return heads, head_dim


def _check_nvfp4_cache(
    codes: Tensor, scales: Tensor, global_scale: Tensor, heads: int, head_dim: int
) -> None:
    """Refuse an NVFP4 cache that is not one layer's ``[N, heads, head_dim]`` in the format's bytes."""
    if head_dim < NVFP4_BLOCK or head_dim % NVFP4_BLOCK:
        raise KvShapeError(f"head_dim {head_dim} is no multiple of {NVFP4_BLOCK}, the NVFP4 scale block")
    if global_scale.dtype != torch.float32:
        raise KvDtypeError(f"global_scale is {global_scale.dtype}, expected torch.float32")
    if tuple(global_scale.shape) != (heads,) or not global_scale.is_contiguous():
        raise KvShapeError(
            f"global_scale has shape {tuple(global_scale.shape)}, expected ({heads},), contiguous"
        )
    cache_tokens = codes.shape[0]
    for name, cache, last in (("codes", codes, head_dim // 2), ("scales", scales, head_dim // NVFP4_BLOCK)):
        if cache.dtype != torch.uint8:
            raise KvDtypeError(f"{name} are {cache.dtype}, expected torch.uint8")
        if tuple(cache.shape) != (cache_tokens, heads, last):
            raise KvShapeError(
                f"{name} have shape {tuple(cache.shape)}, expected {(cache_tokens, heads, last)}"
            )
        if not cache.is_contiguous():
            raise KvShapeError(
                f"{name} are strided {cache.stride()}; a cache must be contiguous, pass the pool's own view"
            )


def _device_type(*tensors: Tensor) -> str:
    """Type of the one device that all tensors lie on."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        raise KvDeviceError(f"tensors lie on {sorted(map(str, devices))}, expected one device")
    kind = devices.pop().type
    if kind not in ("cpu", "cuda"):
        raise KvDeviceError(f"tensors lie on a {kind} device, expected cpu or cuda")
    return kind
