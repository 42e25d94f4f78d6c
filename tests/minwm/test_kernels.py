"""Which kernels minWM's layers launch on a Hopper GPU, traced at full size with tensors that have no memory."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.minwm.presets import PRESETS
from seko_export.families.registry import graph_of
from seko_export.lowering.trace import trace
from tests.support.hopper import on_hopper


@pytest.mark.parametrize("name", ["block", "block_context"])
def test_both_attentions_run_in_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_hopper(monkeypatch)
    preset = PRESETS["minwm-camera-1.3b"]
    assert preset.schedule is not None
    config = VideoBuild(
        preset.model,
        VideoConfig(preset.stream, preset.schedule, "fp4"),
        TargetConfig("cuda", fused=True, fp8=True, attention="fp8", resident_window=True),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = trace(graph_of(config).pieces[name], "cuda").graph
    called = [str(node.target) for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    for op in ("seko.attention_fp8", "seko.attention_bf16"):
        assert sum(target.startswith(op) for target in called) == 1
    assert not any("scaled_dot_product" in target and "mask" in target for target in called)
