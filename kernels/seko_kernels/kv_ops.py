"""Ops that write and expand a cache of any `NumberFormat`: they check arguments and call Triton (CUDA) or the
reference (CPU)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels import kv_reference
from seko_kernels.errors import KernelsError
from seko_kernels.formats import NUMBER_FORMATS, NumberFormat
from seko_kernels.kv_tables import KeyTables, SinkApart, check_mean
from seko_kernels.ops import FLOAT_DTYPES, kernel_op, stand_in, takes_kernels
from seko_kernels.reference import rotate_centred_keys
from seko_kernels.triton.kv_expand import (
    KV_EXPAND_HEADS,
    KV_EXPAND_NUMBERS,
    KV_EXPAND_WARPS,
    kv_expand_kernel,
)
from seko_kernels.triton.kv_write import KV_WRITE_NUMBERS, KV_WRITE_WARPS, kv_write_kernel
from seko_kernels.triton.nvfp4_expand import EXPAND_TILE, EXPAND_WARPS, nvfp4_expand_kernel


def kv_write(
    form: NumberFormat,
    x: Tensor,
    token_index: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    global_scale: Tensor,
    mean: Tensor | None = None,
) -> None:
    """Quantise `x` minus a mean and store token ``t`` as token ``token_index[t]`` of the cache, in place.

    Parameters
    ----------
    form : NumberFormat
        Number format of the cache, one of `NUMBER_FORMATS`; `kv_reference.encode` has the formulas.
    x : Tensor
        Keys or values, ``[T, H, D]`` float32 or bfloat16, finite; copied unless its channels are contiguous.
    token_index : Tensor
        Index in the cache for each token, ``[T]`` int64, all different, in ``[0, N)``. The CUDA kernel skips indices
        outside this range.
    codes : Tensor
        Codes of the cache, ``[N, *form.codes_shape]`` of ``form.code_dtype``, contiguous; written in place.
    scales : Tensor or None
        Scales of the cache, ``[N, *form.scales_shape]`` uint8, contiguous; written in place. None if the format has no
        groups.
    global_scale : Tensor
        Global scale of each head, ``[H]`` float32, powers of two (see `reference.global_scale`).
    mean : Tensor, optional
        Mean of each channel, ``[H, D]`` float32, contiguous: subtracted before rounding.

    Raises
    ------
    KernelsError
        If shapes disagree, D is no multiple of the format's unit, a cache is not contiguous, a dtype is not one of
        those listed, or the tensors are on different devices or on a device that is neither CPU nor CUDA.
    """
    heads, head_dim = _check_written(x, token_index)
    _check_cache(form, codes, scales, global_scale, heads, head_dim)
    if mean is not None:
        check_mean(mean, heads, head_dim)
    tensors = [tensor for tensor in (x, token_index, codes, scales, global_scale, mean) if tensor is not None]
    by_kernel = takes_kernels(*tensors)
    if form.e2m1 and scales is not None and (whole := stand_in("nvfp4_write")):
        new_codes, new_scales = whole(*tensors)
        codes.copy_(new_codes)
        scales.copy_(new_scales)
        return
    if by_kernel:
        _kv_write_cuda(x, token_index, codes, scales, global_scale, mean, form.name)
        return
    new_codes, new_scales = kv_reference.encode(form, x, global_scale, mean)
    codes.index_copy_(0, token_index, new_codes)
    if scales is not None and new_scales is not None:
        scales.index_copy_(0, token_index, new_scales)


def kv_expand(
    form: NumberFormat,
    codes: Tensor,
    scales: Tensor | None,
    global_scale: Tensor,
    dtype: torch.dtype,
    keys: KeyTables | None = None,
    apart: SinkApart | None = None,
) -> Tensor:
    """Expand a quantised cache to numbers. For keys stored before RoPE, add the mean that writing subtracted, and
    rotate the keys.

    Tokens of the cache that were never written (zero bytes) expand to 0, or to the rotated mean.

    Parameters
    ----------
    form, codes, scales, global_scale
        Number format and tensors of the cache, described in `kv_write`.
    dtype : torch.dtype
        Dtype of the result: float32 or bfloat16.
    keys : KeyTables, optional
        The keys' mean and rotary tables.
    apart : SinkApart, optional
        For a cache that does not hold the sink: the result has room for the sink's tokens at the start of each row.

    Returns
    -------
    Tensor
        The expanded keys or values, ``[N, H, D]`` of `dtype`, new and contiguous. With ``apart`` the result is longer
        by the sink's tokens, whose values are undefined.

    Raises
    ------
    KernelsError
        If a tensor's shape, dtype or device does not fit the format, as in `kv_write`.
    """
    if codes.dim() != 3:
        raise KernelsError(f"codes have shape {tuple(codes.shape)}, expected [tokens, heads, bytes]")
    tokens, heads, width = codes.shape
    head_dim = width * 8 // form.code_bits
    _check_cache(form, codes, scales, global_scale, heads, head_dim)
    if dtype not in FLOAT_DTYPES:
        raise KernelsError(f"cannot expand to {dtype}, expected one of {FLOAT_DTYPES}")
    if keys is not None:
        keys.check(tokens, heads, head_dim)
    if apart is not None:
        apart.check(tokens)
    tensors = [tensor for tensor in (codes, scales, global_scale, *(keys or ())) if tensor is not None]
    by_kernel = takes_kernels(*tensors)
    expanded: Tensor
    if form.e2m1 and (whole := stand_in("nvfp4_expand" if keys is None else "nvfp4_expand_keys")):
        expanded = whole(*tensors, dtype)
        return expanded
    if by_kernel and form.e2m1 and keys is None and scales is not None:
        expanded = _nvfp4_expand_cuda(codes, scales, global_scale, dtype, *(apart or (tokens, 0)))
        return expanded
    if by_kernel:
        expanded = _kv_expand_cuda(
            codes,
            scales,
            global_scale,
            *(keys or (None, None, None)),
            dtype,
            form.name,
            *(apart or (tokens, 0)),
        )
        return expanded
    values = kv_reference.decode(form, codes, scales, global_scale, dtype if keys is None else torch.float32)
    if keys is not None:
        values = rotate_centred_keys(values, *keys, dtype)
    return values if apart is None else apart.lengthened(values)


@kernel_op("seko::kv_write", mutates_args={"codes", "scales"})
def _kv_write_cuda(
    x: Tensor,
    token_index: Tensor,
    codes: Tensor,
    scales: Tensor | None,
    global_scale: Tensor,
    mean: Tensor | None,
    form_name: str,
) -> None:
    form = NUMBER_FORMATS[form_name]
    tokens, heads, head_dim = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    units, tile = tokens * heads * head_dim // form.unit, KV_WRITE_NUMBERS // form.unit
    # Arguments that a variant of the kernel does not read still need a tensor: the scale is passed.
    wrap_triton(kv_write_kernel)[((units + tile - 1) // tile,)](
        x,
        token_index,
        codes,
        global_scale if scales is None else scales,
        global_scale,
        global_scale if mean is None else mean,
        units,
        codes.shape[0],
        x.stride(0),
        x.stride(1),
        HEADS=heads,
        HEAD_UNITS=head_dim // form.unit,
        UNIT=form.unit,
        BITS=form.code_bits,
        GROUPED=scales is not None,
        CENTRED=mean is not None,
        ROTATED=form.rotated,
        E2M1=form.e2m1,
        TILE=tile,
        num_warps=KV_WRITE_WARPS,
    )


@kernel_op("seko::kv_expand", mutates_args=())
def _kv_expand_cuda(
    codes: Tensor,
    scales: Tensor | None,
    global_scale: Tensor,
    mean: Tensor | None,
    slot_rotary: Tensor | None,
    patch_rotary: Tensor | None,
    dtype: torch.dtype,
    form_name: str,
    row_tokens: int,
    left_out: int,
) -> Tensor:
    form = NUMBER_FORMATS[form_name]
    tokens, heads, width = codes.shape
    head_dim = width * 8 // form.code_bits
    rows = tokens // row_tokens
    expanded = torch.empty((tokens + rows * left_out, heads, head_dim), dtype=dtype, device=codes.device)
    parts, tile = tokens * head_dim // form.unit, KV_EXPAND_NUMBERS // form.unit
    grid = ((parts + tile - 1) // tile, (heads + KV_EXPAND_HEADS - 1) // KV_EXPAND_HEADS)
    wrap_triton(kv_expand_kernel)[grid](
        codes,
        global_scale if scales is None else scales,
        global_scale,
        global_scale if mean is None else mean,
        global_scale if slot_rotary is None else slot_rotary,
        global_scale if patch_rotary is None else patch_rotary,
        expanded,
        parts,
        1 if patch_rotary is None else patch_rotary.shape[0],
        row_tokens,
        left_out,
        HEADS=heads,
        HEAD_UNITS=head_dim // form.unit,
        UNIT=form.unit,
        BITS=form.code_bits,
        GROUPED=scales is not None,
        SLOT_PAIRS=0 if slot_rotary is None else slot_rotary.shape[1],
        GROUP=KV_EXPAND_HEADS,
        APART=left_out > 0,
        ROTATED=form.rotated,
        E2M1=form.e2m1,
        TILE=tile,
        num_warps=KV_EXPAND_WARPS,
    )
    return expanded


@kernel_op("seko::nvfp4_expand", mutates_args=())
def _nvfp4_expand_cuda(
    codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype, row_tokens: int, left_out: int
) -> Tensor:
    tokens, heads, half_dim = codes.shape
    window = tokens + tokens // row_tokens * left_out
    expanded = torch.empty((window, heads, half_dim * 2), dtype=dtype, device=codes.device)
    head_blocks = scales.shape[2]
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


def _check_written(x: Tensor, token_index: Tensor) -> tuple[int, int]:
    """Check the input and the indices of a write to the cache; return the numbers of heads and channels. Raises a
    `KernelsError`."""
    if x.dim() != 3:
        raise KernelsError(f"x has shape {tuple(x.shape)}, expected [tokens, heads, head_dim]")
    tokens, heads, head_dim = x.shape
    if tuple(token_index.shape) != (tokens,):
        raise KernelsError(
            f"token_index has shape {tuple(token_index.shape)}, expected ({tokens},): one a token"
        )
    if x.dtype not in FLOAT_DTYPES:
        raise KernelsError(f"x is {x.dtype}, expected one of {FLOAT_DTYPES}")
    if token_index.dtype != torch.int64:
        raise KernelsError(f"token_index is {token_index.dtype}, expected torch.int64")
    return heads, head_dim


def _check_cache(
    form: NumberFormat, codes: Tensor, scales: Tensor | None, global_scale: Tensor, heads: int, head_dim: int
) -> None:
    """Raise an error unless the cache tensors have the format's shapes and dtypes for one layer of N tokens."""
    if head_dim < form.unit or head_dim % form.unit:
        raise KernelsError(
            f"head_dim {head_dim} is no multiple of {form.unit}, what {form.name} takes together"
        )
    if global_scale.dtype != torch.float32:
        raise KernelsError(f"global_scale is {global_scale.dtype}, expected torch.float32")
    if tuple(global_scale.shape) != (heads,) or not global_scale.is_contiguous():
        raise KernelsError(
            f"global_scale has shape {tuple(global_scale.shape)}, expected ({heads},), contiguous"
        )
    if (scales is not None) != bool(form.group):
        raise KernelsError(
            f"{form.name} has {'' if form.group else 'no '}scales of groups, the caller none or some"
        )
    wanted = [("codes", codes, form.codes_shape(heads, head_dim), form.code_dtype)]
    if scales is not None:
        wanted.append(("scales", scales, form.scales_shape(heads, head_dim), torch.uint8))
    for name, cache, shape, dtype in wanted:
        if cache.dtype != dtype:
            raise KernelsError(f"{name} of {form.name} are {cache.dtype}, expected {dtype}")
        if tuple(cache.shape) != (codes.shape[0], *shape):
            raise KernelsError(
                f"{name} of {form.name} have shape {tuple(cache.shape)}, expected {(codes.shape[0], *shape)}"
            )
        if not cache.is_contiguous():
            raise KernelsError(
                f"{name} are strided {cache.stride()}; a cache must be contiguous, pass the pool's own view"
            )
