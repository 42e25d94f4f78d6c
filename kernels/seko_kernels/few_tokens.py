"""Attention ops for few tokens: attention among at most 64 tokens, and attention of one new token of each row to the
row's cached positions. In these attention ops several query heads share one key head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels import few_rows_reference as reference
from seko_kernels.attention_parts import softmax_scale
from seko_kernels.checks import expect, expect_dims
from seko_kernels.errors import KernelsError
from seko_kernels.few_rows import TICKETS
from seko_kernels.formats import FP4, INT8, NUMBER_FORMATS, NumberFormat
from seko_kernels.kv_ops import kv_expand, kv_write
from seko_kernels.ops import FLOAT_DTYPES, kernel_op, takes_kernels
from seko_kernels.triton.few_tokens import decode_attention_kernel, local_attention_kernel

LOCAL_TOKENS = 64  # that one program holds
LOCAL_WARPS = 1
DECODE_WARPS = 4
DECODE_TURN = 64  # positions
# The factor of all steps of a quantised cache, which are e4m3 numbers themselves: with it a group's largest magnitude
# may be from 2**-7 to 160 without a loss of digits. Nothing is calibrated.
STEP_FACTORS = {INT8.name: 2.0**-8, FP4.name: 2.0**-4}
_LEAST = 16  # side of a tensor core's operand
_PROGRAMS = 132  # multiprocessors of a large GPU
_MOST_PARTS = 16


def local_attention(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Rotate q and k, and return the attention of each row's tokens to all tokens of the same row.

    Parameters
    ----------
    qkv : Tensor
        Queries, keys and values, ``[B, T, (heads + 2 * kv_heads) * D]`` bfloat16 or float32, contiguous; at most 64
        tokens on CUDA.
    cos, sin : Tensor
        Rotary tables, ``[T, D]`` float32; the first and the second half of the D channels are equal.
    heads, kv_heads : int
        Number of query heads, and number of key and value heads.

    Returns
    -------
    Tensor
        The attention, ``[B, T, heads * D]`` of qkv's dtype.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here, or T is above 64 on CUDA.
    """
    expect_dims("qkv", qkv, 3, "[batch, tokens, heads of q, k and v]")
    _, tokens, _ = qkv.shape
    head_dim = _head_dim(qkv, heads, kv_heads)
    expect("qkv", qkv, tuple(qkv.shape), *FLOAT_DTYPES)
    for name, table in (("cos", cos), ("sin", sin)):
        expect(name, table, (tokens, head_dim), torch.float32)
    if not takes_kernels(qkv, cos, sin):
        return reference.local_attention(qkv, cos, sin, heads, kv_heads)
    if tokens > LOCAL_TOKENS:
        raise KernelsError(f"{tokens} tokens attend to each other, expected {LOCAL_TOKENS} at most")
    attended: Tensor = _local_attention_cuda(qkv, cos, sin, heads, kv_heads)
    return attended


def decode_attention(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    positions: Tensor,
    write_index: Tensor,
    tickets: Tensor,
) -> Tensor:
    """Rotate q and k of one new token of each row, write k and v to the cache, and return the attention of each new
    token to all positions of its row.

    Parameters
    ----------
    qkv : Tensor
        Queries, keys and values of the new tokens, ``[B, (H + 2 * K) * D]`` bfloat16 or float32, contiguous: H query
        heads, K key heads, D channels.
    cos, sin : Tensor or None
        Rotary tables, ``[B, D]`` float32, in which the first and the second half of the D channels are equal. None:
        queries and keys are not rotated.
    k_cache, v_cache : Tensor
        The cache of keys and of values, ``[S, K, D]`` of qkv's dtype, contiguous, with S places that the rows share;
        written in place.
    starts, positions, write_index : Tensor
        Place of each row's first position in the cache, number of the row's positions before the new token, and place
        of the new token, ``[B]`` int64. Several rows may write to one place that no row reads.
    tickets : Tensor
        Counters that the layer's `few_rows.norm_linear` returned. All counters are zero again after the launch.

    Returns
    -------
    Tensor
        The attention, ``[B, H * D]`` of qkv's dtype.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here.
    """
    expect_dims("k_cache", k_cache, 3, "[places, heads, head_dim]")
    _, kv_heads, head_dim = k_cache.shape
    _checked_heads(qkv, kv_heads, head_dim)
    expect("k_cache", k_cache, tuple(k_cache.shape), qkv.dtype)
    expect("v_cache", v_cache, tuple(k_cache.shape), qkv.dtype)
    _check_decode(qkv, cos, sin, (starts, positions, write_index), tickets, head_dim)
    if not takes_kernels(qkv, k_cache, v_cache, starts, positions, write_index, tickets):
        return reference.decode_attention(qkv, cos, sin, k_cache, v_cache, starts, positions, write_index)
    arguments = (qkv, cos, sin, k_cache, v_cache, starts, positions, write_index, tickets)
    attended: Tensor = _decode_attention_cuda(*arguments)
    return attended


