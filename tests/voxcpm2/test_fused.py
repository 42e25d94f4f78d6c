"""Fused layers against plain ones: whole steps of rows of different lengths, whatever lies beside them."""

from __future__ import annotations

import pytest
import torch

from seko_export.families.voxcpm2.config import VoxCpm2Config
from seko_export.families.voxcpm2.pieces import SpeechLayout, prefill_pieces, step_pieces
from seko_export.families.voxcpm2.presets import PRESETS, TINY
from seko_export.lowering.trace import trace
from tests.tolerances import ORACLE, relative_error
from tests.voxcpm2.models import PLAIN, ours, prompt, scaled
from tests.voxcpm2.oracle import original_model

CONFIG = PRESETS[TINY]
LAYOUT = SpeechLayout(rows=5, places=40, dtype=torch.float32, fused=True)
STEP_PIECES = step_pieces(CONFIG, LAYOUT, batch=2, length=16)


@pytest.mark.parametrize("config", [PLAIN, scaled(PLAIN)], ids=["plain", "scaled"])
def test_steps_are_those_of_plain_layers(config: VoxCpm2Config) -> None:
    model = original_model(config)
    pools = [ours(model, config, places=80, fused=fused) for fused in (False, True)]
    for row, (start, tokens) in enumerate(((3, 9), (40, 14))):
        for pool in pools:
            pool.prefill(
                row, prompt(config, tokens, range(2, 5)), start=start, tokens=16, length=16, seed=row
            )
    for rows in ([0, 1], [1], [1, 0]):
        plain, fused = (pool.step(rows, length=32) for pool in pools)
        for name, expected in plain.items():
            if expected.dtype is torch.uint8:
                assert torch.equal(fused[name], expected)
            else:
                assert relative_error(fused[name], expected) <= ORACLE[torch.float32], name
        for pool in pools[1:]:  # each step from the same state: quantisation may magnify a rounding
            for row in rows:
                pool.set_state(row, **pools[0].state(row))


def test_one_engine_serves_all_lengths() -> None:
    assert step_pieces(CONFIG, LAYOUT, batch=2, length=32).keys() == STEP_PIECES.keys()
    plain = SpeechLayout(LAYOUT.rows, LAYOUT.places, LAYOUT.dtype)
    assert prefill_pieces(CONFIG, LAYOUT, 4, 16).keys() == prefill_pieces(CONFIG, plain, 4, 16).keys()


@pytest.mark.parametrize("name", [n for n, p in STEP_PIECES.items() if p.layers or p.key.role == "positions"])
def test_each_engine_is_traced_to_a_graph_that_can_be_replayed(name: str) -> None:
    piece = STEP_PIECES[name]
    outputs = [node.meta["val"] for node in trace(piece, "cpu").graph.output_node().args[0]]
    made_shapes = [(tuple(value.shape), value.dtype) for value in outputs]
    assert made_shapes == [(argument.shape, argument.dtype) for argument in piece.outputs]
