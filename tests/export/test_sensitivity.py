"""The bound of lossy goldens: the last bit is perturbed and nothing else, the same way each time."""

from __future__ import annotations

import pytest
import torch

from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.weights import model_weights
from seko_export.goldens.sensitivity import perturbed
from seko_export.host.progress import silent
from seko_export.video.bounds import (
    CACHE_TOLERANCES,
    MOST_CODES,
    TOLERANCES,
    UNJUDGED,
    EagerChunk,
    difference,
    golden_bound,
)
from seko_export.video.recording import run_eager
from seko_kernels.reference import nvfp4_encode, nvfp4_global_scale
from seko_runtime.video.golden import cache_error
from seko_runtime.video.manifest import GoldenBound
from tests.truth.eager_stream import known_channels, random_text, random_wan_weights, same_bytes, small_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_bit_of_the_hidden_state_is_shaken(dtype):
    hidden, rest = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0)).to(dtype), torch.ones(3)
    runs = [perturbed(lambda _: (hidden, rest)) for _ in range(2)]
    first, second = ([run([])[0] for _ in range(2)] for run in runs)
    assert all(map(same_bytes, first, second))
    assert not same_bytes(*first)  # each pass otherwise
    moved = (first[0].double() - hidden.double()).abs() / hidden.double().abs()
    assert moved.max() <= 1.01 * torch.finfo(dtype).eps
    assert (first[0] != hidden).float().mean() > 0.2
    assert runs[0]([])[1] is rest


def test_a_lossy_chunk_is_bounded_by_the_least_by_last_bits_and_by_its_loss():
    config = small_config(3, 1, 6, passes=2).changed(kv_scheme="fp4")
    least = TOLERANCES[torch.float32]["lossy"]
    codes = torch.zeros(2, 7, 2, 64, dtype=torch.uint8)

    def chunk(latents: float, flipped: int = 0) -> EagerChunk:
        cache = {name: codes.clone() for name in ("kv.k_codes", "kv.v_codes", "kv.k_scales", "kv.v_scales")}
        cache["kv.k_codes"][0, 0].view(-1)[:flipped] = 1
        return EagerChunk(torch.full((1, 16, 3, 4, 4), latents), cache)

    plain = chunk(1.0)
    first = golden_bound(config, plain, chunk(1.0, 12), plain)  # 12 of 128 codes: more than the least
    assert (first.latents, first.cache) == (least, 2 * 12 / 128)
    shaky = golden_bound(config, plain, chunk(1.25), plain)
    assert shaky.latents == 0.5
    later = golden_bound(config, plain, chunk(1.0, 1), chunk(2.0))
    assert later.latents == pytest.approx(2**0.5)
    assert later.cache == MOST_CODES
    assert golden_bound(config, plain, chunk(1.0, 100), chunk(2.0)).cache == UNJUDGED
    exact = config.changed(kv_scheme="fp32")
    bound = golden_bound(exact, plain, plain, plain)
    assert bound.latents == TOLERANCES[torch.float32]["exact"]
    assert bound.cache == CACHE_TOLERANCES[torch.float32]["exact"]


@pytest.mark.parametrize(("heads", "channels"), [(2, 32), (2, 64), (4, 64)])
def test_fp8s_rounding_is_not_taken_for_another_token(heads, channels):
    """Values that are 3 % apart change every scale of some token, where a token has few of them."""
    generator = torch.Generator().manual_seed(0)
    shape = (1_000, heads, channels)
    values = torch.randn(shape, generator=generator)
    scale = nvfp4_global_scale(values.abs().amax((0, 2)))

    def written(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part.view(torch.uint8) for part in nvfp4_encode(values, scale))

    def worst(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        return max(
            cache_error(a.float().numpy(), b.float().numpy(), "uint8", row_axis=0)
            for a, b in zip(written(ours), written(theirs), strict=True)
        )

    near = values + 0.03 * torch.randn(shape, generator=generator)
    assert worst(near[:300], values[:300]) < MOST_CODES
    assert worst(values.roll(1, 0), values) > MOST_CODES


def test_with_random_weights_rounding_stays_rounding():
    """So the tiny model's goldens keep the bounds that planted faults were measured against."""
    config = small_config(3, 1, 6, passes=2).changed(kv_scheme="fp4")
    weights = dict(model_weights(make_pieces(config), random_wan_weights(config.model)))
    weights |= config.workload.schedule.tables(config.workload.stream)
    known = known_channels(config.model)
    for layer in range(config.model.layers):
        weights |= {f"blocks.{layer}.kv.{n}": t for n, t in config.kv.calibrate(known, known).items()}
    text = random_text(config.model, 1)
    plain, other = (
        run_eager(config, weights, text, [0], (0, 1), silent, None, shake=shake) for shake in (False, True)
    )
    for number in (0, 1):
        moved = difference(config, other[number], plain[number])
        assert 0 < moved.latents < TOLERANCES[torch.float32]["lossy"]
        assert moved.cache <= 2 / 16  # of a token with 16 scale bytes, two
        assert difference(config, plain[number], plain[number]) == GoldenBound(0.0)
