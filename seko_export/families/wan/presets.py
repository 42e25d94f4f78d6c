"""Wan's presets: models of the Wan 2.1 and Self-Forcing authors, and a tiny model for tests."""

from __future__ import annotations

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.video import Preset
from seko_export.families.wan_layout.recognise import USUAL_STREAM

# Sources: the Wan 2.1 and Self-Forcing model configurations.
PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        ModelConfig(
            name="tiny", layers=2, dim=256, heads=2, ffn_dim=512, text_dim=64, text_tokens=32, freq_dim=64
        ),
        StreamConfig(height=64, width=96, chunk_frames=3, sink_frames=1, ring_frames=6),
    ),
    "self-forcing-1.3b": Preset(
        ModelConfig(name="self-forcing-1.3b", layers=30, dim=1536, heads=12, ffn_dim=8960),
        USUAL_STREAM,
    ),
    "wan-14b": Preset(
        ModelConfig(name="wan-14b", layers=40, dim=5120, heads=40, ffn_dim=13824),
        USUAL_STREAM,
    ),
}
