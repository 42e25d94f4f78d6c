"""Each build for a GPU can be counted: its manifest holds the least bytes, so nothing else can be built."""

from __future__ import annotations

from typing import Any

import pytest

from seko_export import BuildOptions
from seko_export.roofline.work import Work
from seko_export.video.plan.predict import PlanRequest, config_of
from tests.support.tiers import first_is_fast

RESIDENT = {"fp4_kv": True, "fp8": True, "resident_window": True}
SPARSE = {**RESIDENT, "past_share": 0.4, "context": "reuse"}
# Every family, way of filling a cache and option; the first two read a quantised cache beside blocks.
BUILDS: list[tuple[str, dict[str, Any]]] = [
    ("reward-forcing-1.3b", {"kv": "fp4-sink"}),
    ("minwm-camera-1.3b", RESIDENT),
    ("tiny", {}),
    ("self-forcing-1.3b", {"ranks": 2}),
    ("longlive-1.3b", {"kv": "fp4-sink", "fp8": True}),
    ("rolling-forcing-1.3b", {}),
    ("streamdiffusion-v2-1.3b", {"fp4_kv": True, "fp8": True, "attention": "fp8"}),
    ("krea-14b", SPARSE),
    ("wan-5b", {"offload_layers": True, "decode_frames": 1}),
    ("wan-i2v-14b", {"kv": "fp8"}),
    ("lingbot-v2-fast", SPARSE),
    ("seko-talk-14b-hybrid", {"offload_cache": True}),
    ("matrix-game-2-universal", {"attention": "bf16"}),
    ("abot-world-5b", RESIDENT),
]


@pytest.mark.parametrize(("preset", "options"), first_is_fast(BUILDS, 2))
def test_every_build_for_a_gpu_is_counted(preset: str, options: dict[str, Any]) -> None:
    config, _ = config_of(PlanRequest(BuildOptions(preset=preset, **options), "h200"))
    assert Work.of(config).counts
