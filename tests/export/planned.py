"""Builds for a GPU that need not be there."""

from __future__ import annotations

from dataclasses import replace

from seko_export.config.build import BuildConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.families.wan.presets import PRESETS


def on_gpu(preset: str, *, scheme: str = "bf16", batch: int = 1) -> BuildConfig:
    chosen = PRESETS[preset]
    stream: StreamConfig = replace(chosen.stream, batch=batch)
    return BuildConfig(chosen.model, stream, Schedule.warped(), scheme, "cuda")
