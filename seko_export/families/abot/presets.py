"""Presets of ABot-World: the published model as its authors run it, and a tiny one for tests."""

from __future__ import annotations

from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.abot.model import AbotModel
from seko_export.families.video import FOR_TESTS, NUMBERS_READ, Preset

ABOT, TINY = "abot-world-5b", "abot-tiny"
SCHEDULE = Schedule.warped((1000.0, 750.0, 500.0, 250.0))

PRESETS: dict[str, Preset] = {
    ABOT: Preset(
        AbotModel(name=ABOT, layers=30, dim=3072, heads=24, ffn_dim=14336),
        StreamConfig(
            height=704,
            width=1280,
            chunk_frames=3,
            sink_frames=0,
            ring_frames=21,
            fps=12,
            window_positions=True,
            spatial_stride=16,
        ),
        SCHEDULE,
        source="acvlab/ABot-World-0-5B-LF, diffusion_pytorch_model.safetensors; code amap-cvlab/ABot-World "
        "(Apache-2.0)",
        unverified=f"{NUMBERS_READ}. A port keeps a sink of 6 frames and 12 others; which cache it was "
        "trained with is not known",
    ),
    TINY: Preset(
        AbotModel(
            name=TINY,
            layers=2,
            dim=64,
            heads=2,
            ffn_dim=96,
            text_dim=16,
            text_tokens=8,
            freq_dim=32,
            key_channels=128,
            reference_side=2,
        ),
        StreamConfig(
            height=64,
            width=96,
            chunk_frames=3,
            sink_frames=0,
            ring_frames=6,
            fps=12,
            window_positions=True,
            spatial_stride=16,
        ),
        SCHEDULE,
        source=FOR_TESTS,
    ),
}
