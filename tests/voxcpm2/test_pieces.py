"""The engines of VoxCPM2: each is traced to a graph that can be replayed; one is compiled, all of them on a GPU."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from seko_export.engines.piece import FlatModule, Piece
from seko_export.errors import UsageError
from seko_export.families.voxcpm2.pieces import SpeechLayout, prefill_pieces, step_pieces, voice_piece
from seko_export.families.voxcpm2.presets import FULL, PRESETS, TINY
from seko_export.lowering.trace import trace
from tests.support.tolerances import STEP, relative_error
from tests.voxcpm2.models import scaled

CONFIG = PRESETS[TINY]
LAYOUT = SpeechLayout(rows=5, places=40, dtype=torch.float32)
STEP_PIECES = step_pieces(CONFIG, LAYOUT, batch=2, length=16)
PREFILL_PIECES = prefill_pieces(CONFIG, LAYOUT, tokens=4, length=16)
VOICE = voice_piece(CONFIG, LAYOUT)
PIECES = {**STEP_PIECES, **PREFILL_PIECES, VOICE.name: VOICE}


def test_engines_have_names_of_their_own() -> None:
    assert len(PIECES) == len(STEP_PIECES) + len(PREFILL_PIECES) + 1
    longer = step_pieces(CONFIG, LAYOUT, batch=2, length=32)
    # only what reads the cache is made again for another read length
    assert {piece.key.role for name, piece in longer.items() if name not in STEP_PIECES} == {
        "positions",
        "base_layer",
        "residual_layer",
    }


@pytest.mark.parametrize("name", PIECES)
def test_each_engine_is_traced_to_a_graph_that_can_be_replayed(name: str) -> None:
    """Static sizes, no host synchronisation, no part of a cache by numbers; outputs are as the signature says."""
    check_graph(PIECES[name])


@pytest.mark.slow
@pytest.mark.parametrize("role", ["condition", "base_layer", "solver_step"])
def test_engines_of_a_scaled_model_in_bfloat16_are_traced_too(role: str) -> None:
    pieces = step_pieces(scaled(CONFIG), replace(LAYOUT, dtype=torch.bfloat16), 2, 16)
    check_graph(next(piece for piece in pieces.values() if piece.key.role == role))


def check_graph(piece: Piece) -> None:
    """Trace an engine and compare its outputs with its signature."""
    program = trace(piece, "cpu")
    outputs = [node.meta["val"] for node in program.graph.output_node().args[0]]
    shapes = [(tuple(value.shape), value.dtype) for value in outputs]
    assert shapes == [(argument.shape, argument.dtype) for argument in piece.outputs]


def random_inputs(piece: Piece) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    inputs = []
    for argument in piece.signature:
        if argument.dtype is torch.bool:
            inputs.append(torch.rand(argument.shape, generator=generator) < 0.8)
        elif argument.dtype is torch.int64:
            # every place and row once: a call writes no place twice
            inputs.append(torch.arange(argument.shape[0]))
        else:
            inputs.append(torch.randn(argument.shape, generator=generator).to(argument.dtype))
    return inputs


@pytest.mark.slow
def test_a_compiled_engine_is_its_module(tmp_path: Path) -> None:
    """By AOTInductor for the CPU, what is written in place included."""
    piece = next(piece for piece in STEP_PIECES.values() if piece.key.role == "base_layer")
    package = tmp_path / "engine.pt2"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own modules
        torch._inductor.aoti_compile_and_package(trace(piece, "cpu"), package_path=str(package))
        engine = torch._inductor.aoti_load_package(str(package))
        inputs, module_inputs = random_inputs(piece), random_inputs(piece)
        outputs, wanted = engine(*inputs), FlatModule(piece)(*module_inputs)
    outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
    for ours, theirs in zip([*outputs, *inputs], [*wanted, *module_inputs], strict=True):
        assert relative_error(ours, theirs) <= STEP[torch.float32]


def test_a_step_reads_its_weights_as_often_as_planned() -> None:
    """Bytes of weights of a step of the public model in bfloat16: 7.55 GB, half of them the solver's nine calls."""
    config = PRESETS[FULL]
    layout = SpeechLayout(rows=2, places=1025, dtype=torch.bfloat16)
    calls = {"solver_tokens": 9, "solver_layer": 9, "solver_step": 9}
    read: dict[str, int] = {}
    for piece in step_pieces(config, layout, batch=1, length=1024).values():
        size = sum(torch.Size(a.shape).numel() * a.dtype.itemsize for a in piece.parameters)
        read[piece.key.role] = size * max(piece.layers, 1) * calls.get(piece.key.role, 1)
    decoder = read.pop("decode")
    assert sum(read.values()) == pytest.approx(7.55e9, rel=0.01)
    assert read["base_layer"] == pytest.approx(2.64e9, rel=0.01)
    assert read["solver_layer"] == pytest.approx(3.74e9, rel=0.01)
    assert decoder == pytest.approx(4 * 45.7e6, rel=0.01)


def test_layouts_that_make_no_call_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        SpeechLayout(rows=1, places=40, dtype=torch.float32)
    with pytest.raises(UsageError, match="as many read"):
        prefill_pieces(CONFIG, LAYOUT, tokens=32, length=16)
