"""A layer with an action module, compiled: AOTInductor's engine writes the module's caches in place, and an ONNX model
returns them. Whole artifacts are compiled on a GPU (tests/export/test_worlds_gpu.py)."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from seko_export.backends.aoti import compile_piece
from seko_export.backends.onnx_form.functional import FunctionalModule
from seko_export.engines.piece import Piece
from seko_export.families.registry import graph_of
from seko_export.host.compiler_cache import CACHE_VARIABLE
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
def test_an_engine_is_its_module_and_writes_its_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = game_config()
    pieces, package = graph_of(config).pieces, tmp_path / "block.pt2"
    piece = pieces["block"]
    assert any("recall" in cache for cache in piece.mutates)
    assert not any("recall" in cache for cache in pieces["block_bare"].mutates)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with (
        torch._inductor.config.patch(compile_threads=1),
        warnings.catch_warnings(action="ignore"),
    ):  # torch's own
        compile_piece(config, piece, package)
    with torch.no_grad():
        wanted = FunctionalModule(piece)(*inputs_of(piece))
    tensors = inputs_of(piece)
    outputs = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, -1).boxed_run([*tensors])
    written = [tensor for a, tensor in zip(piece.signature, tensors, strict=True) if a.name in piece.mutates]
    for found, expected in zip([*outputs, *written], wanted, strict=True):
        assert relative_error(found, expected) <= STEP[torch.float32]


@pytest.mark.slow
def test_an_onnx_model_returns_the_caches_of_its_action_module() -> None:
    """Of a game without a mouse."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    from seko_export.backends.onnx_form.translate import piece_model
    from tests.onnx.forms import run_model

    piece = graph_of(game_config("templerun")).pieces["block"]
    tensors = inputs_of(piece)
    with torch.no_grad():
        wanted = FunctionalModule(piece)(*tensors)
    for found, expected in zip(run_model(piece_model(piece), *tensors), wanted, strict=True):
        assert relative_error(found, expected) <= STEP[torch.float32]
