"""The bound of lossy goldens: the last bit is shaken and nothing else, the same way each time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from seko_export import golden
from seko_export.golden import TOLERANCES, differences, run_eager
from seko_export.progress import silent
from seko_export.sensitivity import bound, shaken
from seko_export.weights import model_weights
from tests.truth.eager_stream import random_text, random_wan_weights, same_bytes, small_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_bit_of_the_hidden_state_is_shaken(dtype):
    hidden, rest = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0)).to(dtype), torch.ones(3)
    runs = [shaken(lambda _: (hidden, rest)) for _ in range(2)]
    first, second = ([run([])[0] for _ in range(2)] for run in runs)
    assert all(map(same_bytes, first, second))
    assert not same_bytes(*first)  # each pass otherwise
    moved = (first[0].double() - hidden.double()).abs() / hidden.double().abs()
    assert moved.max() <= 1.01 * torch.finfo(dtype).eps
    assert (first[0] != hidden).float().mean() > 0.2
    assert runs[0]([])[1] is rest


def test_bounds():
    assert bound(1e-3, 1e-4) == 1e-3
    assert bound(1e-3, 0.2) == 0.4
    assert bound(0.05, 0.9, 0.75) == 0.75


def test_with_random_weights_rounding_stays_rounding():
    """So the tiny model's goldens keep the bounds that planted faults were measured against."""
    config = dataclasses.replace(small_config(3, 1, 6, passes=2), kv_scheme="fp4")
    weights = dict(model_weights(golden.make_pieces(config), random_wan_weights(config.model)))
    weights |= config.schedule.tables(config.stream)
    amax = torch.full((config.model.heads,), 8.0)
    for layer in range(config.model.layers):
        weights |= {f"blocks.{layer}.kv.{n}": t for n, t in config.kv.calibrate(amax, amax).items()}
    text = random_text(config.model, 1)
    plain, other = (
        run_eager(config, weights, text, [0], (0, 1), silent, None, shake=shake) for shake in (False, True)
    )
    latents, cache, video = differences(config, other, plain)
    assert 0 < latents < TOLERANCES[torch.float32]["lossy"]
    assert cache <= 2 / 16  # of a token with 16 scale bytes, two
    assert video == 0
    assert differences(config, plain, plain) == (0, 0, 0)