class QuantisedCache(NamedTuple):
    """Cached keys or cached values as codes and scales, in the layout of `kv_ops.kv_write`.

    Parameters
    ----------
    form : NumberFormat
        Number format of the codes, one of `STEP_FACTORS`.
    codes, scales : Tensor
        Codes and scales for S places of the cache, ``[S, *form.codes_shape]`` and ``[S, *form.scales_shape]``.
    """

    form: NumberFormat
    codes: Tensor
    scales: Tensor

    def write(self, x: Tensor, index: Tensor) -> None:
        """Quantise the keys or values ``x`` ``[T, K, D]`` of T tokens and write them to the places ``index``
        ``[T]`` int64."""
        kv_write(self.form, x, index, self.codes, self.scales, self._factors())

    def read(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the keys or values ``[T, K, D]`` at T given places of the cache."""
        codes, scales = (stored.index_select(0, index) for stored in (self.codes, self.scales))
        return kv_expand(self.form, codes, scales, self._factors(), dtype)

    def _factors(self) -> Tensor:
        factor = STEP_FACTORS[self.form.name]
        return torch.full((self.codes.shape[1],), factor, dtype=torch.float32, device=self.codes.device)


def quantised_decode_attention(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: QuantisedCache,
    values: QuantisedCache,
    starts: Tensor,
    positions: Tensor,
    tickets: Tensor,
) -> Tensor:
    """Return the attention that `decode_attention` returns, for a quantised cache to which the new token was already
    written.

    The parameters and errors are those of `decode_attention`. Keys and values have the same number format.
    """
    form, (codes, scales) = keys.form, keys[1:]
    places, kv_heads, _ = codes.shape
    head_dim = _checked_heads(qkv, kv_heads, codes.shape[2] * 8 // form.code_bits)
    if form.name not in STEP_FACTORS or values.form is not form:
        raise KernelsError(
            f"keys are {form.name} and values {values.form.name}, expected both of {', '.join(STEP_FACTORS)}"
        )
    for name, cache in (("keys", keys), ("values", values)):
        expect(
            f"{name}' codes", cache.codes, (places, *form.codes_shape(kv_heads, head_dim)), form.code_dtype
        )
        expect(f"{name}' scales", cache.scales, (places, *form.scales_shape(kv_heads, head_dim)), torch.uint8)
    _check_decode(qkv, cos, sin, (starts, positions), tickets, head_dim)
    if not takes_kernels(qkv, codes, scales, starts, positions, tickets):
        index = torch.arange(places, device=qkv.device)
        whole = (cache.read(index, qkv.dtype) for cache in (keys, values))
        k, v = whole
        return reference.attended(qkv, cos, sin, k, v, starts, positions)
    attended: Tensor = _quantised_decode_cuda(
        *(qkv, cos, sin, codes, scales, values.codes, values.scales, starts, positions, tickets), form.name
    )
    return attended


def decode_parts(batch: int, kv_heads: int) -> int:
    """Return the number of parts into which the kernel splits each row's cached positions. The number depends on
    `batch` and `kv_heads` alone."""
    wanted = _PROGRAMS // (batch * kv_heads)
    return max(1, min(_MOST_PARTS, 1 << max(0, wanted.bit_length() - 1)))


def _checked_heads(qkv: Tensor, kv_heads: int, head_dim: int) -> int:
    """Return the number of channels of a head; raise an error if the channels of ``qkv`` are not a whole number of
    heads."""
    expect_dims("qkv", qkv, 2, "[batch, heads of q, k and v]")
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if _head_dim(qkv, heads, kv_heads) != head_dim:
        raise KernelsError(
            f"qkv has {qkv.shape[1]} channels, no whole heads of {head_dim} beside {kv_heads} twice"
        )
    return head_dim


def _check_decode(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    indices: tuple[Tensor, ...],
    tickets: Tensor,
    head_dim: int,
) -> None:
    """Raise an error if a tensor of `decode_attention`, other than a cache, has another shape, dtype or layout than
    documented."""
    batch, _ = qkv.shape
    expect("qkv", qkv, tuple(qkv.shape), *FLOAT_DTYPES)
    expect("tickets", tickets, (TICKETS,), torch.int32)
    for name, index in zip(("starts", "positions", "write_index"), indices, strict=False):
        expect(name, index, (batch,), torch.int64)
    if (cos is None) != (sin is None):
        raise KernelsError("cos and sin must both be tables or both be None")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None:
            expect(name, table, (batch, head_dim), torch.float32)


def _head_dim(qkv: Tensor, heads: int, kv_heads: int) -> int:
    every = heads + 2 * kv_heads
    if min(heads, kv_heads) < 1 or heads % kv_heads or qkv.shape[-1] % (2 * every):
        raise KernelsError(
            f"{qkv.shape[-1]} channels are not {heads} heads of queries and twice {kv_heads} of keys and values: the "
            "first must be a multiple of the second, and a head of even width"
        )
    return qkv.shape[-1] // every


def _block(size: int) -> int:
    return max(_LEAST, int(triton.next_power_of_2(size)))


@kernel_op("seko::local_attention", mutates_args=())
def _local_attention_cuda(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> Tensor:
    return launch_local_attention(wrap_triton(local_attention_kernel), qkv, cos, sin, heads, kv_heads)


@kernel_op("seko::decode_attention", mutates_args={"k_cache", "v_cache", "tickets"})
def _decode_attention_cuda(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    positions: Tensor,
    write_index: Tensor,
    tickets: Tensor,
) -> Tensor:
    parts = decode_parts(len(qkv), k_cache.shape[1])
    arguments = (qkv, cos, sin, k_cache, v_cache, starts, positions, write_index, tickets)
    return launch_decode_attention(wrap_triton(decode_attention_kernel), *arguments, parts)


@kernel_op("seko::quantised_decode_attention", mutates_args={"tickets"})
def _quantised_decode_cuda(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    starts: Tensor,
    positions: Tensor,
    tickets: Tensor,
    form: str,
) -> Tensor:
    parts = decode_parts(len(qkv), k_codes.shape[1])
    arguments = (qkv, cos, sin, k_codes, v_codes, starts, positions, starts, tickets)
    quantised = (NUMBER_FORMATS[form], k_scales, v_scales)
    return launch_decode_attention(
        wrap_triton(decode_attention_kernel),
        *arguments,
        parts,
        quantised=quantised,
    )


def launch_local_attention(
    kernel: Any,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    warps: int = LOCAL_WARPS,
) -> Tensor:
    """Launch `local_attention_kernel`; `kernel` is this kernel or a torch op's wrapper of it."""
    batch, tokens, width = qkv.shape
    head_dim = width // (heads + 2 * kv_heads)
    out = torch.empty((batch, tokens, heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    kernel[(batch, heads)](
        qkv,
        cos,
        sin,
        out,
        SCALE=softmax_scale(head_dim),
        TOKENS=tokens,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BT=_block(tokens),
        BH=_block(head_dim // 2),
        BD=_block(head_dim),
        num_warps=warps,
    )
    return out


def launch_decode_attention(
    kernel: Any,
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    positions: Tensor,
    write_index: Tensor,
    tickets: Tensor,
    parts: int,
    turn: int = DECODE_TURN,
    warps: int = DECODE_WARPS,
    quantised: tuple[NumberFormat, Tensor, Tensor] | None = None,
) -> Tensor:
    """Launch `decode_attention_kernel` with each row's positions split into `parts`; `kernel` is this kernel or a torch
    op's wrapper of it.

    ``quantised`` has the number format of the caches' codes, the scales of the keys and the scales of the values;
    None: the caches are exact.
    """
    batch, width = qkv.shape
    kv_heads, head_dim = k_cache.shape[1:]
    form, k_scales, v_scales = quantised or (None, k_cache, v_cache)  # which are not read then
    if form is not None:
        head_dim = head_dim * 8 // form.code_bits
    if batch * kv_heads > TICKETS:
        raise KernelsError(
            f"{batch} rows of {kv_heads} heads need as many tickets, expected {TICKETS} at most"
        )
    heads = width // head_dim - 2 * kv_heads
    group, block = _block(heads // kv_heads), _block(head_dim)
    out = torch.empty((batch, heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    sums = torch.empty((batch, kv_heads, parts, group, block), dtype=torch.float32, device=qkv.device)
    tops = torch.empty((batch, kv_heads, parts, 2, group), dtype=torch.float32, device=qkv.device)
    kernel[(batch, kv_heads, parts)](
        qkv,
        sums if cos is None else cos,  # not read then; a tensor must stand there
        sums if sin is None else sin,
        k_cache,
        v_cache,
        k_scales,
        v_scales,
        starts,
        positions,
        write_index,
        out,
        sums,
        tops,
        tickets,
        SCALE=softmax_scale(head_dim),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROPE=cos is not None,
        BITS=0 if form is None else form.code_bits,
        GROUP=1 if form is None else form.group,
        GLOBAL_SCALE=1.0 if form is None else STEP_FACTORS[form.name],
        SPLITS=parts,
        BG=group,
        BN=turn,
        BH=_block(head_dim // 2),
        BD=block,
        num_warps=warps,
    )
    return out
