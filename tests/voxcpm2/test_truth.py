"""The static step and prefill against the original, part by part, teacher-forced and free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seko_export.families.voxcpm2.modules import Fsq
from tests.support.tolerances import ORACLE, relative_error
from tests.voxcpm2.models import PLAIN, ours, prompt, scaled
from tests.voxcpm2.oracle import original_model, run_original

BAR = ORACLE[torch.float32]
FREE_BAR = 5e-5  # steps that feed on each other
CONFIGS = {"plain": PLAIN, "scaled": scaled(PLAIN)}


@pytest.mark.shows("voxcpm2")
@pytest.mark.parametrize("named", CONFIGS)
@pytest.mark.parametrize("ends_in_audio", [False, True], ids=["text", "audio"])
def test_each_step_is_the_originals(
    named: str, ends_in_audio: bool, worst: Callable[[str, float], None]
) -> None:
    """Each step begins with the original's own state: 8 steps behind a prompt with a reference, in two calls."""
    config = CONFIGS[named]
    model = original_model(config, seed=3)
    inputs = prompt(config, 19, range(1, 5), *([range(15, 19)] if ends_in_audio else []))
    steps = run_original(model, **inputs, count=8)
    speech = ours(model, config)
    speech.prefill(0, inputs, start=7, tokens=16, length=48)
    for number, step in enumerate(steps):
        wanted = {"base": step.base, "residual": step.residual, "last_patch": step.last_patch}
        for name, state in speech.state(0).items():
            if wanted[name].any():
                error = relative_error(state, wanted[name][0])
                worst(f"VoxCPM2 {name}", error)
                assert error <= BAR, (number, name)
            else:
                assert not state.any()
        speech.set_state(0, step.base[0], step.residual[0], step.last_patch[0])
        results = speech.step([0], 48, step.noise)
        for name in ("patch", "embedded", "stop_logits"):
            error = relative_error(results[name].flatten(), getattr(step, name).flatten())
            worst(f"VoxCPM2 {name}", error)
            assert error <= BAR, (number, name)
        assert results["stop"].item() == step.stop_logits.argmax().item()
    for prefix, net in (("base_lm", model.base_lm), ("residual_lm", model.residual_lm)):
        length = speech.rows[0].position
        assert length == net.kv_cache.current_length == 19 + 8
        for part, cached in zip("kv", net.kv_cache.kv_cache, strict=True):
            cache = speech.values[f"buffer:{prefix}.{part}"][:, 7 : 7 + length].transpose(1, 2)
            assert relative_error(cache, cached[:, 0, :, :length]) <= BAR, (prefix, part)


