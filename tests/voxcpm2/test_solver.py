"""The solver's times, time tokens and steps against the original."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seko_export.errors import UsageError
from seko_export.families.layers.sampler import gaussian
from seko_export.families.voxcpm2.modules import PatchNoise
from seko_export.families.voxcpm2.pieces import SpeechLayout
from seko_export.families.voxcpm2.presets import FULL, PRESETS, TINY
from seko_export.families.voxcpm2.solver import solver_tables, solver_times, still_steps
from seko_runtime.speech.contract import PATCH
from tests.support.tolerances import ORACLE, relative_error
from tests.voxcpm2.eager_speech import EagerSpeech
from tests.voxcpm2.oracle import original, original_model, weights_of

BAR = ORACLE[torch.float32]
# Time and size of the public model's ten steps, measured of the original in bfloat16 and in float32.
BF16 = (
    *((1, 0.046875), (0.953125, 0.04296875), (0.91015625, 0.05859375), (0.8515625, 0.0625)),
    *((0.7890625, 0.08203125), (0.70703125, 0.09765625), (0.609375, 0.1171875), (0.4921875, 0.14257812)),
    *((0.34960938, 0.16113281), (0.18847656, 0.18847656)),
)
FP32 = (
    *((1, 0.04356557), (0.95643443, 0.04741746), (0.90901697, 0.05502647), (0.8539905, 0.06620526)),
    *((0.78778523, 0.08067846), (0.70710677, 0.09808975), (0.60901701, 0.11801046)),
    *((0.49100655, 0.13995001), (0.35105655, 0.16336818), (0.18768837, 0.18768837)),
)


@pytest.mark.parametrize(
    ("dtype", "wanted", "off"), [(torch.bfloat16, BF16, 1e-8), (torch.float32, FP32, 1e-7)]
)
def test_ten_steps_have_the_originals_times(
    dtype: torch.dtype, wanted: tuple[tuple[float, float], ...], off: float
) -> None:
    times = [(float(time), float(size)) for time, size in solver_times(10, dtype)]
    assert times == [pytest.approx(pair, abs=off) for pair in wanted]


def test_so_many_first_steps_are_still() -> None:
    assert [still_steps(steps) for steps in (2, 10, 48, 49, 74, 100)] == [1, 1, 1, 2, 3, 4]
    with pytest.raises(UsageError, match="at least 2"):
        solver_times(1, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mean_mode", [False, True])
def test_time_tokens_are_the_originals_to_the_bit(dtype: torch.dtype, mean_mode: bool) -> None:
    """As its local transformer makes them in that dtype, at the public model's width."""
    dit = original().dit
    config = replace(PRESETS[FULL], mean_mode=mean_mode)
    width = config.decoder.dim
    generator = torch.Generator().manual_seed(2)
    model: dict[str, Tensor] = {}
    nets = {name: dit.TimestepEmbedding(width, width) for name in ("time_mlp", "delta_time_mlp")}
    for name, net in nets.items():
        for inner, parameter in net.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.03
            parameter.data = model[f"feat_decoder.estimator.{name}.{inner}"] = drawn.to(dtype)
    embed = dit.SinusoidalPosEmb(width)
    tokens, sizes = solver_tables(model, config, 10, dtype)
    assert tokens.shape == (9, width)
    assert sizes.shape == (9, 1)
    for number, (time, size) in enumerate(solver_times(10, dtype)[1:]):
        pair = torch.stack((time, time))
        delta = torch.stack((size, size)) if mean_mode else torch.zeros_like(pair)
        with torch.no_grad():
            wanted = nets["time_mlp"](embed(pair).to(dtype)) + nets["delta_time_mlp"](embed(delta).to(dtype))
        assert torch.equal(tokens[number], wanted[0])
        assert sizes[number] == size


def test_bfloat16_times_are_another_table_than_rounded_float32_ones() -> None:
    """Angles up to 1000 in steps of 4: what a table in float32 would lose."""
    config = PRESETS[TINY]
    model, _ = weights_of(original_model(config))
    half, _ = solver_tables(model, config, 10, torch.bfloat16)
    full, _ = solver_tables(model, config, 10, torch.float32)
    assert relative_error(half, full) > 0.1


@pytest.mark.parametrize("steps", [4, 10])
def test_the_solver_is_the_originals_with_guidance_for_each_row(
    steps: int, worst: Callable[[str, float], None]
) -> None:
    config = PRESETS[TINY]
    model = original_model(config, seed=8)
    layout = SpeechLayout(rows=4, places=8, dtype=torch.float32)
    speech = EagerSpeech(config, layout, *weights_of(model), steps=steps)
    generator = torch.Generator().manual_seed(3)
    guidance = [2.0, 1.0, 3.5]
    d = config.base.dim
    base, residual = (torch.randn(3, d, generator=generator) for _ in range(2))
    last, noise = (torch.randn(3, *config.patch_shape, generator=generator) for _ in range(2))
    for row in range(3):
        speech.set_state(row, base[row], residual[row], last[row])
        speech.rows[row].guidance = guidance[row]
    pieces = speech.begin([0, 1, 2], 8)
    speech.run(pieces["condition"])
    speech.values[f"buffer:{PATCH}"] = noise
    speech.solve(pieces)
    span = torch.linspace(1, 0, steps + 1)
    span = span + (torch.cos(torch.pi / 2 * span) - 1 + span)
    for row in range(3):
        here = slice(row, row + 1)
        with torch.no_grad():
            mu = torch.cat((model.lm_to_dit_proj(base[here]), model.res_to_dit_proj(residual[here])), dim=-1)
            wanted = model.feat_decoder.solve_euler(
                noise[here].transpose(1, 2).contiguous(),
                span,
                mu,
                last[here].transpose(1, 2).contiguous(),
                guidance[row],
            )
        error = relative_error(speech.values[f"buffer:{PATCH}"][row], wanted[0].T)
        worst("VoxCPM2 solver", error)
        assert error <= BAR, row


def test_noise_depends_on_seed_and_number_alone() -> None:
    """Whatever shares the batch; scaled by a row's temperature, and rounded as the original draws it."""
    config = PRESETS[TINY]
    noise = PatchNoise(config, torch.float32)
    seeds, numbers = torch.tensor([5, 9, 5]), torch.tensor([0, 0, 70_000])
    drawn_noise = noise(seeds, numbers, torch.tensor([1.0, 1.0, 0.5]))
    for row in range(3):
        alone = noise(seeds[row : row + 1], numbers[row : row + 1], torch.tensor([1.0, 1.0, 0.5][row])[None])
        assert torch.equal(drawn_noise[row], alone[0])
    assert len({tuple(row.flatten().tolist()) for row in drawn_noise}) == 3
    drawn = gaussian(seeds, numbers[:, None], torch.zeros(1, dtype=torch.int64), (1, *config.patch_shape))
    assert torch.equal(drawn_noise[2], 0.5 * drawn[2, 0, 0])
    rounded = PatchNoise(config, torch.bfloat16)(seeds, numbers, torch.ones(3))
    assert torch.equal(rounded[0], drawn_noise[0].bfloat16())
