"""Presets of minWM: the published camera model as its authors run it, and a tiny one for tests."""

from __future__ import annotations

from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.minwm.model import MinwmModel
from seko_export.families.video import FOR_TESTS, NUMBERS_READ, Preset

MINWM, TINY = "minwm-camera-1.3b", "minwm-tiny"
SCHEDULE = Schedule.warped((1000.0, 750.0, 500.0, 250.0), 5.0)

PRESETS: dict[str, Preset] = {
    MINWM: Preset(
        MinwmModel(name=MINWM, layers=30, dim=1536, heads=12, ffn_dim=8960),
        StreamConfig(height=480, width=832, chunk_frames=4, sink_frames=0, ring_frames=20),
        SCHEDULE,
        entry="generator_ema",
        files=("Action2V/dmd/model.pt",),
        source="MIN-Lab/minWM, Wan21/Action2V/dmd/model.pt; code shengshu-ai/minWM (Apache-2.0)",
        unverified=f"{NUMBERS_READ}, and it rounds cameras to bfloat16; the licence of the weights; two keys held at "
        "once",
    ),
    TINY: Preset(
        MinwmModel(name=TINY, layers=2, dim=64, heads=2, ffn_dim=96, text_dim=16, text_tokens=8, freq_dim=32),
        StreamConfig(height=32, width=48, chunk_frames=4, sink_frames=0, ring_frames=8),
        SCHEDULE,
        source=FOR_TESTS,
    ),
}
