"""qk_norm_rope: equal to the model's own norm and rotation, keys at their places; GPU within rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_export.families.layers.rotary import rotate
from seko_kernels.errors import KernelsError
from seko_kernels.qk_norm_rope import PLAIN_KEYS, qk_norm_rope, qk_norm_rope_shares
from seko_kernels.triton.qk_norm_rope import NORM_ROPE_WARPS, qk_norm_rope_kernel
from tests.kernels.fused_inputs import RINGS, Chunk, Ring, chunk_of
from tests.kernels.test_scratch import FULL, FULL_ROWS
from tests.support.tolerances import relative_error

EPS = 1e-6


def run(
    ring: Ring, chunk: Chunk, plain: str, device: str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """q, plain keys and the rotated ones at their places in what held 7 everywhere, of the chunk's dtype or another."""
    shape = (ring.batch, ring.cache_tokens, ring.heads, ring.head_dim)
    k_out = torch.full(shape, 7.0, dtype=dtype or chunk.qkv.dtype, device=device)
    arguments = (chunk.qkv, chunk.q_weight, chunk.k_weight, chunk.cos, chunk.sin, ring.slots())
    q, keys = qk_norm_rope(*(x.to(device) for x in arguments), ring.frame_tokens, EPS, k_out, plain)
    return q.cpu(), keys.cpu(), k_out.cpu()


