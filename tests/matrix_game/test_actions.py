"""One action module on its own, its fp8 matmuls and the empty slots of its caches; and the graphs of its engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from seko_export.config.pool import PoolConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.layers.block import Recall
from seko_export.families.layers.choice import CHUNK
from seko_export.families.layers.fused_block import set_fp8
from seko_export.families.layers.layer_pieces import BARE, BLOCK, LAST
from seko_export.families.matrix_game.actions import (
    COS,
    KEY_K,
    KEY_K_CACHE,
    KEY_V,
    KEY_V_CACHE,
    MOUSE_K_CACHE,
    MOUSE_V_CACHE,
    MOVES,
    SIN,
    ActionModule,
)
from seko_export.families.matrix_game.model import MatrixGameModel
from seko_export.families.matrix_game.presets import PRESETS
from seko_export.families.registry import graph_of
from seko_export.lowering.trace import trace
from seko_kernels.matmul import quantise_weight
from tests.matrix_game.streams import game_config, random_checkpoint
from tests.support.hopper import on_hopper
from tests.support.tolerances import FP8_MATMULS_PASS, relative_error

CONFIG = game_config()
MODEL, STREAM = MatrixGameModel.of(CONFIG.model), CONFIG.workload.stream
FRAMES, SLOTS, TOKENS = STREAM.chunk_frames, STREAM.cache_frames, STREAM.frame_tokens
HEADS = (MODEL.action_heads, 64)


def module(dtype: torch.dtype) -> ActionModule:
    made = ActionModule(MODEL, STREAM, dtype, fused=True).requires_grad_(False)
    checkpoint = random_checkpoint(CONFIG)
    for name, weight in made.named_parameters():
        weight.copy_(checkpoint[f"blocks.0.action_model.{name}"])
    return made


def inputs(dtype: torch.dtype, fill: float = 0.0) -> tuple[Tensor, dict[str, Tensor], Recall]:
    """A hidden state, the tensors of a first chunk, and caches of two rows that hold what nobody wrote."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    angles = torch.rand(2, FRAMES, 4, generator=generator)
    conditioning = {
        COS: angles.cos(),
        SIN: angles.sin(),
        MOVES: random(2, FRAMES, 24),
        KEY_K: random(2, FRAMES, *HEADS),
        KEY_V: random(2, FRAMES, *HEADS),
    }
    caches = {name: torch.full((2 * SLOTS, *HEADS), fill, dtype=dtype) for name in (KEY_K_CACHE, KEY_V_CACHE)}
    caches |= {
        name: torch.full((2 * SLOTS, TOKENS, *HEADS), fill, dtype=dtype)
        for name in (MOUSE_K_CACHE, MOUSE_V_CACHE)
    }
    slots = torch.arange(FRAMES).expand(2, -1)
    recall = Recall(caches, slots, torch.full((2,), FRAMES * TOKENS), None)
    return random(2, FRAMES * TOKENS, MODEL.dim), conditioning, recall


def behind(made: ActionModule, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """The hidden state with both residuals."""
    hidden, residual = made(*inputs(dtype, fill))
    return hidden + residual


def test_slots_that_nobody_wrote_are_not_seen() -> None:
    plain = module(torch.float32)
    results = [behind(plain, torch.float32, fill) for fill in (0.0, float("nan"))]
    assert torch.equal(*results)


def test_on_a_gpu_fused_layers_attend_over_time_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced with tensors that have no memory: the mouse and the keyboard, once each."""
    on_hopper(monkeypatch)
    preset = PRESETS["matrix-game-2-universal"]
    assert preset.schedule is not None
    target = TargetConfig("cuda", fused=True, attention="fp8")
    workload = VideoConfig(preset.stream, preset.schedule, "fp4")
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = trace(graph_of(VideoBuild(preset.model, workload, target)).pieces["block"], "cuda").graph
    called = [str(node.target) for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert sum(target.startswith("seko.attention_over_time") for target in called) == 2


@pytest.mark.parametrize("name", module(torch.float32).fp8_linears)
def test_an_action_module_in_fp8_is_the_one_of_bfloat16(
    name: str, worst: Callable[[str, float], None]
) -> None:
    """And one matrix whose scales are twice too large is seen."""
    plain, ours = module(torch.bfloat16), module(torch.bfloat16)
    set_fp8(ours)
    ours.requires_grad_(False)
    for part in ours.fp8_linears:
        values, scale = quantise_weight(plain.get_parameter(f"{part}.weight"))
        ours.get_parameter(f"{part}.weight_fp8").copy_(values)
        ours.get_parameter(f"{part}.weight_scale").copy_(scale)

    wanted = behind(plain, torch.bfloat16)
    error = relative_error(behind(ours, torch.bfloat16), wanted)
    worst("Matrix-Game, a hidden state behind an action module in fp8", error)
    assert 0 < error <= FP8_MATMULS_PASS
    ours.get_parameter(f"{name}.weight_scale").mul_(2)
    broken = relative_error(behind(ours, torch.bfloat16), wanted)
    # a norm follows mouse_attn_q, so that its scales do not count
    assert (broken > FP8_MATMULS_PASS) == (name != "mouse_attn_q")


FAST = {"fused": True, "attention": "fp8", "fp8": True, "kv_scheme": "fp4", "resident_window": True}


@pytest.mark.parametrize(
    ("game", "change"),
    [
        ("universal", {}),
        ("templerun", {"pool": PoolConfig(2, (1, 2))}),
        ("universal", FAST),
        ("templerun", FAST),
        ("templerun", {"fused": True, "attention": "fp8", "kv_scheme": "fp4", "pool": PoolConfig(2, (2,))}),
        ("universal", {"fused": True, "fp8": True}),
    ],
    ids=["alone", "pool", "fused fp4 fp8", "fused fp4 fp8, keys alone", "fused fp4 pool", "fused exact fp8"],
)
def test_its_engines_are_replayable(game: str, change: dict[str, Any]) -> None:
    """Also of layers without an action module, and of the context pass; a denoise pass over an FP4 cache writes the
    caches of the action modules, and no others."""
    graph = graph_of(game_config(game).changed(**change))
    blocks = [piece for piece in graph.pieces.values() if piece.key.role == BLOCK]
    for piece in (*blocks, *(piece for piece in graph.pieces.values() if piece.key.role == CHUNK)):
        trace(piece, "cpu")
    for piece in blocks:
        kept = {name for name in piece.mutates if name.startswith("recall.")}
        layers = piece.served
        assert bool(kept) == (BARE not in piece.key.variant and 0 in layers and LAST not in piece.key.variant)
    plain = next(piece for piece in blocks if not piece.key.variant)
    caches = {name.partition(".")[0] for name in plain.mutates}
    assert caches == ({"recall"} if change.get("attention") == "fp8" else {"recall", "caches"})
    contexts = [calls for name, calls in graph.programs.items() if name.startswith("context")]
    assert all(len(calls) == len(contexts[0]) for calls in contexts)
