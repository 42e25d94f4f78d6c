"""Each build for a GPU can be counted: its manifest holds the least bytes, so nothing else can be built."""

from __future__ import annotations

from typing import Any

import pytest

from seko_export import BuildOptions
from seko_export.errors import UsageError
from seko_export.families.registry import presets_of
from seko_export.roofline.work import Work
from seko_export.video.plan.predict import PlanRequest, config_of

RESIDENT = {"fp4_kv": True, "fp8": True, "resident_window": True}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    RESIDENT,
    {**RESIDENT, "past_share": 0.4, "context": "reuse"},
    {"fp4_kv": True, "fp8": True, "attention": "fp8"},
    {"attention": "bf16"},
    {"kv": "fp8"},
    {"kv": "fp4-sink"},
    {"kv": "fp4-sink", "fp8": True, "attention": "fp8"},
    {"vae_fp8": True, "fp4_kv": True},
    {"offload_layers": True, "decode_frames": 1},
    {"offload_cache": True},
    {"ranks": 2},
)


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets_of("video"))
def test_every_build_for_a_gpu_is_counted(preset: str) -> None:
    counted = 0
    for options in OPTIONS:
        try:
            config, _ = config_of(PlanRequest(BuildOptions(preset=preset, **options), "h200"))
        except UsageError:
            continue  # this model has no such build
        counted += 1
        assert Work.of(config).counts
    assert counted or preset == "memflow-1.3b"  # whose sizes alone are known


@pytest.mark.parametrize(
    ("preset", "options"),
    [("reward-forcing-1.3b", {"kv": "fp4-sink"}), ("minwm-camera-1.3b", RESIDENT)],
)
def test_what_reads_a_quantised_cache_beside_blocks_is_counted(preset: str, options: dict[str, Any]) -> None:
    config, _ = config_of(PlanRequest(BuildOptions(preset=preset, **options), "h200"))
    assert Work.of(config).counts
