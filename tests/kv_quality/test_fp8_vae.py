"""The study of e4m3 convolutions in the VAE: the products are those of e4m3 numbers, and the sample's pictures stay."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from scripts.bench.cases import CASES
from scripts.kv_quality import fp8_vae
from seko_export.media.wan_vae.layers import FrameCaches, ResidualBlock, RmsNorm, channels_last
from seko_export.media.wan_vae.modules import VaeDecode
from seko_export.media.wan_vae.own_convolution import FRAMES_SCALE, OwnConvolution, packed_weights
from tests.export.vae_oracle import SMALL
from tests.support.tolerances import FUSED, relative_error

CHANNELS = 12


def some_block(seed: int) -> ResidualBlock:
    block = ResidualBlock(CHANNELS, CHANNELS).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in block.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * parameter[0].numel() ** -0.5 if parameter.dim() == 5 else noise)
    return block


def e4m3(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


def largest_of(norm: RmsNorm) -> float:
    return float(norm.gamma.abs().max()) * CHANNELS**0.5


def test_a_block_multiplies_e4m3_numbers() -> None:
    """Written out in float64; frames before the call are quantised, too."""
    block, generator = some_block(0), torch.Generator().manual_seed(1)
    x = channels_last(torch.randn(1, CHANNELS, 3, 5, 7, generator=generator))
    earlier = [torch.rand(1, 2, 5, 7, CHANNELS, generator=generator) for _ in range(2)]
    y = x
    norms, convolutions = (block.residual[0], block.residual[3]), (block.residual[2], block.residual[6])
    for norm, convolution, frames in zip(norms, convolutions, earlier, strict=True):
        joined = torch.cat((frames.permute(0, 4, 1, 2, 3), F.silu(norm(y))), 2)
        largest = convolution.weight.flatten(1).abs().amax(1) / 448
        weight = e4m3(convolution.weight, largest.view(-1, 1, 1, 1, 1))
        values = e4m3(joined, largest_of(norm) / 448)
        y = F.conv3d(values, weight, convolution.bias.double(), padding=(0, 1, 1)).float()
    with fp8_vae.in_e4m3([block]):
        ours = block(x, FrameCaches(earlier))
    assert relative_error(ours, x + y) <= FUSED[torch.float8_e4m3fn]
    plain = block(x, FrameCaches(earlier))
    assert 0.005 < relative_error(ours, plain) < 0.1


def test_no_frame_is_larger_than_the_norm_says() -> None:
    norm = some_block(2).residual[0]
    channel = int(norm.gamma.abs().argmax())
    x = torch.zeros(1, CHANNELS, 1, 1, 1)
    x[:, channel] = 1e4
    weight = torch.zeros(1, CHANNELS, 3, 3, 3)
    largest = 448 * float(packed_weights(weight, norm.gamma)[FRAMES_SCALE])
    assert largest == pytest.approx(largest_of(norm))
    assert float(norm(x).abs().max()) == pytest.approx(largest)
    assert float(norm(torch.randn(1, CHANNELS, 2, 30, 30)).abs().max()) < largest


def test_layers_are_as_before_once_they_were_measured() -> None:
    decode = VaeDecode(SMALL, first=True, frames=1)
    block, before = (
        next(module for module in decode.modules() if isinstance(module, ResidualBlock)),
        str(decode),
    )
    with fp8_vae.in_e4m3([block]):
        own = [module for module in decode.modules() if isinstance(module, OwnConvolution)]
        assert own == [module for module in block.modules() if isinstance(module, OwnConvolution)]
        assert [module.fp8 for module in own] == [True, True]
    assert str(decode) == before


@pytest.mark.shows("vae-fp8")
@pytest.mark.slow
def test_the_shipped_sample_keeps_its_pictures(tmp_path: Path) -> None:
    case, rows = CASES["quality_vae_fp8"], tmp_path / "rows.jsonl"
    fp8_vae.run(argparse.Namespace(**{**case.options, "prompts": 2, "chunks": 1}, rows=rows))
    written = {row["shape"]: row for row in map(json.loads, rows.read_text().splitlines())}
    assert len(written) == 4
    row = written[f"sample's decoder, own latents, {fp8_vae.ALL}"]
    assert fp8_vae.BAR_DB == row["bar"] <= row["value"]
    for latents in ("own", "random"):
        lossy, exact = (
            written[f"sample's decoder, {latents} latents, {way}"] for way in (fp8_vae.ALL, "float32")
        )
        assert lossy["value"] < exact["value"]
