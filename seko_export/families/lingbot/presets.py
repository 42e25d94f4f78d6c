"""Presets of lingbot-world: the two fast models, as their authors or LightX2V run them, and a tiny one for tests."""

from __future__ import annotations

from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.lingbot.model import LingbotModel
from seko_export.families.video import FOR_TESTS, NUMBERS_READ, Preset

V1, V2, TINY = "lingbot-v1-fast", "lingbot-v2-fast", "lingbot-tiny"
TRAINED_STEPS, SHIFT = 1000, 10.0
_LARGEST = 0.999  # noise level of the trained schedule's first step, before the warp


def trained_schedule(steps: tuple[int, ...], shift: float = SHIFT) -> Schedule:
    """Return the schedule that runs the given steps of the 1000 training steps, as the authors' solver computes it.

    The timestep that the model gets is a whole number: 1000 times the warped noise level, rounded down. Because of the
    rounding, several training steps may share a timestep. The sampler scales the model's output by the noise level of
    the first training step that has the timestep. It adds noise at the noise level of the second training step that has
    the timestep, or of the first one if there is no second one.

    Parameters
    ----------
    steps : tuple of int
        Numbers of the training steps that a chunk's passes use, ascending; step 0 has the most noise.
    shift : float
        Parameter of the warp ``shift*s / (1 + (shift-1)*s)``.
    """
    plain = (_LARGEST * (1 - step / TRAINED_STEPS) for step in range(TRAINED_STEPS))
    levels = [shift * s / (1 + (shift - 1) * s) for s in plain]
    alike: dict[int, list[float]] = {}
    for level in levels:
        alike.setdefault(int(TRAINED_STEPS * level), []).append(level)
    times = [int(TRAINED_STEPS * levels[step]) for step in steps]
    return Schedule(
        tuple(map(float, times)),
        shift=shift,
        own_sigmas=tuple(alike[time][0] for time in times),
        renoise_sigmas=tuple(alike[time][:2][-1] for time in times[1:]),
    )


def _full_size(name: str) -> LingbotModel:
    return LingbotModel(name=name, layers=40, dim=5120, heads=40, ffn_dim=13824)


V1_SCHEDULE, V2_SCHEDULE = trained_schedule((0, 179, 358, 679)), trained_schedule((0, 250, 500, 750))

PRESETS: dict[str, Preset] = {
    V1: Preset(
        _full_size(V1),
        StreamConfig(height=480, width=832, chunk_frames=3, sink_frames=3, ring_frames=18),
        V1_SCHEDULE,
        source="the folder lingbot_world_fast of lingbot-world's base model; code Robbyant/lingbot-world",
        needs="--vae Wan2.1_VAE.pth, which encodes the start picture",
        unverified=f"{NUMBERS_READ}; whether it was trained with a window, which LightX2V's configuration has",
    ),
    V2: Preset(
        _full_size(V2),
        StreamConfig(height=480, width=832, chunk_frames=4, sink_frames=6, ring_frames=12),
        V2_SCHEDULE,
        source="robbyant/lingbot-world-v2-14b-causal-fast, transformers; code robbyant/lingbot-world-v2",
        needs="--vae Wan2.1_VAE.pth, which encodes the start picture",
        unverified=f"{NUMBERS_READ}; for which times it was distilled (vLLM-Omni has others)",
    ),
    TINY: Preset(
        LingbotModel(
            name=TINY, layers=2, dim=128, heads=2, ffn_dim=192, text_dim=48, text_tokens=8, freq_dim=64
        ),
        StreamConfig(height=32, width=48, chunk_frames=2, sink_frames=1, ring_frames=4),
        V2_SCHEDULE,
        source=FOR_TESTS,
    ),
}
