"""The op that fills the scratch buffer of 8-bit attention: the cached tokens of an NVFP4 cache, without the tokens of
the present chunk.

All layers use the same scratch buffer, one after another. Keys in the scratch buffer are ``[B, P, H, D]`` int8 with a
scale for each head and tile of tokens, ``[B, H, key_tiles(P)]``. Values in the scratch buffer are transposed, ``[B, H,
D, v_columns(P)]`` e4m3, with a scale for each head that is a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import wrap_triton

from seko_kernels import fused_reference
from seko_kernels.attention import key_tiles, scratch_tokens, v_columns
from seko_kernels.checks import expect, expect_dims, expect_fp8
from seko_kernels.errors import KernelsError
from seko_kernels.formats import KEY_TILE, NVFP4_BLOCK, ScaleTensor
from seko_kernels.fused_reference import FP8
from seko_kernels.ops import kernel_op, stand_in, takes_kernels
from seko_kernels.triton.fp8_expand import (
    EXPAND_TILE,
    EXPAND_WARPS,
    expand_group,
    fp8_expand_kernel,
)


class KeyRotation(NamedTuple):
    """Mean and rotary tables with which keys stored before RoPE are read; see `kv_tables.KeyTables`.

    Parameters
    ----------
    mean : Tensor
        Mean of each key channel, ``[H, D]`` float32, which was subtracted before the keys were stored.
    slot_rotary : Tensor
        Cosine and sine of the first A channel pairs, for the frame in each cache slot: ``[B * slots, A, 2]`` float32, A
        even, 0 < A < D/2.
    patch_rotary : Tensor
        Cosine and sine of the other channel pairs, by patch of a latent frame: ``[frame_tokens, D/2 - A, 2]`` float32.
    """

    mean: Tensor
    slot_rotary: Tensor
    patch_rotary: Tensor

    def at_tokens(self, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys' mean, and each token's cosines and sines ``[B, P, D/2]``. ``token`` ``[B, P]`` are indices
        into the caches of all rows, one after the other: row b's token n of N has the index ``b * N + n``.
        """
        patches = len(self.patch_rotary)
        rotary = torch.cat((self.slot_rotary[token // patches], self.patch_rotary[token % patches]), dim=2)
        cos, sin = rotary.unbind(-1)
        return self.mean, cos, sin


def scratch_scales(heads: int) -> tuple[ScaleTensor, ...]:
    """Return the constants that the scratch buffer needs besides the constants of the cache: for the values of each
    head, a scale that is a power of two."""
    return (ScaleTensor("v_fp8_scale", (heads,), torch.float32),)


def scratch_constants(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return one layer's tensors for the constants of `scratch_scales`. With these scales no number that the cache can
    hold saturates.

    Parameters
    ----------
    constants : Mapping[str, Tensor]
        ``v_global_scale`` of the cache format.
    """
    return {"v_fp8_scale": fused_reference.fp8_scale(constants["v_global_scale"])}


def past_of(tokens: int, chunk_frames: int, frame_tokens: int) -> int:
    """Return the number of tokens in a row's cache outside the slots of the present chunk."""
    return tokens - chunk_frames * frame_tokens


def scratch_shapes(batch: int, heads: int, head_dim: int, past_tokens: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the scratch buffer's tensors, which are ``k`` int8, ``k_scale`` float32, ``v`` e4m3."""
    places = scratch_tokens(past_tokens)
    return {
        "k": (batch, places, heads, head_dim),
        "k_scale": (batch, heads, key_tiles(places)),
        "v": (batch, heads, head_dim, v_columns(places)),
    }


def fp8_expand(
    k_codes: Tensor,
    k_scales: Tensor,
    k_global_scale: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    v_global_scale: Tensor,
    v_fp8_scale: Tensor,
    write_slots: Tensor,
    valid_tokens: Tensor,
    frame_tokens: int,
    k_out: Tensor,
    k_out_scale: Tensor,
    v_out: Tensor,
    rotation: KeyRotation | None = None,
) -> None:
    """Expand the cached tokens of an NVFP4 cache into the scratch, in place and without gaps.

    The expanded tokens of row b are those below ``valid_tokens[b]`` outside the slots ``write_slots[b]``. The slots
    ``write_slots[b]`` belong to the chunk being denoised, whose keys and values attention reads unquantised. Expanded
    tokens fill the first ``valid_tokens[b] - F * frame_tokens`` positions of the scratch in order. Later positions of
    the scratch are left unchanged, except values that share a 4-byte word with the last token.

    The keys of a head and tile of `KEY_TILE` tokens share one scale. The scale of a tile is computed from the bound in
    `fused_reference.key_bounds`, since finding the largest magnitude would take another pass over the keys.

    On a GPU all tensors of `fp8_expand` must begin at multiples of 16 bytes, as torch's own allocations do.

    Parameters
    ----------
    k_codes, v_codes : Tensor
        Codes of the cached keys and values, ``[B * N, H, D // 2]`` uint8, contiguous. D is a power of two, and N a
        whole number of slots.
    k_scales, v_scales : Tensor
        Scale bytes of the cached keys and values, ``[B * N, H, D // 16]`` uint8, contiguous.
    k_global_scale, v_global_scale : Tensor
        Global scales of keys and of values, ``[H]`` float32, powers of two.
    v_fp8_scale : Tensor
        Scales of the e4m3 values, ``[H]`` float32, powers of two; with `fused_reference.fp8_scale` of the global scales
        no value saturates.
    write_slots : Tensor
        Cache slots of the present chunk, ``[B, F]`` int64, distinct in a row, all below ``valid_tokens[b]``.
    valid_tokens : Tensor
        Number of filled tokens in each row's cache, ``[B]`` int64.
    frame_tokens : int
        Number of tokens in a cache slot.
    k_out : Tensor
        The expanded keys, ``[B, P, H, D]`` int8, contiguous, which are written in place. `fused_reference.key_codes`
        defines the codes. P is `attention.scratch_tokens` of the ``N - F * frame_tokens`` tokens. Positions after these
        tokens are never written.
    k_out_scale : Tensor
        Scale of each tile of keys, ``[B, H, key_tiles(P)]`` float32, contiguous; written in place.
    v_out : Tensor
        The expanded values, transposed: ``[B, H, D, v_columns(P)]`` e4m3, contiguous; written in place.
    rotation : KeyRotation, optional
        Tables for keys that were stored before RoPE; default: keys are not rotated.

    Raises
    ------
    KernelsError
        If a tensor has another shape, dtype or layout than documented here, if the tensors are on different devices, or
        if the GPU has no fp8 numbers.
    """
    expect_dims("k_out", k_out, 4, "[batch, tokens, heads, head_dim]")
    batch, places, heads, head_dim = k_out.shape
    _expect_scratch(k_out, k_out_scale, v_out, batch, places, heads, head_dim)
    expect_dims("write_slots", write_slots, 2, "[batch, chunk frames]")
    tokens = k_codes.shape[0] // max(batch, 1)
    past_tokens = past_of(tokens, write_slots.shape[1], frame_tokens)
    own_tokens = tokens - past_tokens
    _expect_slots(write_slots, batch, tokens, frame_tokens)
    if places != scratch_tokens(past_tokens):
        raise KernelsError(
            f"k_out has {places} places, expected {scratch_tokens(past_tokens)}: the cache's {tokens} tokens less the "
            f"chunk's {own_tokens}, and what fills the last group up"
        )
    for name, codes, scales in (("k", k_codes, k_scales), ("v", v_codes, v_scales)):
        expect(f"{name}_codes", codes, (batch * tokens, heads, head_dim // 2), torch.uint8)
        expect(f"{name}_scales", scales, (batch * tokens, heads, head_dim // NVFP4_BLOCK), torch.uint8)
    constants = (k_global_scale, v_global_scale, v_fp8_scale)
    for scale in constants:
        expect("a head's scale", scale, (heads,), torch.float32)
    expect("valid_tokens", valid_tokens, (batch,), torch.int64)
    turned: tuple[Tensor, ...] = rotation or ()
    if rotation is not None:
        _expect_rotation(rotation, batch, tokens, heads, head_dim, frame_tokens)
    caches = (k_codes, k_scales, v_codes, v_scales)
    if whole := stand_in("fp8_expand"):
        keys, values = (k_codes, k_scales, k_global_scale), (v_codes, v_scales, v_global_scale)
        expanded = whole(*keys, *values, v_fp8_scale, write_slots, valid_tokens, *turned)
        for out, new in zip((k_out, k_out_scale, v_out), expanded, strict=True):
            out.copy_(new)
        return
    if takes_kernels(*caches, *constants, *turned, write_slots, valid_tokens, k_out, k_out_scale, v_out):
        expect_fp8(k_out.device)
        mean, slot_rotary, patch_rotary = rotation or (None, None, None)
        _fp8_expand_cuda(
            *(k_codes, k_scales, k_global_scale, mean, v_codes, v_scales, v_global_scale),
            *(v_fp8_scale, slot_rotary, patch_rotary),
            *(write_slots, valid_tokens, frame_tokens, k_out, k_out_scale, v_out),
        )
        return
    place = fused_reference.past_token_index(write_slots, tokens, frame_tokens)  # [B, P]
    source = place + torch.arange(batch, device=place.device)[:, None] * tokens
    cached = torch.arange(past_tokens, device=place.device) < (valid_tokens - own_tokens)[:, None]
    mean = None if rotation is None else rotation.mean
    bound = fused_reference.key_bounds(k_scales[source], cached, k_global_scale, mean)
    scale = fused_reference.int8_scale(bound)
    turn = None if rotation is None else rotation.at_tokens(source)
    codes = fused_reference.key_codes(k_codes[source], k_scales[source], k_global_scale, scale, turn)
    surplus = (0, 0, 0, 0, 0, places - past_tokens)
    filled = torch.nn.functional.pad(cached, surplus[-2:])[:, :, None, None]
    k_out.copy_(torch.where(filled, torch.nn.functional.pad(codes, surplus), k_out))
    v = fused_reference.fp8_expand(v_codes, v_scales, v_global_scale, v_fp8_scale)
    written = fused_reference.by_tiles(cached).any(2)  # [B, tiles]
    k_out_scale.copy_(torch.where(written[:, None, :], scale, k_out_scale))
    # Values are written in words of four positions; the last word is filled up with the value of the last position.
    column = torch.arange(v_out.shape[3], device=place.device)
    last = cached.sum(1, keepdim=True) - 1  # [B, 1]
    new_v = v.view(torch.uint8)[source.gather(1, column.minimum(last.clamp(min=0)))]  # [B, columns, H, D]
    old_v = v_out.view(torch.uint8)  # viewed as bytes, since few CPU ops support e4m3
    old_v.copy_(torch.where((column <= last | 3)[:, None, None, :], new_v.permute(0, 2, 3, 1), old_v))


@kernel_op("seko::fp8_expand", mutates_args={"k_out", "k_out_scale", "v_out"})
def _fp8_expand_cuda(
    k_codes: Tensor,
    k_scales: Tensor,
    k_global_scale: Tensor,
    k_mean: Tensor | None,
    v_codes: Tensor,
    v_scales: Tensor,
    v_global_scale: Tensor,
    v_fp8_scale: Tensor,
    slot_rotary: Tensor | None,
    patch_rotary: Tensor | None,
    write_slots: Tensor,
    valid_tokens: Tensor,
    frame_tokens: int,
    k_out: Tensor,
    k_out_scale: Tensor,
    v_out: Tensor,
) -> None:
    batch, past_tokens, heads, head_dim = k_out.shape
    group = expand_group(heads)
    grid = ((past_tokens + EXPAND_TILE - 1) // EXPAND_TILE, 2 * heads // group, batch)
    # Arguments that a variant of the kernel does not read still need a tensor: the scale is passed.
    wrap_triton(fp8_expand_kernel)[grid](
        k_codes,
        k_scales,
        k_global_scale,
        k_global_scale if k_mean is None else k_mean,
        v_codes,
        v_scales,
        v_global_scale,
        v_fp8_scale,
        k_global_scale if slot_rotary is None else slot_rotary,
        k_global_scale if patch_rotary is None else patch_rotary,
        write_slots,
        valid_tokens,
        k_out,
        k_out_scale,
        v_out,
        k_codes.shape[0] // batch,
        past_tokens,
        HEADS=heads,
        HEAD_DIM=head_dim,
        FRAME_TOKENS=frame_tokens,
        CHUNK_FRAMES=write_slots.shape[1],
        SLOT_PAIRS=0 if slot_rotary is None else slot_rotary.shape[1],
        GROUP=group,
        TILE=EXPAND_TILE,
        KEY_TILE=KEY_TILE,
        V_COLUMNS=v_out.shape[3],
        INTEGER=False,
        num_warps=EXPAND_WARPS,
    )


def _expect_scratch(
    k_out: Tensor, k_out_scale: Tensor, v_out: Tensor, batch: int, tokens: int, heads: int, head_dim: int
) -> None:
    if head_dim < NVFP4_BLOCK or head_dim & (head_dim - 1):
        raise KernelsError(f"head_dim must be a power of two of at least {NVFP4_BLOCK}, got {head_dim}")
    expect("k_out", k_out, (batch, tokens, heads, head_dim), torch.int8)
    expect("k_out_scale", k_out_scale, (batch, heads, key_tiles(tokens)), torch.float32)
    expect("v_out", v_out, (batch, heads, head_dim, v_columns(tokens)), FP8)


def _expect_rotation(
    rotation: KeyRotation, batch: int, tokens: int, heads: int, head_dim: int, frame_tokens: int
) -> None:
    expect("mean", rotation.mean, (heads, head_dim), torch.float32)
    expect_dims("slot_rotary", rotation.slot_rotary, 3, "[slots, pairs, 2]")
    pairs = rotation.slot_rotary.shape[1]
    if not 0 < pairs < head_dim // 2 or pairs % 2:
        raise KernelsError(
            f"slot_rotary has {pairs} pairs, expected an even number from 2 to {head_dim // 2 - 2} of {head_dim // 2}"
        )
    slots = batch * tokens // frame_tokens
    expect("slot_rotary", rotation.slot_rotary, (slots, pairs, 2), torch.float32)
    patch = (frame_tokens, head_dim // 2 - pairs, 2)
    expect("patch_rotary", rotation.patch_rotary, patch, torch.float32)


def _expect_slots(write_slots: Tensor, batch: int, tokens: int, frame_tokens: int) -> None:
    expect("write_slots", write_slots, (batch, write_slots.shape[1]), torch.int64)
    if not 1 <= frame_tokens <= tokens or tokens % frame_tokens:
        raise KernelsError(
            f"frame_tokens must be in 1..{tokens} and divide that, the cache's tokens, got {frame_tokens}"
        )
