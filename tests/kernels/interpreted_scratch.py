"""The kernels that fill the fp8 scratch in Triton's interpreter; run by test_interpreted.py."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from seko_kernels.formats import KEY_TILE
from seko_kernels.fused_reference import e4m3_cast
from seko_kernels.scratch import fp8_expand
from seko_kernels.triton.e4m3_cast import to_e4m3
from seko_kernels.triton.fp8_expand import EXPAND_TILE, fp8_expand_kernel
from tests.kernels.fused_inputs import RINGS, Ring, fp4_cache, key_rotation, poisoned

# As few heads, slots and tokens as show what `RINGS` do: each program is run in Python here.
SMALL = [
    RINGS[0],  # of two heads, which a program takes together
    Ring(3, 16, 10, 6, ((0, 1), (4, 5)), (2, 6)),
    Ring(1, 128, 34, 6, ((2, 5), (0, 3)), (6, 4)),
    Ring(
        1, 64, 32, 7, ((4,), (0,), (3,)), (7, 1, 5)
    ),  # half a tile of keys behind a whole one, and one whole
]


# A rotation over every ring, with the kernel's tile where there are few tokens; none where rows stand apart.
CASES = [
    *((ring, EXPAND_TILE, True) for ring in SMALL[:2]),
    *((ring, 2 * EXPAND_TILE, True) for ring in SMALL[2:]),
    (SMALL[1], 2 * EXPAND_TILE, False),
]


@pytest.mark.parametrize(("ring", "tile", "rotated"), CASES, ids=str)
def test_expand_gives_the_bytes_of_the_reference(ring: Ring, tile: int, rotated: bool) -> None:
    clean = fp4_cache(ring)
    cache = poisoned(ring, clean)
    rotation = key_rotation(ring) if rotated else None
    ours, expected = ring.scratch(), ring.scratch()
    where = (ring.slots(), ring.valid(), ring.frame_tokens)
    fp8_expand(*clean.values(), *where, *expected, rotation)
    group = 2 if ring.heads % 2 == 0 else 1
    mean, slot_rotary, patch_rotary = rotation or (cache["k_global_scale"],) * 3
    order = ("v_codes", "v_scales", "v_global_scale", "v_fp8_scale")
    fp8_expand_kernel[(-(-ours[0].shape[1] // tile), 2 * ring.heads // group, ring.batch)](
        *(cache[name] for name in ("k_codes", "k_scales", "k_global_scale")),
        mean,
        *(cache[name] for name in order),
        slot_rotary,
        patch_rotary,
        ring.slots(),
        ring.valid(),
        *ours,
        ring.cache_tokens,
        ours[0].shape[1],
        HEADS=ring.heads,
        HEAD_DIM=ring.head_dim,
        FRAME_TOKENS=ring.frame_tokens,
        CHUNK_FRAMES=len(ring.write_slots[0]),
        SLOT_PAIRS=slot_rotary.shape[1] if rotated else 0,
        GROUP=group,
        TILE=tile,
        KEY_TILE=KEY_TILE,
        V_COLUMNS=ours[2].shape[3],
        INTEGER=True,
    )
    for mine, truth in zip(ours, expected, strict=True):
        assert torch.equal(mine.view(torch.uint8), truth.view(torch.uint8))


@triton.jit
def cast_kernel(x, out, size: tl.constexpr):
    place = tl.arange(0, size)
    tl.store(out + place, to_e4m3(tl.load(x + place), True))


def test_the_integer_cast_gives_the_bytes_of_torch() -> None:
    """Every e4m3 number, each midpoint and both its neighbours, both signs."""
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (grid[:-1] + grid[1:]) / 2
    x = torch.cat([grid, middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(torch.tensor(0.0))])
    x = torch.cat([x, torch.tensor([448.1, 464.0, 465.0, 1e30])])
    x = torch.cat([x, -x])
    x = torch.cat([x, x.new_zeros(1024 - len(x))])
    out = torch.zeros(1024, dtype=torch.uint8).view(torch.float8_e4m3fn)
    cast_kernel[(1,)](x, out, size=1024)
    assert torch.equal(out.view(torch.uint8), e4m3_cast(x).view(torch.uint8))
