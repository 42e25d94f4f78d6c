"""Builds for a GPU that need not be there."""

from __future__ import annotations

from dataclasses import replace

from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.wan.presets import PRESETS


def on_gpu(preset: str, *, scheme: str = "bf16", batch: int = 1) -> VideoBuild:
    chosen = PRESETS[preset]
    stream: StreamConfig = replace(chosen.stream, batch=batch)
    return VideoBuild(chosen.model, VideoConfig(stream, Schedule.warped(), scheme), TargetConfig("cuda"))
