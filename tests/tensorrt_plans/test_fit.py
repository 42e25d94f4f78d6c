"""Whether weights, cache and scratch of a plan fit the GPUs that it can be for; docs/tensorrt.md has the figures."""

from __future__ import annotations

import pytest

from seko_export import BuildOptions, plan
from seko_export.config.model import ModelConfig
from seko_export.families.video import Preset
from seko_export.families.wan.presets import PRESETS

SIZE = ModelConfig(name="5b-size", layers=30, dim=3072, heads=24, ffn_dim=14336)


@pytest.mark.parametrize(
    ("preset", "rtx4090", "rtx5090", "peak_gb"), [("self-forcing-1.3b", 9, 12, 5.2), ("5b-size", 3, 4, 14.6)]
)
def test_sessions_that_fit(
    monkeypatch: pytest.MonkeyPatch, preset: str, rtx4090: int, rtx5090: int, peak_gb: float
) -> None:
    monkeypatch.setitem(PRESETS, SIZE.name, Preset(SIZE, PRESETS["self-forcing-1.3b"].stream))
    options = BuildOptions(preset=preset, fp4_kv=True, backend="tensorrt-rtx", no_text=True, no_vae=True)
    for gpu, sessions in (("rtx4090", rtx4090), ("rtx5090", rtx5090)):
        report = plan(options, gpu)
        assert report["kernels"] == "plain"
        assert (report["sessions_fit"], report["fits"]) == (sessions, sessions > 0)
        assert round(report["peak_bytes"] / 1e9, 1) == peak_gb
        assert any("no engine of --backend tensorrt-rtx has run" in note for note in report["notes"])


def test_attention_in_8_bits_takes_less_scratch_and_room_for_another_session() -> None:
    options = BuildOptions(
        preset="self-forcing-1.3b",
        fp4_kv=True,
        backend="tensorrt-rtx",
        attention="fp8",
        no_text=True,
        no_vae=True,
    )
    for gpu, sessions in (("rtx4090", 10), ("rtx5090", 13)):
        report = plan(options, gpu)
        assert (report["kernels"], report["sessions_fit"]) == ("fused", sessions)
        assert round(report["peak_bytes"] / 1e9, 1) == 5.0
        assert any("AOTInductor's fused layers" in note for note in report["notes"])