def test_levels_are_the_originals() -> None:
    """Whole numbers, exactly."""
    config = PLAIN
    model = original_model(config)
    fsq = Fsq(config, torch.float32)
    fsq.load_state_dict(model.fsq_layer.state_dict())
    seen: list[Tensor] = []
    model.fsq_layer.out_proj.register_forward_pre_hook(lambda _, taken: seen.append(taken[0]))
    hidden = torch.randn(200, config.base.dim, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted, results = model.fsq_layer(hidden), fsq(hidden)
        levels = fsq.levels(hidden)
    assert torch.equal(levels / config.fsq_scale, seen[0])
    assert len(levels.unique()) > config.fsq_scale
    assert relative_error(results, wanted) <= BAR


def test_bfloat16_is_the_originals_bfloat16(worst: Callable[[str, float], None]) -> None:
    """Teacher-forced in bfloat16, whose roundings differ by the order of sums: much nearer than the same model in
    float32, whose time tokens are others.
    """
    config = replace(PLAIN, dtype="bfloat16")
    model, full = original_model(config, seed=3), original_model(PLAIN, seed=3)
    inputs = prompt(config, 19, range(1, 5))
    speech, wide = ours(model, config, dtype=torch.bfloat16), ours(full, PLAIN)
    for pool in (speech, wide):
        pool.prefill(0, inputs, start=7, tokens=16, length=48)
    errors: dict[str, list[float]] = {"half": [], "full": []}
    for step in run_original(model, **inputs, count=12):
        for name, pool in (("half", speech), ("full", wide)):
            dtype = pool.layout.dtype
            states = (step.base[0], step.residual[0], step.last_patch[0])
            pool.set_state(0, *(state.to(dtype) for state in states))
            results = pool.step([0], 48, step.noise.to(dtype))
            errors[name].append(relative_error(results["patch"], step.patch))
    mean = {name: sum(error) / len(error) for name, error in errors.items()}
    worst("VoxCPM2 in bfloat16, mean of steps", mean["half"])
    assert mean["half"] < mean["full"] / 2


@pytest.mark.parametrize("named", CONFIGS)
def test_forty_free_steps_are_the_originals(named: str, worst: Callable[[str, float], None]) -> None:
    config = CONFIGS[named]
    model = original_model(config, seed=5)
    inputs = prompt(config, 11, range(1, 4))
    steps = run_original(model, **inputs, count=40)
    speech = ours(model, config)
    speech.prefill(1, inputs, start=100, tokens=16, length=64)
    for number, step in enumerate(steps):
        results = speech.step([1], 64, step.noise)
        error = relative_error(results["patch"], step.patch)
        worst(f"VoxCPM2 free, {named}", error)
        assert error <= FREE_BAR, number


def test_a_thousand_positions_and_more() -> None:
    """A prompt of 990 tokens in calls of 256, then steps past position 1,000."""
    config = PLAIN
    model = original_model(config, seed=6)
    inputs = prompt(config, 990, range(1, 200), range(900, 990))
    steps = run_original(model, **inputs, count=20)
    speech = ours(model, config, places=1200)
    speech.prefill(2, inputs, start=50, tokens=256, length=1024)
    for number, step in enumerate(steps):
        results = speech.step([2], 1024, step.noise)
        assert relative_error(results["patch"], step.patch) <= FREE_BAR, number
    assert speech.rows[2].position == 1010


def test_rows_that_share_calls_are_as_alone(worst: Callable[[str, float], None]) -> None:
    """Three rows of other lengths, seeds and guidance, one of them padding: each is its solo run to rounding."""
    config = PLAIN
    model = original_model(config, seed=9)
    all_inputs = [prompt(config, 9, range(1, 3)), prompt(config, 14, range(10, 14))]
    alone = []
    for number, inputs in enumerate(all_inputs):
        speech = ours(model, config)
        speech.prefill(number, inputs, start=0, tokens=16, length=32, seed=number, guidance=1.5 + number)
        alone.append([speech.step([number], 32) for _ in range(6)])
    shared = ours(model, config)
    spare = shared.layout.rows - 1
    shared.rows[spare].start = shared.layout.places - 1
    shared.set_state(spare, *(torch.zeros(()) for _ in range(3)))
    for number, inputs in enumerate(all_inputs):
        start = 30 * number
        shared.prefill(number, inputs, start=start, tokens=16, length=32, seed=number, guidance=1.5 + number)
    for turn in range(6):
        results = shared.step([1, spare, 0], 32)
        shared.rows[spare].position = 0
        for number, place in ((1, 0), (0, 2)):
            for name in ("patch", "samples", "stop_logits"):
                error = relative_error(results[name][place], alone[number][turn][name][0])
                worst("VoxCPM2 rows", error)
                assert error <= FREE_BAR, (turn, number, name)


def test_a_row_does_not_see_what_happens_to_others() -> None:
    """A row decodes while others are prefilled, step, end, and others take their places: the same bits as alone."""
    config = PLAIN
    model = original_model(config, seed=10)
    inputs, others = prompt(config, 12, range(1, 4)), [prompt(config, 20), prompt(config, 7, range(3, 7))]

    def spoken(*, company: bool) -> list[Tensor]:
        speech = ours(model, config)
        speech.prefill(0, inputs, start=40, tokens=16, length=64, seed=5)
        samples = []
        for turn in range(9):
            if company and turn in (2, 6):
                for start in (0, 80):
                    row = 1 + start // 80
                    speech.prefill(row, others[turn // 6], start=start, tokens=16, length=64, seed=turn)
            if company and turn not in (0, 1, 5):
                speech.step([2], 64)
                speech.step([1], 64)
            results = speech.step([0], 64)
            samples.append(
                torch.cat((results["samples"][0], results["patch"].flatten(), results["stop_logits"][0]))
            )
        return samples

    for alone, accompanied in zip(spoken(company=False), spoken(company=True), strict=True):
        assert torch.equal(alone, accompanied)
