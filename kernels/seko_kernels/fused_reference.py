"""Reference implementation of the fused and fp8 ops in plain torch, which defines the result of each kernel.

Every reference computes in float32 and rounds once when a result is stored. fp8 results have the bytes of `e4m3_cast`.
The scale of an fp8 tensor is a power of two for each head, so that multiplying by the scale is exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_kernels.formats import E2M1_MAX, E4M3_MAX, KEY_TILE, NVFP4_BLOCK
from seko_kernels.reference import e2m1_decode, e4m3_decode, nvfp4_decode, round_factor, unpacked
from seko_kernels.sparse_past import QUERY_TILE, attended

FP8 = torch.float8_e4m3fn
LEAST_ROW_SCALE = 2.0**-100  # least scale, for a row of zeros, so that its inverse is finite
INT8_MAX, INT8_BITS = 127, 7  # largest int8 code, of either sign
# The fp8 scale is 8 global scales: an NVFP4 number is at most 6 * 448 global scales of its head, which is 336 in this
# unit and fits e4m3.
FP8_SCALE_OF_GLOBAL = 8.0


def e4m3_cast(x: Tensor) -> Tensor:
    """Return the e4m3 number nearest to each float32 number of `x`: ties to even, saturating at 448, with the sign of
    zero kept."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(FP8)


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to int8, with ``codes = clamp(round(x / scale), -127, 127)``, ties to even; a row's largest code is
    at least 64.

    Parameters
    ----------
    x : Tensor
        Numbers to quantise, ``[..., D]`` float32, finite.

    Returns
    -------
    codes : Tensor
        Codes of the numbers, ``[..., D]`` int8.
    scale : Tensor
        Scale of each row, ``[...]`` float32: a number is its code times its row's scale. Scales are powers of two, so
        that dividing by a scale is exact.
    """
    amax = x.abs().amax(-1).clamp(min=LEAST_ROW_SCALE)
    _, exponent = torch.frexp(amax)  # amax = m * 2**exponent with 0.5 <= m < 1
    scale = torch.ldexp(torch.ones_like(amax), exponent - INT8_BITS)
    codes = (x / scale.unsqueeze(-1)).round().clamp(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scale


def int8_tiles(k: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise keys by tiles of tokens, with ``scale = max(bound / 127, 2**-100)``, ``codes = round(k * (1 / scale))``.

    A quotient halfway between two whole numbers is rounded to the even number. Codes above 127 are clamped to 127. With
    a bound from `key_bounds` no code is above 127.

    Parameters
    ----------
    k : Tensor
        Keys, ``[B, P, H, D]`` float32, finite.
    bound : Tensor
        Upper bound of the magnitudes in each tile of `KEY_TILE` tokens, ``[B, H, tiles]`` float32.

    Returns
    -------
    codes : Tensor
        Codes of the keys, ``[B, P, H, D]`` int8.
    scale : Tensor
        Scale of each tile, ``[B, H, tiles]`` float32, contiguous: a key is its code times its tile's scale.
    """
    scale = int8_scale(bound)
    inverse = _inverse_scale_per_token(scale, k.shape[1])
    codes = (k * inverse.unsqueeze(-1)).round().clamp(-INT8_MAX, INT8_MAX)
    return codes.to(torch.int8), scale


def int8_scale(bound: Tensor) -> Tensor:
    """Return ``max(bound / 127, 2**-100)``, contiguous: the int8 scale for magnitudes up to `bound`."""
    scale: Tensor = (bound * (1.0 / INT8_MAX)).clamp(min=LEAST_ROW_SCALE)
    return scale.contiguous()


def _inverse_scale_per_token(scale: Tensor, tokens: int) -> Tensor:
    """Return the reciprocal of the tiles' scales ``[B, H, tiles]`` for each token, ``[B, tokens, H]``."""
    return scale_per_token(scale.reciprocal(), tokens).transpose(1, 2)


