"""The VAE of Wan 2.2: its streams against diffusers on the whole clip, its shortcuts and patches cell by cell."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from seko_export.errors import UsageError
from seko_export.media.wan_vae.config import VAE_PRESETS
from seko_export.media.wan_vae.levels import averaged, patched, repeated, unpatched
from seko_export.media.wan_vae.modules import (
    VaeDecode,
    VaeEncode,
    decoder_cache_shapes,
    encoder_cache_shapes,
)
from tests.export.vae_oracle import SMALL_2_2, VaeOracle, stream
from tests.support.tiers import first_is_fast
from tests.support.tolerances import VAE, relative_error

ROWS, HEIGHT, WIDTH = 1, 3, 2  # latent cells
WAN = VAE_PRESETS["wan-2.2"]
# One latent frame and then calls of a chunk; whole chunks from the start; calls of different lengths.
CUTS = [[1, 1, 2, 1], [4, 1]]


@pytest.fixture(scope="module")
def oracle() -> VaeOracle:
    return VaeOracle(torch.float64, SMALL_2_2)


def some_latents(frames: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    return torch.randn(ROWS, SMALL_2_2.z_dim, frames, HEIGHT, WIDTH, generator=generator, dtype=dtype)


def some_video(frames: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    shape = (ROWS, 3, SMALL_2_2.video_frames(frames, first=True), 16 * HEIGHT, 16 * WIDTH)
    return torch.rand(shape, generator=generator, dtype=dtype) * 2 - 1


@pytest.mark.shows("wan-vae-2.2")
@pytest.mark.parametrize("cut", first_is_fast(CUTS))
def test_a_stream_decodes_and_encodes_as_the_whole_clip(cut: list[int], oracle: VaeOracle) -> None:
    latents, video = some_latents(5), some_video(5)
    decoded, expected = stream(oracle, VaeDecode, latents, cut), oracle.decode(latents)
    assert decoded.shape == expected.shape == video.shape == (ROWS, 3, 17, 16 * HEIGHT, 16 * WIDTH)
    assert relative_error(decoded, expected) <= VAE[torch.float64]
    assert (decoded.abs() < 1).double().mean() > 0.5  # the clamp hides little
    encoded = stream(oracle, VaeEncode, video, cut)
    assert encoded.shape == latents.shape
    assert relative_error(encoded, oracle.encode(video)) <= VAE[torch.float64]


def test_single_precision() -> None:
    single = VaeOracle(torch.float32, SMALL_2_2)
    latents, video = some_latents(5, torch.float32), some_video(5, torch.float32)
    assert (
        relative_error(stream(single, VaeDecode, latents, (1, 4)), single.decode(latents))
        <= VAE[torch.float32]
    )
    assert (
        relative_error(stream(single, VaeEncode, video, (1, 4)), single.encode(video)) <= VAE[torch.float32]
    )


def test_parts_at_full_size() -> None:
    """In bfloat16: eight latent frames of 704x1280 in two parts, three of 480x832 in one; equal parts alone."""
    assert WAN.decode_parts(8, 44, 80, 2) == 2
    assert WAN.decode_parts(7, 44, 80, 2) == 7
    assert VAE_PRESETS["wan-2.1"].decode_parts(3, 60, 104, 2) == 1
    assert VAE_PRESETS["wan-2.1"].decode_parts(2, 2160, 3840, 2) == 2


def test_caches_at_704x1280() -> None:
    decoder, encoder = (shapes(WAN, 1, 44, 80) for shapes in (decoder_cache_shapes, encoder_cache_shapes))
    assert (len(decoder), len(encoder)) == (32, 24)
    assert sum(map(math.prod, decoder)) == 1_607_936_000
    assert sum(map(math.prod, encoder)) == 530_309_120
    assert [slot for slot, shape in enumerate(encoder) if shape[1] == 1] == [9, 14]
    assert (WAN.spatial_stride, WAN.temporal_stride, WAN.latent_channels) == (16, 4, 48)


@pytest.mark.parametrize(
    ("channels", "channels_out", "in_time", "frames"),
    [(6, 6, 1, 3), (3, 6, 2, 4), (4, 8, 2, 5), (4, 2, 2, 2), (5, 5, 2, 1)],
)
def test_means_and_repeats_cell_by_cell(channels: int, channels_out: int, in_time: int, frames: int) -> None:
    """A number's place in its cell, the channel first, decides which part it is a number of."""
    side, height, width = 2, 2, 3
    generator = torch.Generator().manual_seed(channels)
    fine = torch.randn(1, channels, frames, 2 * height, 2 * width, generator=generator, dtype=torch.float64)
    lead = -frames % in_time
    padded = torch.cat((torch.zeros_like(fine[:, :, :lead]), fine), 2)
    means = averaged(fine, channels_out, in_time, side)
    assert means.shape == (1, channels_out, (frames + lead) // in_time, height, width)
    per_cell = in_time * side**2
    length = channels * per_cell // channels_out
    places = list(product(range(channels), range(in_time), range(side), range(side)))
    for t, y, x in product(range(means.shape[2]), range(height), range(width)):
        numbers = [padded[0, c, in_time * t + a, side * y + b, side * x + d] for c, a, b, d in places]
        for part in range(channels_out):
            mean = sum(numbers[part * length : (part + 1) * length]) / length
            assert torch.isclose(means[0, part, t, y, x], torch.as_tensor(mean), rtol=1e-12)
    back = repeated(means, channels, in_time, side)
    assert back.shape == padded.shape
    for t, y, x in product(range(means.shape[2]), range(height), range(width)):
        for number, (c, a, b, d) in enumerate(places):
            source = means[0, number // length, t, y, x]
            assert back[0, c, in_time * t + a, side * y + b, side * x + d] == source


def test_a_square_of_pixels_is_stored_column_by_column() -> None:
    """Pixel (row, column) of a square is channel colour * 4 + column * 2 + row, unlike torch's pixel_unshuffle."""
    video = torch.arange(2 * 3 * 2 * 4 * 6).reshape(2, 3, 2, 4, 6)
    patches = patched(video, 2)
    for colour, row, column in product(range(3), range(2), range(2)):
        assert torch.equal(patches[:, colour * 4 + column * 2 + row], video[:, colour, :, row::2, column::2])
    assert torch.equal(unpatched(patches, 2), video)
    assert patched(video, 1).equal(video)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_dim": 1.5}, "base_dim must be a whole number of 1 to 16384, got 1.5"),
        ({"is_residual": "no"}, "is_residual must be true or false"),
        ({"patch_size": 0}, "patch_size must be a whole number of 1 to"),
        ({"decoder_base_dim": 0}, "decoder_base_dim must be a whole number of 1 to"),
        ({"dim_mult": (1, 2, 4, 5)}, "levels of 640 and 800 channels, between which no shortcut"),
        ({"dim_mult": (1, 12, 4, 4)}, "levels of 160 and 1920 channels, between which no shortcut"),
    ],
)
def test_configs_that_contradict_themselves_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(WAN, **fields)
