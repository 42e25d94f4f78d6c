"""Fused layers against plain ones: whole steps of rows of different lengths, whatever lies beside them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from seko_export.errors import UsageError
from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.pieces import SpeechLayout, prefill_pieces, step_pieces
from seko_export.families.voxcpm2.presets import FULL, PRESETS, TINY
from seko_export.lowering.trace import trace
from seko_kernels.formats import FP4, INT4
from tests.support.hopper import on_hopper
from tests.support.tolerances import ORACLE, relative_error
from tests.voxcpm2.eager_speech import EagerSpeech
from tests.voxcpm2.models import PLAIN, ours, prompt, scaled
from tests.voxcpm2.oracle import original_model

CONFIG = PRESETS[TINY]
LAYOUT = SpeechLayout(rows=5, places=40, dtype=torch.float32, fused=True)
STEP_PIECES = step_pieces(CONFIG, LAYOUT, batch=2, length=16)


def compare_steps(config: VoxCpm2Config, expected: EagerSpeech, pool: EagerSpeech) -> None:
    """Prefill two rows, then step them alone and together, each time from the same state."""
    pools = [expected, pool]
    for row, (start, tokens) in enumerate(((3, 9), (40, 14))):
        for each in pools:
            tensors = prompt(config, tokens, range(2, 5))
            each.prefill(row, tensors, start=start, tokens=16, length=16, seed=row)
    for rows in ([0, 1], [1], [1, 0]):
        plain, fused = (each.step(rows, length=32) for each in pools)
        for name, truth in plain.items():
            if truth.dtype is torch.uint8:
                assert torch.equal(fused[name], truth)
            else:
                assert relative_error(fused[name], truth) <= ORACLE[torch.float32], name
        for row in rows:  # quantisation may magnify a rounding
            pool.set_state(row, **expected.state(row))


@pytest.mark.parametrize("config", [PLAIN, scaled(PLAIN)], ids=["plain", "scaled"])
def test_steps_are_those_of_plain_layers(config: VoxCpm2Config) -> None:
    model = original_model(config)
    compare_steps(config, *(ours(model, config, places=80, fused=fused) for fused in (False, True)))


def test_steps_over_quantised_caches_are_those_of_plain_layers() -> None:
    model = original_model(PLAIN)
    pools = [ours(model, PLAIN, places=80, fused=fused, form=FP4) for fused in (False, True)]
    compare_steps(PLAIN, *pools)
    with pytest.raises(UsageError, match="caches of int4"):
        ours(model, PLAIN, form=INT4)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_fp8_weights_are_the_model_with_rounded_matrices(fused: bool) -> None:
    model, rounded = original_model(PLAIN), original_model(PLAIN)
    state = rounded.state_dict()
    for name, tensor in state.items():
        if ".layers." in name and name.endswith("_proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 448
            tensor.copy_((tensor / scale).to(torch.float8_e4m3fn).float() * scale)
    exact = ours(rounded, PLAIN, places=80)
    compare_steps(PLAIN, exact, ours(model, PLAIN, places=80, fused=fused, fp8=True))


def test_one_engine_serves_all_lengths() -> None:
    assert step_pieces(CONFIG, LAYOUT, batch=2, length=32).keys() == STEP_PIECES.keys()
    plain = SpeechLayout(LAYOUT.rows, LAYOUT.places, LAYOUT.dtype)
    assert prefill_pieces(CONFIG, LAYOUT, 4, 16).keys() == prefill_pieces(CONFIG, plain, 4, 16).keys()


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_layers_of_a_gpu_build_can_be_lowered(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the public model, for sm_90 with tensors that have no memory, by both kernels of few rows and by torch."""
    on_hopper(monkeypatch)
    layout = SpeechLayout(rows=5, places=40, dtype=torch.bfloat16, fused=True, fp8=fp8)
    for batch in (1, 64, 128):
        pieces = step_pieces(PRESETS[FULL], layout, batch=batch, length=16)
        for name in ("solver_layer", "patch_layer", "base_layer", "residual_layer"):
            with FakeTensorMode(allow_non_fake_inputs=True):
                trace(pieces[f"{name}.{batch}"], "cuda")


@pytest.mark.parametrize("name", [n for n, p in STEP_PIECES.items() if p.layers or p.key.role == "positions"])
def test_each_engine_is_traced_to_a_graph_that_can_be_replayed(name: str) -> None:
    piece = STEP_PIECES[name]
    outputs = [node.meta["val"] for node in trace(piece, "cpu").graph.output_node().args[0]]
    made_shapes = [(tuple(value.shape), value.dtype) for value in outputs]
    assert made_shapes == [(argument.shape, argument.dtype) for argument in piece.outputs]
