"""Models and prompts that several files of tests use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seko_export.families.voxcpm2.config import LongRope, VoxCpm2Config
from seko_export.families.voxcpm2.pieces import SpeechLayout
from seko_export.families.voxcpm2.presets import PRESETS, TINY
from seko_kernels.formats import NumberFormat
from tests.voxcpm2.eager_speech import EagerSpeech
from tests.voxcpm2.oracle import weights_of

PLAIN = PRESETS[TINY]


def with_heads(channels: int, **changes: Any) -> VoxCpm2Config:
    """The tiny model with heads of so many channels."""
    factors = tuple(1 + pair / channels for pair in range(channels // 2))
    nets = {
        role: replace(getattr(PLAIN, role), head_dim=channels)
        for role in ("base", "residual", "encoder", "decoder")
    }
    rope = replace(PLAIN.rope, short_factors=factors, long_factors=factors)
    return replace(PLAIN, name="wide", rope=rope, **nets, **changes)


def scaled(config: VoxCpm2Config) -> VoxCpm2Config:
    """The same sizes with everything on that the public model has off."""
    depth = {
        role: replace(getattr(config, role), scale_depth=1.4)
        for role in ("base", "residual", "encoder", "decoder")
    }
    rope = config.rope
    longer = LongRope(rope.theta, rope.short_factors, rope.long_factors, 2048, 64)
    return replace(config, rope=longer, residual_rope=True, embed_scale=3.0, mean_mode=True, **depth)


def prompt(config: VoxCpm2Config, tokens: int, *audio: range) -> dict[str, Tensor]:
    """A prompt of random ids and patches; the tokens in ``audio`` are patches."""
    generator = torch.Generator().manual_seed(tokens)
    is_audio = torch.zeros(tokens, dtype=torch.bool)
    for places in audio:
        is_audio[list(places)] = True
    patches = torch.randn(tokens, *config.patch_shape, generator=generator)
    ids = torch.randint(config.vocab_size, (tokens,), generator=generator)
    return {
        "ids": torch.where(is_audio, 0, ids),
        "is_audio": is_audio,
        "patches": patches * is_audio[:, None, None],
    }


def ours(
    model: Any,
    config: VoxCpm2Config,
    *,
    places: int = 400,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    fp8: bool = False,
    form: NumberFormat | None = None,
) -> EagerSpeech:
    """A pool of three rows and the spare one, with the original's weights."""
    layout = SpeechLayout(rows=4, places=places, dtype=dtype, fused=fused, fp8=fp8, form=form)
    return EagerSpeech(config, layout, *weights_of(model))
