"""The roundings that `past_in_fp8` simulates: none is SDPA, each is one, and of the past alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

from scripts.kv_quality.past_in_fp8 import WORDS, attend
from tests.tolerances import STEP, relative_error

pytestmark = pytest.mark.slow

OWN = torch.arange(24) >= 16
SCALES = {"k": torch.full((2,), 0.25), "v": torch.full((2,), 0.25)}


@pytest.mark.parametrize("filled", [24, 20, None])
def test_without_a_rounding_it_is_sdpa(filled: int | None) -> None:
    q, k, v = torch.randn(3, 3, 2, 24, 32, generator=torch.Generator().manual_seed(0))
    bias = (
        None
        if filled is None
        else torch.where(torch.arange(24) < filled, 0.0, -torch.inf).expand(3, 1, 1, 24)
    )
    ours = attend(q, k, v, bias, OWN, frozenset(), SCALES)
    truth = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    assert relative_error(ours, truth) <= STEP[torch.float32]


@pytest.mark.parametrize("word", WORDS)
def test_each_rounds_a_little_and_where_it_says(word: str) -> None:
    q, k, v = torch.randn(3, 3, 2, 24, 32, generator=torch.Generator().manual_seed(0))
    exact = attend(q, k, v, None, OWN, frozenset(), SCALES)
    assert 1e-6 < relative_error(attend(q, k, v, None, OWN, frozenset({word}), SCALES), exact) < 0.05
    everything_own = attend(q, k, v, None, OWN | True, frozenset({word}), SCALES)
    moved = relative_error(everything_own, exact)
    assert moved > 1e-6 if word.startswith("own") else moved <= STEP[torch.float32]
