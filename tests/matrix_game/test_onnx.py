"""A layer with an action module as an ONNX model, which returns the module's caches. A GPU compiles whole artifacts
(tests/export/test_worlds_gpu.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from seko_export.backends.onnx_form.functional import FunctionalModule
from seko_export.engines.piece import Piece
from seko_export.families.registry import graph_of
from seko_export.lowering.agree import random_inputs
from tests.matrix_game.streams import game_config
from tests.support.tolerances import STEP, relative_error


def inputs_of(piece: Piece) -> list[Tensor]:
    """Random tensors, with a first chunk's places in the caches."""
    places = {
        "token_index": torch.arange(18),
        "valid_tokens": torch.tensor([18]),
        "write_slots": torch.arange(3),
    }
    drawn = zip(piece.signature, random_inputs(piece, "cpu"), strict=True)
    return [
        places[a.name].expand(a.shape).contiguous() if a.name in places else tensor for a, tensor in drawn
    ]


@pytest.mark.slow
def test_an_onnx_model_returns_the_caches_of_its_action_module() -> None:
    """Of a game without a mouse."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    from seko_export.backends.onnx_form.translate import piece_model
    from tests.onnx.forms import run_model

    piece = graph_of(game_config("templerun")).pieces["block"]
    assert any("recall" in cache for cache in piece.mutates)
    tensors = inputs_of(piece)
    with torch.no_grad():
        wanted = FunctionalModule(piece)(*tensors)
    for found, expected in zip(run_model(piece_model(piece), *tensors), wanted, strict=True):
        assert relative_error(found, expected) <= STEP[torch.float32]
