"""Presets of Seko-Talk AR: the two layouts that LightX2V runs, and a tiny one for tests."""

from __future__ import annotations

from dataclasses import replace

from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.seko_talk.model import SekoTalkModel
from seko_export.families.video import FOR_TESTS, NUMBERS_READ, Preset

FULL, HYBRID, TINY = "seko-talk-14b", "seko-talk-14b-hybrid", "seko-talk-tiny"
ROPE_MAX_FRAMES = 40  # timestep shift of LightX2V's two-step model
SHIFT, SAMPLER = 5.0, "euler-bf16"
_SOURCE = "no public weights; code ModelTC/LightX2V"


def evenly(passes: int, shift: float = SHIFT) -> Schedule:
    """Return the schedule of LightX2V: evenly spaced timesteps, warped; latents rounded to bfloat16."""
    times = tuple(1000.0 * (1 - at / passes) for at in range(passes))
    return replace(Schedule.warped(times, shift), sampler=SAMPLER)


def _stream(height: int, width: int, chunk_frames: int, ring_frames: int) -> StreamConfig:
    # LightX2V's window of 21 and sink of 2 frames include the reference frame: here one reference frame, a sink of
    # one frame, a ring of 20.
    return StreamConfig(
        height,
        width,
        chunk_frames,
        sink_frames=1,
        ring_frames=ring_frames,
        pass_caches=True,
        window_positions=True,
        reference_frames=1,
    )


PRESETS: dict[str, Preset] = {
    FULL: Preset(
        SekoTalkModel(name=FULL, layers=40, dim=5120, heads=40, ffn_dim=13824),
        _stream(832, 480, 1, 20),
        evenly(4),
        source=_SOURCE,
        unverified=NUMBERS_READ,
    ),
    HYBRID: Preset(
        SekoTalkModel(name=HYBRID, layers=40, dim=5120, heads=40, ffn_dim=13824),
        # The windows W2-W2-W2-W2-W21 are numbers of chunks, which have one latent frame here.
        replace(_stream(832, 480, 1, 21), layer_rings=(2, 2, 2, 2, 21), rope_max_frames=ROPE_MAX_FRAMES),
        evenly(2),
        source=_SOURCE,
        unverified=NUMBERS_READ,
    ),
    TINY: Preset(
        SekoTalkModel(
            name=TINY,
            layers=2,
            dim=128,
            heads=2,
            ffn_dim=192,
            text_dim=48,
            text_tokens=8,
            freq_dim=64,
            image_dim=40,
            image_tokens=5,
            audio_dim=48,
            audio_frames=13,
            audio_width=32,
            audio_tokens=4,
            audio_layers=2,
            audio_heads=2,
            audio_ffn=64,
            audio_freq_dim=16,
        ),
        _stream(32, 48, 2, 4),
        evenly(2),
        source=FOR_TESTS,
    ),
}
