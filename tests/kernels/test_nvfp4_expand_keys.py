"""Expanding NVFP4 keys: the reference is RoPE to its precision. test_kv_ops.py has what holds for every format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seko_kernels import kv_expand
from seko_kernels.errors import KernelsError
from seko_kernels.formats import FP4, ROTARY_FACTOR_BITS
from seko_kernels.kv_tables import KeyTables
from seko_kernels.reference import nvfp4_decode, round_factor
from tests.kernels.test_nvfp4_expand import DTYPES, bits

SHAPES = [(21, 1560, 12, 128, 22), (6, 24, 5, 128, 22), (3, 7, 2, 48, 8), (1, 1, 1, 16, 4)]


def expand_keys(
    codes: Tensor,
    scales: Tensor,
    g: Tensor,
    mean: Tensor,
    slot_rotary: Tensor,
    patch_rotary: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Expand NVFP4 keys that were stored before RoPE."""
    return kv_expand(FP4, codes, scales, g, dtype, KeyTables(mean, slot_rotary, patch_rotary))


def random_cache(slots: int, patches: int, heads: int, head_dim: int, slot_pairs: int) -> tuple[Tensor, ...]:
    """Codes of every value, scale bytes 0..0x7E, heads of different size, means as large as the keys, any angle."""
    torch.manual_seed(slots)
    tokens = slots * patches
    codes = torch.randint(0, 256, (tokens, heads, head_dim // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (tokens, heads, head_dim // 16), dtype=torch.uint8)
    g = 2.0 ** torch.randint(-20, 20, (heads,)).float()
    mean = torch.randn(heads, head_dim) * g[:, None] * 100
    slot_angle = torch.rand(slots, slot_pairs) * 7
    patch_angle = torch.rand(patches, head_dim // 2 - slot_pairs) * 7
    tables = (torch.stack((angle.cos(), angle.sin()), dim=-1) for angle in (slot_angle, patch_angle))
    return codes, scales, g, mean, *tables


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_it_is_the_rotation_of_key_and_mean(shape: tuple[int, ...]) -> None:
    """Against complex numbers in float64, slot and patch looked up token by token: within the factors' rounding."""
    codes, scales, g, mean, slot_rotary, patch_rotary = random_cache(*shape)
    turned = expand_keys(codes, scales, g, mean, slot_rotary, patch_rotary, torch.float32)
    keys = nvfp4_decode(codes, scales, g, torch.float32).double() + mean.double()
    for token, key in enumerate(keys):
        slot, patch = divmod(token, len(patch_rotary))
        turn = torch.view_as_complex(torch.cat((slot_rotary[slot], patch_rotary[patch])).double())
        wanted = torch.view_as_real(torch.view_as_complex(key.unflatten(-1, (-1, 2))) * turn).flatten(-2)
        pair = key.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
        # Two factors a product, each off by half a unit of its last bit, in two products of a pair.
        assert ((turned[token] - wanted).abs() <= 2 * 2.0**-ROTARY_FACTOR_BITS * pair * 1.01).all(), token


def test_products_are_exact_so_that_fused_sums_give_the_same_bits() -> None:
    """The rotation of rounded factors, in float64 (where both products and sum are exact enough), rounded once."""
    codes, scales, g, mean, slot_rotary, patch_rotary = random_cache(*SHAPES[1])
    even, odd = (
        round_factor(nvfp4_decode(codes, scales, g, torch.float32) + mean)
        .double()
        .unflatten(-1, (-1, 2))
        .unbind(-1)
    )
    rotary = torch.cat(
        (
            slot_rotary.repeat_interleave(len(patch_rotary), 0),
            patch_rotary.repeat(len(slot_rotary), 1, 1),
        ),
        dim=1,
    )
    cos, sin = round_factor(rotary).double()[:, None].unbind(-1)
    once = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).float()
    ours = expand_keys(codes, scales, g, mean, slot_rotary, patch_rotary, torch.float32)
    assert torch.equal(bits(ours), bits(once))


def test_factors_keep_twelve_bits_ties_away_from_zero() -> None:
    x = torch.tensor([1.0, 1 + 2.0**-11, 1 + 2.0**-12, -1 - 2.0**-12, 1 + 2.0**-13, 0.0, 2 - 2.0**-20])
    wanted = [1.0, 1 + 2.0**-11, 1 + 2.0**-11, -1 - 2.0**-11, 1.0, 0.0, 2.0]
    assert round_factor(x).tolist() == wanted


def test_wrong_tensors_are_refused() -> None:
    codes, scales, g, mean, slot_rotary, patch_rotary = random_cache(3, 5, 2, 48, 8)
    with pytest.raises(KernelsError, match="float16"):
        expand_keys(codes, scales, g, mean, slot_rotary, patch_rotary, torch.float16)
    with pytest.raises(KernelsError, match="mean has shape"):
        expand_keys(codes, scales, g, mean[:1], slot_rotary, patch_rotary, torch.float32)
    with pytest.raises(KernelsError, match="do not make up 15 tokens of 24 pairs"):
        expand_keys(codes, scales, g, mean, slot_rotary[:2], patch_rotary, torch.float32)
    with pytest.raises(KernelsError, match="do not make up"):
        expand_keys(codes, scales, g, mean, slot_rotary[:, :7].contiguous(), patch_rotary, torch.float32)
    with pytest.raises(KernelsError, match="places, pairs, 2"):
        expand_keys(codes, scales, g, mean, slot_rotary[..., 0], patch_rotary, torch.float32)
    with pytest.raises(KernelsError, match="patch_rotary is"):
        expand_keys(codes, scales, g, mean, slot_rotary, patch_rotary.double(), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_gives_the_bits_of_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    args = random_cache(*shape)
    expanded = expand_keys(*(t.cuda() for t in args), dtype)
    assert torch.equal(bits(expanded), bits(expand_keys(*args, dtype)))
