"""The integer e4m3 codec against torch's float8_e4m3fn: every byte, and a dense sweep of float32."""

from __future__ import annotations

import torch

from seko_kernels.formats import E4M3_MAX
from seko_kernels.reference import e4m3_decode, e4m3_encode

ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def torch_encode(x: torch.Tensor) -> torch.Tensor:
    """Saturating encode by torch's own cast (which turns what lies above the range into NaN)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def test_decode_equals_torch_for_all_256_bytes() -> None:
    expected = ALL_BYTES.view(torch.float8_e4m3fn).to(torch.float32)
    torch.testing.assert_close(e4m3_decode(ALL_BYTES), expected, rtol=0, atol=0, equal_nan=True)


def test_encode_inverts_decode() -> None:
    # 0x80 is minus zero: x < 0 is false for it, so it comes back as 0x00.
    numbers = ALL_BYTES[((ALL_BYTES & 0x7F) != 0x7F) & (ALL_BYTES != 0x80)]
    assert torch.equal(e4m3_encode(e4m3_decode(numbers)), numbers)


def test_encode_equals_torch_on_every_16th_of_a_step_and_its_neighbours() -> None:
    """Every midpoint, both fp32 neighbours of it, and 14 places more between each two e4m3 numbers."""
    grid = e4m3_decode(torch.arange(127, dtype=torch.uint8))
    parts = torch.arange(17, dtype=torch.float32) / 16
    places = (grid[:-1, None] + (grid[1:] - grid[:-1])[:, None] * parts).flatten()
    places = torch.cat([places, places.nextafter(torch.tensor(1e9)), places.nextafter(torch.tensor(0.0))])
    assert torch.equal(e4m3_encode(places), torch_encode(places))
    signed = -places[places > 0]
    assert torch.equal(e4m3_encode(signed) & 0x7F, torch_encode(signed) & 0x7F)
    assert bool((e4m3_encode(signed) >= 0x80).all())


def test_encode_equals_torch_over_the_whole_exponent_range() -> None:
    bits = torch.arange(0, 0x7F800000, 4099, dtype=torch.int32)  # half a million positive finite fp32 numbers
    x = bits.view(torch.float32)
    assert torch.equal(e4m3_encode(x), torch_encode(x))


def test_encode_saturates() -> None:
    x = torch.tensor([448.0, 449.0, 463.9, 464.0, 1e30, float("inf")])
    assert e4m3_encode(x).tolist() == [0x7E] * 6
    assert e4m3_encode(-x).tolist() == [0xFE] * 6