def key_codes(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    key_scale: Tensor,
    rotation: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Quantise NVFP4 keys to int8 without expanding them first: all arithmetic is in fp16, in units of the int8
    scale.

    With ``i = 1 / key_scale`` of a tile, a block's factor is ``s = fp16(e4m3(scale) * (global_scale * i))``, a
    channel's mean ``m = fp16(mean * i)``, and a key's number ``x = fma(e2m1(code), s, m)``. RoPE turns a pair into
    ``fma(x_even, cos, -fp16(x_odd * sin))`` and ``fma(x_even, sin, fp16(x_odd * cos))``, with cosine and sine in fp16.
    A code is the nearest whole number, ties to even. All operations on keys are fp16 operations (an fma rounds once),
    so that every device computes the same bytes. Without rotation a code is the nearest whole number to
    ``e2m1(code) * s``.

    Parameters
    ----------
    codes, scales : Tensor
        Codes and scales of NVFP4 keys, ``[B, P, H, D // 2]`` and ``[B, P, H, D // 16]`` uint8, as in
        `reference.nvfp4_decode`.
    global_scale : Tensor
        Global scale of each head's keys, ``[H]`` float32, powers of two.
    key_scale : Tensor
        The int8 scale of each tile of tokens, ``[B, H, tiles]`` float32.
    rotation : tuple of Tensor, optional
        Mean ``[H, D]``, cosines and sines ``[B, P, D // 2]``, float32; None: keys were stored after RoPE.

    Returns
    -------
    Tensor
        int8 codes of the keys, ``[B, P, H, D]``. If `key_scale` comes from a bound of `key_bounds`, no code had to be
        clamped to 127.
    """
    inverse = _inverse_scale_per_token(key_scale, codes.shape[1])
    factor = e4m3_decode(scales) * (global_scale * inverse)[..., None]
    factor = _fp16(factor.clamp(max=torch.finfo(torch.float16).max).double())[..., None]  # [B, P, H, D/16, 1]
    number = e2m1_decode(unpacked(codes).flatten(-2).unflatten(-1, (-1, NVFP4_BLOCK))).double()
    product: Tensor = number * factor
    if rotation is None:
        return product.round().flatten(-2).to(torch.int8)
    mean, cos, sin = rotation
    added = _fp16((mean * inverse[..., None]).double()).unflatten(-1, (-1, NVFP4_BLOCK))
    even, odd = _fp16(product + added).flatten(-2).unflatten(-1, (-1, 2)).unbind(-1)  # [B, P, H, D/2]
    cos, sin = (_fp16(x.double()).unsqueeze(2) for x in (cos, sin))
    turned = torch.stack((even * cos - _fp16(odd * sin), even * sin + _fp16(odd * cos)), dim=-1)
    return _fp16(turned).round().flatten(-2).to(torch.int8)


def _fp16(x: Tensor) -> Tensor:
    """Round float64 numbers to the nearest fp16 number, ties to even.

    Torch's own cast rounds to fp32 first, and its compiler removes a cast to fp16 and back.
    """
    # largest power of two that is not above the number
    power = (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    step = (power * 2.0**-10).clamp(min=2.0**-24)
    return (x / step).round() * step


def scale_per_token(scale: Tensor, tokens: int) -> Tensor:
    """Repeat the scales of tiles ``[B, H, tiles]`` for each token, in the shape ``[B, H, tokens]``."""
    each: Tensor = scale.repeat_interleave(KEY_TILE, -1)[..., :tokens]
    return each


def by_tiles(x: Tensor) -> Tensor:
    """Cut tokens ``[B, P, ...]`` into tiles ``[B, tiles, KEY_TILE, ...]``; the last tile is padded with zeros."""
    tiles = -(-x.shape[1] // KEY_TILE)
    behind = x.new_zeros((x.shape[0], tiles * KEY_TILE - x.shape[1], *x.shape[2:]))
    return torch.cat((x, behind), 1).view(x.shape[0], tiles, KEY_TILE, *x.shape[2:])


def largest_of_tiles(k: Tensor) -> Tensor:
    """Return the largest magnitude in each tile of keys ``[B, P, H, D]``, in the shape ``[B, H, tiles]``."""
    return by_tiles(k.abs()).amax((2, 4)).transpose(1, 2)


def key_bounds(scales: Tensor, live: Tensor, global_scale: Tensor, mean: Tensor | None) -> Tensor:
    """Return an upper bound of the key magnitudes in each tile of tokens, computed from the keys' scale bytes alone.

    A block's numbers are at most ``r = 6 * e4m3(byte) * global_scale``. A pair of channels, to which a mean m is added,
    lies within ``a = |m_even| + r`` and ``b = |m_odd| + r``. After rotation by any angle the pair lies within
    ``hypot(a, b)``. The square root in ``hypot`` is replaced by two chords. With t = max(a, b) and s = min(a, b) the
    bound is ``max(t + s / 4, 53 / 64 * t + 19 / 32 * s)``, which is exact if a or b is 0 and at most 3 % too large.
    With a and b rounded to 12 bits, like all factors of a rotation, each product is exact and each sum rounds once,
    fused or not. A maximum does not depend on the order in which numbers are compared. Every program that computes a
    tile's bound therefore gets the same bits.

    The relative rounding errors of `key_codes` and of a and b add up to less than 1/300. No code exceeds int8's range
    in spite of the rounding errors, because a bound is divided by 127, and only numbers from 127.5 on would be rounded
    to a larger code.

    Parameters
    ----------
    scales : Tensor
        Scale bytes of the keys, ``[B, P, H, D/16]`` uint8, e4m3 bits without sign, in token order.
    live : Tensor
        Whether each token counts, ``[B, P]`` bool.
    global_scale : Tensor
        Global scale of each head's keys, ``[H]`` float32, powers of two.
    mean : Tensor or None
        Mean of each key channel, ``[H, D]`` float32, for keys stored before RoPE; None for keys stored after RoPE.

    Returns
    -------
    Tensor
        Upper bound for each head and tile, ``[B, H, tiles]`` float32.
    """
    # e4m3 bytes without sign have the order of their numbers.
    byte = by_tiles(torch.where(live[:, :, None, None], scales, 0)).amax(2)  # [B, tiles, H, D/16]
    r = e4m3_decode(byte) * (E2M1_MAX * global_scale)[:, None]
    if mean is not None:
        pair = mean.abs().unflatten(-1, (r.shape[-1], -1, 2))  # [H, D/16, 8, 2]
        a, b = round_factor(pair + r[..., None, None]).unbind(-1)  # [B, tiles, H, D/16, 8]
        top, low = torch.maximum(a, b), torch.minimum(a, b)
        r = torch.maximum(top + 0.25 * low, 0.828125 * top + 0.59375 * low).amax(-1)
    return r.amax(-1).transpose(1, 2)


def attention_fp8(
    q: Tensor,
    k: Tensor,
    k_scale: Tensor,
    v_t: Tensor,
    v_scale: Tensor,
    valid_tokens: Tensor,
    k_own: Tensor,
    v_own: Tensor,
    *,
    chosen: Tensor | None = None,
    list_tiles: tuple[int, int] = (QUERY_TILE, KEY_TILE),
) -> Tensor:
    """Return softmax attention over ``valid_tokens[b] - T`` cached keys in 8 bits and the chunk's own O keys
    unquantised.

    Parameters
    ----------
    q : Tensor
        Queries, ``[B, T, H, D]`` float32 or bfloat16. For scores against cached keys the queries are rounded by
        `int8_rows`.
    k : Tensor
        Cached keys, ``[B, N, H, D]`` int8.
    k_scale : Tensor
        Scale of each tile of cached keys, ``[B, H, tiles]`` float32, from `int8_tiles`; tiles without a valid token are
        not read.
    v_t : Tensor
        Cached values, transposed: ``[B, H, D, columns]`` e4m3 with columns >= N; columns from N on are not read.
    v_scale : Tensor
        Scale of each head's values, ``[H]`` float32.
    valid_tokens : Tensor
        Number of valid tokens of each row, ``[B]`` int64, including the T tokens of the chunk.
    k_own : Tensor
        Keys of the chunk's own tokens, ``[B, O, H, D]`` of q's dtype.
    v_own : Tensor
        Values of the chunk's own tokens, ``[B, O, H * D]`` of q's dtype.
    chosen : Tensor, optional
        The tiles of cached keys to which queries attend, as `sparse_past.choose_past` returns them; default: all.
    list_tiles : tuple of int
        Numbers of queries that share a list, and of keys of its tiles.

    Returns
    -------
    Tensor
        The attention, ``[B, T, H * D]`` of q's dtype.
    """
    tokens, head_dim = k.shape[1], k.shape[3]
    live = torch.arange(tokens, device=k.device) < (valid_tokens - q.shape[1])[:, None]  # [B, N]
    # Bytes that were never written may be NaN.
    scale = torch.where(live[:, None, :], scale_per_token(k_scale, tokens), 0.0)  # [B, H, N]
    values = torch.where(live[:, None, None, :], v_t[..., :tokens].float(), 0.0)  # [B, H, D, N]
    codes, q_scale = int8_rows(q.float())
    products = torch.einsum("bthd,bnhd->bhtn", codes.float(), k.float())
    scores = products * scale.unsqueeze(2) * q_scale.transpose(1, 2).unsqueeze(3)
    seen = live[:, None, None, :]
    if chosen is not None:
        seen = seen & attended(chosen, valid_tokens - q.shape[1], q.shape[1], tokens, *list_tiles)
    scores = torch.where(seen, scores, -torch.inf)
    own = torch.einsum("bthd,bnhd->bhtn", q.float(), k_own.float())
    own_values = v_own.float().unflatten(-1, tuple(q.shape[2:])).permute(0, 2, 3, 1)  # [B, H, D, T]
    values = torch.cat((values * v_scale[:, None, None], own_values), -1)
    return _weighted(torch.cat((scores, own), -1) * head_dim**-0.5, values).flatten(2).to(q.dtype)


def attention_bf16(q: Tensor, k: Tensor, v: Tensor, valid_tokens: Tensor) -> Tensor:
    """Return softmax attention over the first ``valid_tokens[b]`` keys of each row b, summed in float32.

    Parameters
    ----------
    q : Tensor
        Queries, ``[B, T, H, D]`` float32 or bfloat16.
    k, v : Tensor
        Keys and values, ``[B, N, H, D]`` of q's dtype; entries behind the valid tokens are never used.
    valid_tokens : Tensor
        Number of keys of each row to which queries attend, ``[B]`` int64.

    Returns
    -------
    Tensor
        The attention, ``[B, T, H * D]`` of q's dtype.
    """
    live = torch.arange(k.shape[1], device=k.device) < valid_tokens[:, None]  # [B, N]
    values = torch.where(live[:, :, None, None], v.float(), 0.0).permute(0, 2, 3, 1)  # [B, H, D, N]
    scores = torch.einsum("bthd,bnhd->bhtn", q.float(), k.float()) * q.shape[-1] ** -0.5
    scores = torch.where(live[:, None, None, :], scores, -torch.inf)
    return _weighted(scores, values).flatten(2).to(q.dtype)


def _weighted(scores: Tensor, values: Tensor) -> Tensor:
    """Return ``softmax(scores) values`` as ``[B, T, H, D]``, zeros where all scores are -inf."""
    top = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    weights = weights / torch.where(total > 0, total, 1.0)
    return torch.einsum("bhtn,bhdn->bthd", weights, values)


def fp8_scale(global_scale: Tensor) -> Tensor:
    """Return a scale for each head, ``[H]``. Numbers of an NVFP4 cache with the given global scales, divided by this
    scale, do not saturate in e4m3."""
    return global_scale * FP8_SCALE_OF_GLOBAL


def fp8_expand(codes: Tensor, scales: Tensor, global_scale: Tensor, fp8_scale: Tensor) -> Tensor:
    """Return the numbers of an NVFP4 cache divided by `fp8_scale` and rounded to e4m3, ``[N, H, D]``.

    Parameters
    ----------
    codes, scales, global_scale : Tensor
        Codes and scales of an NVFP4 cache; see `reference.nvfp4_decode`.
    fp8_scale : Tensor
        Scale by which each head's numbers are divided, ``[H]`` float32, powers of two.
    """
    number = nvfp4_decode(codes, scales, global_scale, torch.float32)
    return e4m3_cast(number * fp8_scale.reciprocal()[:, None])


def past_token_index(write_slots: Tensor, tokens: int, frame_tokens: int) -> Tensor:
    """Return ``[B, P]`` int64, ascending: the cache's token indices outside the slots that are being written.

    Parameters
    ----------
    write_slots : Tensor
        Cache slots that are being written, ``[B, F]`` int64, all different.
    tokens, frame_tokens : int
        Number of tokens in a row's cache, and number of tokens in a slot; the result has ``P = tokens - F *
        frame_tokens`` indices for each row.
    """
    slot = torch.arange(tokens // frame_tokens, device=write_slots.device)
    own = (slot == write_slots[..., None]).any(1)  # [B, slots]
    cached_slots = own.int().argsort(dim=1, stable=True)[:, : len(slot) - write_slots.shape[1]]
    return (
        cached_slots[..., None] * frame_tokens + torch.arange(frame_tokens, device=cached_slots.device)
    ).flatten(1)


def qk_norm_rope(
    qkv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, part: int, heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Apply RMSNorm over the full width, then rotate neighbouring channel pairs (RoPE), in float32.

    Parameters
    ----------
    qkv : Tensor
        Queries, keys and values as a fused projection returns them, ``[B, T, 3 * d]``.
    weight : Tensor
        Weight of the norm, ``[d]`` float32.
    cos, sin : Tensor
        Rotary tables, ``[B, T, D/2]`` float32.
    part : int
        Part of ``qkv`` that is normalised and rotated: 0 for q, 1 for k.
    heads : int
        Number of heads, H.
    eps : float
        Epsilon of the norm.

    Returns
    -------
    before, rotated : Tensor
        The part before and after the rotation, ``[B, T, H, D]`` float32.
    """
    width = qkv.shape[-1] // 3
    x = qkv[..., part * width : (part + 1) * width].float()
    before = F.rms_norm(x, (width,), weight, eps).unflatten(-1, (heads, -1))
    even, odd = before.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return before, rotated


def e4m3_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to e4m3, with ``scale = max(amax / 448, 2**-100)``, ``e4m3(x * (1 / scale))``.

    Parameters
    ----------
    x : Tensor
        Rows of activations, or of a weight (its output channels), ``[M, width]`` float32 or bfloat16, finite.

    Returns
    -------
    values : Tensor
        The quantised rows, ``[M, width]`` e4m3.
    scale : Tensor
        Scale of each row, ``[M, 1]`` float32: a number is its e4m3 value times its row's scale.
    """
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) * (1.0 / E4M3_MAX)).clamp(min=LEAST_ROW_SCALE)
    return e4m3_cast(x * scale.reciprocal()), scale


def gelu_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Apply GELU (tanh form) in float32, then quantise each row to e4m3 by `e4m3_rows`."""
    return e4m3_rows(F.gelu(x.float(), approximate="tanh"))


def layer_norm(x: Tensor, eps: float) -> Tensor:
    """Return LayerNorm of each row without weight and bias, in float32."""
    return F.layer_norm(x.float(), (x.shape[-1],), eps=eps)


def of_frames(modulation: Tensor, layer_modulation: Tensor, which: int, tokens: int) -> Tensor:
    """Return vector `which` of the six modulation vectors ``modulation [B, F, 6, d] + layer_modulation [6, d]``,
    repeated for each token, in the shape ``[B, T, d]``.
    """
    row = modulation[:, :, which] + layer_modulation[which]
    return row.repeat_interleave(tokens // modulation.shape[1], dim=1)


def fp8_linear(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor) -> Tensor:
    """Return ``(x * x_scale) @ (weight * weight_scale).T + bias`` as float32, from e4m3 ``[M, K]`` and ``[N, K]``."""
    return (x.float() @ weight.float().T) * x_scale * weight_scale.T + bias.float()
