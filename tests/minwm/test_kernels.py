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


@pytest.mark.parametrize(
    ("name", "resident", "wanted"),
    [
        ("block", True, {"attention_fp8": 2}),
        ("block_context", True, {"attention_fp8": 2}),
        ("block", False, {"attention_fp8": 1, "attention_bf16": 1, "fp8_expand": 1}),
    ],
)
def test_both_attentions_run_in_kernels(
    name: str, resident: bool, wanted: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a resident window of each attention both see cached frames in 8 bits."""
    on_hopper(monkeypatch)
    preset = PRESETS["minwm-camera-1.3b"]
    assert preset.schedule is not None
    config = VideoBuild(
        preset.model,
        VideoConfig(preset.stream, preset.schedule, "fp4"),
        TargetConfig("cuda", fused=True, fp8=True, attention="fp8", resident_window=resident),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = trace(graph_of(config).pieces[name], "cuda").graph
    called = [str(node.target) for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    ops = ("attention_fp8", "attention_bf16", "fp8_expand")
    counts = {op: sum(target.startswith(f"seko.{op}") for target in called) for op in ops}
    assert {op: count for op, count in counts.items() if count} == wanted
    assert not any("scaled_dot_product" in target and "mask" in target for target in called)