def model(ring: Ring, chunk: Chunk, part: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Before and after rotation, by the functions of the model."""
    x = chunk.qkv.chunk(3, dim=-1)[part].float()
    before = F.rms_norm(x, (x.shape[-1],), weight, EPS).unflatten(-1, (ring.heads, -1))
    return before, rotate(before, chunk.cos, chunk.sin)


@pytest.mark.parametrize("plain", PLAIN_KEYS)
@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_it_is_the_models_norm_and_rotation(ring: Ring, plain: str) -> None:
    chunk = chunk_of(ring, torch.bfloat16)
    _, q_true = model(ring, chunk, 0, chunk.q_weight)
    k_before, k_true = model(ring, chunk, 1, chunk.k_weight)
    q, keys, k_out = run(ring, chunk, plain)
    expected_k = torch.full_like(k_out, 7.0)
    n = ring.frame_tokens
    for row, slots in enumerate(ring.write_slots):
        for frame, slot in enumerate(slots):
            expected_k[row, slot * n : (slot + 1) * n] = k_true[row, frame * n : (frame + 1) * n]
    assert torch.equal(q, q_true.to(torch.bfloat16))
    assert torch.equal(k_out, expected_k)
    if plain == "none":
        assert keys.numel() == 0
    else:
        truth = k_before if plain == "before_rope" else k_true
        assert torch.equal(keys, truth.to(torch.bfloat16))


def test_wrong_tensors_are_refused() -> None:
    ring = RINGS[0]
    chunk = chunk_of(ring, torch.float32)
    with pytest.raises(KernelsError, match="plain_keys"):
        run(ring, chunk, "all")
    with pytest.raises(KernelsError, match="k_out is"):
        run(ring, chunk, "none", dtype=torch.bfloat16)
    with pytest.raises(KernelsError, match="cos has shape"):
        run(ring, Chunk(**vars(chunk) | {"cos": chunk.cos[:, 1:]}), "none")
    with pytest.raises(KernelsError, match="qkv has shape"):
        run(ring, Chunk(**vars(chunk) | {"qkv": chunk.qkv[:, 1:]}), "none")
    with pytest.raises(KernelsError, match="2 heads, each rotated in pairs, have no 3 shares"):
        shares_of(ring, chunk, 3, "none")
    with pytest.raises(KernelsError, match="plain_keys"):
        shares_of(ring, chunk, 2, "all")
    with pytest.raises(KernelsError, match="qkv has shape"):
        shares_of(ring, Chunk(**vars(chunk) | {"qkv": F.pad(chunk.qkv, (0, 1))}), 2, "none")


def shares_of(ring: Ring, chunk: Chunk, shares: int, plain: str, device: str = "cpu") -> Tensor:
    """q, k and v by shares of the heads."""
    arguments = (chunk.qkv, chunk.q_weight, chunk.k_weight, chunk.cos, chunk.sin)
    return qk_norm_rope_shares(*(x.to(device) for x in arguments), ring.heads, shares, EPS, plain).cpu()


def by_shares(ring: Ring, chunk: Chunk, shares: int, plain: str, device: str = "cpu") -> Tensor:
    """The same from `qk_norm_rope`, whose keys are of a ring that the chunk fills."""
    whole = replace(
        ring,
        cache_frames=len(ring.write_slots[0]),
        write_slots=tuple(tuple(range(len(row))) for row in ring.write_slots),
    )
    q, keys, k = run(whole, chunk, plain, device)
    v = chunk.qkv.chunk(3, dim=-1)[2].unflatten(-1, (ring.heads, -1))
    parts = torch.stack((q, k, v, *([keys] if plain != "none" else [])), 2)
    return parts.unflatten(3, (shares, -1)).permute(3, 0, 1, 2, 4, 5)


@pytest.mark.parametrize("plain", PLAIN_KEYS)
@pytest.mark.parametrize(("ring", "shares"), [(RINGS[0], 2), (RINGS[1], 3), (RINGS[3], 2)], ids=str)
def test_shares_of_the_heads_are_those_of_all(ring: Ring, shares: int, plain: str) -> None:
    chunk = chunk_of(ring, torch.bfloat16)
    assert torch.equal(shares_of(ring, chunk, shares, plain), by_shares(ring, chunk, shares, plain))


@pytest.mark.gpu
@pytest.mark.parametrize("plain", PLAIN_KEYS)
@pytest.mark.parametrize(("ring", "shares"), [(RINGS[1], 3), (FULL, 4), (FULL_ROWS, 2)], ids=str)
def test_gpu_shares_of_the_heads_are_those_of_all(ring: Ring, shares: int, plain: str) -> None:
    chunk = chunk_of(ring, torch.bfloat16)
    ours = shares_of(ring, chunk, shares, plain, "cuda")
    assert torch.equal(ours, by_shares(ring, chunk, shares, plain, "cuda"))


def test_kernel_compiles_without_spills(
    cross_compile: Callable[..., Any], sass_of: Callable[[Any], list[str]], compile_archs: tuple[int, ...]
) -> None:
    signature = {
        "QKV": "*bf16",
        **dict.fromkeys(("Q_WEIGHT", "K_WEIGHT", "COS", "SIN"), "*fp32"),
        "WRITE_SLOTS": "*i64",
        **dict.fromkeys(("Q_OUT", "K_OUT", "K_PLAIN"), "*bf16"),
        **dict.fromkeys(("tokens", "cache_tokens"), "i32"),
    }
    for heads, block, shares in ((12, 2048, 0), (40, 8192, 0), (40, 8192, 4)):
        constants = {"EPS": EPS, "HEADS": heads, "HEAD_DIM": 128, "FRAME_TOKENS": 1560, "BLOCK": block}
        for arch in compile_archs if heads == 12 else {90} & {*compile_archs}:
            compiled = cross_compile(
                qk_norm_rope_kernel,
                signature,
                constants | {"PLAIN": 1, "SHARES": shares, "PLANE": shares and 1170 * 4 * 1280},
                arch,
                NORM_ROPE_WARPS,
            )
            if arch == 90:
                assert not {"LDL", "STL"} & set(sass_of(compiled)), f"{heads} heads spill"


@pytest.mark.gpu
@pytest.mark.parametrize("plain", PLAIN_KEYS)
@pytest.mark.parametrize("ring", [*RINGS, FULL, FULL_ROWS], ids=str)
def test_gpu_is_as_near_as_the_same_dtype_torch_computation(ring: Ring, plain: str) -> None:
    chunk = chunk_of(ring, torch.bfloat16)
    ours, same_dtype = run(ring, chunk, plain, "cuda"), run(ring, chunk, plain)
    _, q_true = model(ring, chunk, 0, chunk.q_weight)
    k_before, k_true = model(ring, chunk, 1, chunk.k_weight)
    assert relative_error(ours[0].float(), q_true) <= 2 * relative_error(same_dtype[0].float(), q_true)
    if plain != "none":
        truth = k_before if plain == "before_rope" else k_true
        assert relative_error(ours[1], truth) <= 2 * relative_error(same_dtype[1], truth)
    rows = ring.slots()[..., None] * ring.frame_tokens + torch.arange(ring.frame_tokens)
    rows = rows.flatten(1)[..., None, None].expand(k_true.shape)
    mine, same = (x[2].float().gather(1, rows) for x in (ours, same_dtype))
    assert relative_error(mine, k_true) <= 2 * relative_error(same, k_true)
    others = torch.ones(ring.batch, ring.cache_tokens, dtype=torch.bool)
    others.scatter_(1, rows[..., 0, 0], False)
    assert bool((ours[2].float()[others] == 7).all())


@pytest.mark.gpu
def test_gpu_skips_slots_outside_the_cache() -> None:
    ring = RINGS[0]
    outside = Ring(ring.heads, ring.head_dim, ring.frame_tokens, ring.cache_frames, ((-1, 9, 8),), (9,))
    _, _, k_out = run(outside, chunk_of(outside, torch.bfloat16), "none", "cuda")
    n = ring.frame_tokens
    assert bool((k_out[:, : 8 * n].float() == 7).all())
    assert not bool((k_out[:, 8 * n :].float() == 7).all())
