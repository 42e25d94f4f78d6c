"""Whether weights, cache and scratch of a plan fit the GPUs that it can be for; docs/tensorrt.md has the figures."""

from __future__ import annotations

import pytest

from seko_export import BuildOptions, plan
from seko_export.config.model import ModelConfig
from seko_export.families.base import Preset
from seko_export.families.wan.presets import PRESETS

SIZE = ModelConfig(name="5b-size", layers=30, dim=3072, heads=24, ffn_dim=14336)


@pytest.mark.parametrize(
    ("preset", "kv", "alone", "rtx4090", "rtx5090", "peak_gb"),
    [
        ("self-forcing-1.3b", "bf16", True, 3, 4, 9.3),
        ("self-forcing-1.3b", "fp4", True, 9, 12, 5.2),
        ("self-forcing-1.3b", "bf16", False, 0, 1, 31.4),
        ("5b-size", "bf16", True, 1, 1, 23.0),
        ("5b-size", "fp4", True, 3, 4, 14.6),
        ("5b-size", "fp4", False, 0, 0, 37.5),
    ],
)
def test_sessions_that_fit(
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    kv: str,
    alone: bool,
    rtx4090: int,
    rtx5090: int,
    peak_gb: float,
) -> None:
    monkeypatch.setitem(PRESETS, SIZE.name, Preset(SIZE, PRESETS["self-forcing-1.3b"].stream))
    options = BuildOptions(preset=preset, kv=kv, backend="tensorrt-rtx", no_text=alone, no_vae=alone)
    for gpu, sessions in (("rtx4090", rtx4090), ("rtx5090", rtx5090)):
        report = plan(options, gpu)
        assert report["kernels"] == "plain"
        assert (report["sessions_fit"], report["fits"]) == (sessions, sessions > 0)
        assert round(report["peak_bytes"] / 1e9, 1) == peak_gb
        assert any("no engine of --backend tensorrt-rtx has run" in note for note in report["notes"])
