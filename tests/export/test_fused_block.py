"""The fused layers against the plain ones: the same stream within what fp8 rounds, whatever rows and pools do.

Here each fused op is its reference in plain torch; that a GPU's kernels give what the references give is the matter of
tests/kernels. What a GPU build would launch is traced without a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._library.triton import get_triton_kernels_for_op
from torch._subclasses.fake_tensor import FakeTensorMode

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.build_steps import build_artifact
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import FlatModule
from seko_export.errors import UsageError
from seko_export.families.layers.fused_block import RowFusedBlock
from seko_export.families.layers.pieces import make_pieces, make_programs
from seko_export.families.wan.presets import PRESETS
from seko_export.lowering.trace import trace
from seko_export.options.declaration import numbers
from seko_export.video import recording as golden
from seko_export.video.calibration import KvStatistics, layer_constants
from seko_kernels.scratch import scratch_constants
from seko_runtime import open_artifact
from tests.export.test_causal_dit import random_inputs
from tests.export.test_pool_pieces import MODEL as POOL_MODEL
from tests.export.test_pool_pieces import STREAM as POOL_STREAM
from tests.export.test_pool_pieces import batch_latents, eager_pool, text_of
from tests.support.asked import resolved
from tests.support.hopper import on_hopper
from tests.support.tiers import first_is_fast
from tests.support.tolerances import FP8_MATMULS_PASS, FP8_PASS, STEP, relative_error
from tests.support.uncompiled import programs_as_they_are
from tests.truth.eager_stream import (
    EagerStream,
    random_text,
    random_wan_weights,
    same_bytes,
    small_config,
)

BLOCKS = ("block", "block_context")


def fused(config: VideoBuild, *, fp8: bool = False) -> VideoBuild:
    return config.changed(
        fused=True, fp8=fp8, attention="fp8" if config.workload.kv_scheme == "fp4" else "torch"
    )


@pytest.mark.parametrize(("fp8", "bound"), [(False, FP8_PASS), (True, FP8_MATMULS_PASS)])
def test_chunks_past_the_wrap_are_those_of_the_plain_layers(
    fp8: bool, bound: float, worst: Callable[[str, float], None]
) -> None:
    """Two rows, the second begun anew behind the third chunk; each pass is fed the plain stream's latents."""
    config = small_config(2, 1, 4, batch=2, scheme="fp4", passes=2)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    plain, ours = EagerStream(config, weights, text), EagerStream(fused(config, fp8=fp8), weights, text)
    for number in range(8):
        first = [2 * number, 2 * (number if number < 3 else number - 3)]
        wanted = plain.run_chunk(first, [1, 2])
        results = ours.run_chunk(first, [1, 2], feed=[step.latents for step in wanted])
        for step, other in zip(wanted[:-1], results[:-1], strict=True):
            error = relative_error(other.velocity, step.velocity)
            worst(f"fused layers, fp8 attention{' and matmuls' * fp8}, against plain ones, a pass", error)
            assert error <= bound
            if number == 0 and not fp8:  # nothing but the chunk, which sees itself as it is (docs/adr/0004)
                assert error <= STEP[torch.float32]
    assert config.workload.stream.cache_frames < 10  # the ring went round for both rows


@pytest.mark.parametrize(
    ("attention", "scheme", "window_positions"),
    [
        ("torch", "fp32", False),
        ("bf16", "fp32", True),
        ("bf16", "fp4", False),
        ("torch", "int8-fp4-sink", False),
    ],
)
def test_with_16_bit_attention_nothing_is_rounded_otherwise(
    attention: str, scheme: str, window_positions: bool, worst: Callable[[str, float], None]
) -> None:
    """Up to the order of sums; of a lossy cache a code next to a border may fall otherwise, so less is asked."""
    config = small_config(2, 1, 4, batch=2, passes=2, scheme=scheme)
    config = config.changed(stream=replace(config.workload.stream, window_positions=window_positions))
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    plain = EagerStream(config, weights, text)
    ours = EagerStream(config.changed(fused=True, attention=attention), weights, text)
    assert isinstance(ours.pieces["block"].module, RowFusedBlock)
    assert ours.pieces["block"].module.kernel == (attention == "bf16")
    for number in range(6):
        first = [2 * number, 2 * (number if number < 3 else number - 3)]
        wanted = plain.run_chunk(first, [1, 2])
        results = ours.run_chunk(first, [1, 2], feed=[step.latents for step in wanted])
        for step, other in zip(wanted[:-1], results[:-1], strict=True):
            error = relative_error(other.velocity, step.velocity)
            worst(f"fused layers with {attention} attention against plain ones, {scheme}, a pass", error)
            assert error <= STEP[torch.float32] if scheme == "fp32" or not number else FP8_PASS / 20
        for name, cache in ours.caches().items():
            if cache.dtype.is_floating_point:
                assert relative_error(cache, plain.caches()[name]) <= FP8_PASS / 20
            else:
                assert float((cache != plain.caches()[name]).float().mean()) < 1e-3, name


def test_layers_that_are_excepted_from_fp8_have_engines_of_their_own() -> None:
    """Their matmuls are as before: with every other layer excepted a stream is nearer to the plain one."""
    config = small_config(2, 1, 4, scheme="fp4", passes=1, layers=4)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    plain, errors = EagerStream(config, weights, text), {}
    wanted = plain.run_chunk([0], [1])
    for excepted in ((), (0,), (0, 2, 3)):
        ours = EagerStream(fused(config, fp8=True).changed(fp8_except=excepted), weights, text)
        results = ours.run_chunk([0], [1], feed=[step.latents for step in wanted])
        errors[excepted] = relative_error(results[0].velocity, wanted[0].velocity)
        for layer in range(4):
            assert (f"blocks.{layer}.ffn.0.weight" in ours.weights) == (layer in excepted)
            assert (f"blocks.{layer}.ffn.0.weight_fp8" in ours.weights) == (layer not in excepted)
    assert errors[()] > 1.05 * errors[0,] > 1.1 * errors[0, 2, 3]
    called = {name: [c.engine for c in calls if "block" in c.engine] for name, calls in ours.programs.items()}
    assert called["denoise"] == ["block_wide", "block", "block_wide", "block_wide"]
    assert called["context"] == ["block_context_wide", "block_context", "block_context_wide", "block_last"]


@pytest.mark.parametrize(
    ("excepted", "words"),
    [
        ("4", "0 to 1"),
        ("1,0", "rising"),
        ("0,1", "no layer"),
        ("a", "expected whole numbers"),
        ("1,1", "rising"),
    ],
)
def test_exceptions_that_cannot_be(excepted: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolved("tiny", "fp4", kernels="fused", fp8=True, fp8_except=numbers("--fp8-except", excepted))
    with pytest.raises(UsageError, match="belongs to --fp8"):
        resolved("tiny", "fp4", kernels="fused", fp8_except=(0,))


@pytest.mark.parametrize("scheme", ["fp32", "fp4"])
def test_the_last_layer_of_a_context_pass_writes_what_the_whole_layer_would(scheme: str) -> None:
    """Up to the order of sums: codes next to a border may fall to its other side."""
    config = fused(small_config(2, 1, 4, batch=2, scheme=scheme))
    pieces = make_pieces(config)
    whole = pieces["block_context" if scheme == "fp4" else "block"]
    inputs = dict(zip([a.name for a in whole.signature], inputs_of(whole, config), strict=True))
    last = pieces["block_last"]
    assert last.mutates == whole.mutates
    alone = {name: tensor.clone() for name, tensor in inputs.items()}
    with torch.no_grad():
        FlatModule(whole)(*inputs.values())
        assert FlatModule(last)(*(alone[a.name] for a in last.signature)) == ()
    for name in whole.mutates:
        if scheme == "fp32":
            assert relative_error(alone[name], inputs[name]) <= STEP[torch.float32]
        else:
            assert float((alone[name] != inputs[name]).float().mean()) < 1e-3
        assert not same_bytes(alone[name], dict(zip(inputs, inputs_of(whole, config), strict=True))[name])


@pytest.mark.parametrize("name", ["qkv", "slots", "valid"])
def test_a_fused_layer_that_is_wrong_is_seen(name: str) -> None:
    """The bound above can fail: keys of the chunk left out, or in other slots; the past cut off."""
    config = small_config(2, 1, 4, scheme="fp4", passes=1)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    plain, ours = EagerStream(config, weights, text), EagerStream(fused(config), weights, text)
    position = [a.name for a in ours.pieces["block"].signature].index

    def wrong(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = list(tensors)
        if name == "qkv":
            inputs[position("weights.self_attn.norm_k.weight")] = torch.zeros(config.model.dim)
        elif name == "slots":
            inputs[position("write_slots")] = (inputs[position("write_slots")] + 2) % 5
        else:
            inputs[position("valid_tokens")] = torch.full((1,), 2 * config.workload.stream.frame_tokens)
        return FlatModule(ours.pieces["block"])(*inputs)

    ours.engines["block"] = wrong
    errors = []
    for number in range(4):
        wanted = plain.run_chunk([2 * number], [1])
        results = ours.run_chunk([2 * number], [1], feed=[step.latents for step in wanted])
        errors.append(relative_error(results[0].velocity, wanted[0].velocity))
    assert max(errors) > 2 * FP8_PASS


def test_the_context_pass_alone_writes_the_bytes_of_the_plain_layers() -> None:
    """Nobody reads what a denoise pass would write. Codes are those of the plain layers where the input is."""
    config = small_config(2, 1, 4, batch=2, scheme="fp4", passes=1, layers=1)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    plain, ours = EagerStream(config, weights, text), EagerStream(fused(config), weights, text)
    assert ours.pieces["block"].mutates == ()
    assert ours.pieces["block_last"].mutates == plain.pieces["block"].mutates
    programs = make_programs(ours.pieces, config.workload.stream)
    assert [call.engine for call in programs["denoise"]] == [
        "embed",
        "block",
        "last_update",
        "head",
        "advance",
    ]
    assert [call.engine for call in programs["context"]] == ["embed", "block_last"]  # of one layer
    of_two = fused(small_config(2, 1, 4, scheme="fp4"))
    two = make_programs(make_pieces(of_two), of_two.workload.stream)["context"]
    assert [call.engine for call in two] == ["embed", "block_context", "block_last"]
    assert not {"denoise_full", "context_full"} & programs.keys()
    for number in range(4):
        wanted = plain.run_chunk([2 * number] * 2, [1, 2])
        ours.run_chunk([2 * number] * 2, [1, 2], feed=[step.latents for step in wanted])
        for (
            name,
            cache,
        ) in ours.caches().items():  # layer 0 sees the latents alone: a last bit may move a code
            assert float((cache != plain.caches()[name]).float().mean()) < 1e-4, name


def test_what_lies_behind_the_fill_is_never_seen() -> None:
    """Not even the scale byte that is e4m3's NaN."""
    config = fused(small_config(2, 1, 4, scheme="fp4", passes=1))
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    clean, stale = EagerStream(config, weights, text), EagerStream(config, weights, text)
    for cache in stale.caches().values():
        cache.fill_(0x7F)
    for number in range(4):
        own, other = (s.run_chunk([2 * number], [1]) for s in (clean, stale))
        assert own[0].velocity.isfinite().all()
        assert same_bytes(own[0].velocity, other[0].velocity), number


@pytest.mark.parametrize("scheme", ["fp32", "fp4"])
def test_any_two_rows_of_a_pool_give_the_bytes_of_a_batch_of_two(scheme: str) -> None:
    model = replace(POOL_MODEL, dim=64)
    batch = VideoBuild(
        model, VideoConfig(replace(POOL_STREAM, batch=2), Schedule.warped(2), scheme), TargetConfig("cpu")
    )
    batch = fused(batch)
    config = batch.changed(stream=POOL_STREAM, pool=PoolConfig(3, (1, 2)))
    weights = seeded(config)
    with eager_pool(config, weights) as pool:
        a, b, c = (pool.open_session(seed=number, text=text_of(number)) for number in (4, 9, 7))
        for chunk in batch_latents(batch, weights, {7: c, 4: a}, 6):
            results = pool.run([c, a])
            assert np.array_equal(results[0].to_host()[0], chunk[0])
            assert np.array_equal(results[1].to_host()[0], chunk[1])
            b.run_chunk()


def seeded(config: VideoBuild) -> dict[str, Tensor]:
    """Seeded weights of a pool's pieces, and the constants of cache and scratch."""
    generator = torch.Generator().manual_seed(5)
    constants: dict[str, Tensor] = {}
    for piece in make_pieces(config.as_batch).values():
        for argument, layer in product(piece.parameters, piece.served or (0,)):
            noise = torch.randn(argument.shape, generator=generator)
            scaled = 1 + 0.1 * noise if len(argument.shape) == 1 else 0.3 * noise
            name = argument.ref.removeprefix("weight:").replace("{layer}", str(layer))
            constants[name] = scaled.to(argument.dtype)
    constants |= config.workload.schedule.tables(config.as_batch.workload.stream)
    if config.lossless:
        return constants
    exact = config.as_batch.as_exact
    statistics = KvStatistics(exact, config.kv)
    golden.run_eager(exact, constants, golden.golden_text(exact), (0, 1), (0, 2), lambda *_: None, statistics)
    constants |= statistics.calibrate()
    return constants | layer_constants(config, constants)


@pytest.mark.parametrize(
    ("name", "scheme", "batch", "fp8"),
    first_is_fast(
        [("block", "fp4", 2, True), ("block_context", "fp4", 1, False), ("block", "fp32", 2, True)], 2
    ),
)
def test_a_fused_piece_traces_and_equals_itself(name: str, scheme: str, batch: int, fp8: bool) -> None:
    config = fused(small_config(3, 1, 6, batch=batch, scheme=scheme), fp8=fp8)
    piece = make_pieces(config)[name]
    program = trace(piece, "cpu")
    eager, traced = ([*inputs_of(piece, config)] for _ in range(2))
    with torch.no_grad():
        pairs = [*zip(FlatModule(piece)(*eager), program.module()(*traced), strict=True)]
    assert [output.name for output in piece.outputs] == ["hidden", "update"]
    for wanted, got in pairs:
        assert wanted.isfinite().all()
        assert same_bytes(wanted, got)
    for argument, result, other, before in zip(
        piece.signature, eager, traced, inputs_of(piece, config), strict=True
    ):
        assert same_bytes(result, other), argument.name
        assert same_bytes(result, before) == (argument.name not in piece.mutates), argument.name


def inputs_of(piece: object, config: VideoBuild) -> Iterator[Tensor]:
    for argument, tensor in zip(piece.signature, random_inputs(piece, config.workload.stream), strict=True):
        yield torch.full_like(tensor, 2.0**-4) if argument.name.endswith("fp8_scale") else tensor


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_gpu_build_launches_each_kernel_once(name: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced at full size for sm_90 with tensors that have no memory: it can be lowered, and nothing else is ours."""
    on_hopper(monkeypatch)
    preset = PRESETS["self-forcing-1.3b"]
    config = VideoBuild(
        preset.model,
        VideoConfig(preset.stream, Schedule.warped(), "fp4"),
        TargetConfig("cuda", fused=True, fp8=fp8, attention="fp8"),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = trace(make_pieces(config)[name], "cuda").graph
    called = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    ours = [target._schema.name for target in called if target.namespace == "seko"]
    wrote = ["seko::kv_write"] * 2 if name == "block_context" else []
    rows, quantise = ["seko::row_norm"], ["seko::row_norm"] * fp8
    scratch = ["seko::qk_norm_rope", "seko::fp8_expand", "seko::attention_fp8"]
    gelu = ["seko::row_gelu"] * fp8
    assert ours == [*rows, *scratch, *wrote, *quantise, *rows, *quantise, *rows, *gelu]
    assert sum(target is torch.ops.aten._scaled_mm.default for target in called) == 6 * fp8
    assert all(get_triton_kernels_for_op(op) for op in ours)


def test_a_gpu_build_over_an_exact_cache_keeps_torchs_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of full rows; torch cannot index by None what has no memory, as a mask's making does. The last wave is cut."""
    on_hopper(monkeypatch)
    preset = PRESETS["self-forcing-1.3b"]
    config = VideoBuild(
        preset.model, VideoConfig(preset.stream, Schedule.warped(), "bf16"), TargetConfig("cuda", fused=True)
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = trace(make_pieces(config)["block_full"], "cuda").graph
    called = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    ours = [target._schema.name for target in called if target.namespace == "seko"]
    assert ours == ["seko::row_norm", "seko::qk_norm_rope", *["seko::row_norm"] * 2]
    cut = [
        target for target in called if target is torch.ops.aten._scaled_dot_product_cudnn_attention.default
    ]
    assert len(cut) == 1


def test_a_gpu_build_over_an_exact_cache_attends_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full or filling: there is one engine, and the cache goes into the kernel as it lies."""
    on_hopper(monkeypatch)
    preset = PRESETS["self-forcing-1.3b"]
    config = VideoBuild(
        preset.model,
        VideoConfig(preset.stream, Schedule.warped(), "bf16"),
        TargetConfig("cuda", fused=True, attention="bf16"),
    )
    pieces = make_pieces(config)
    assert {name for name in pieces if "block" in name} == {"block", "block_last"}
    programs = make_programs(pieces, preset.stream)
    assert {*programs} >= {"denoise", "context"}
    assert not {"denoise_full", "context_full"} & {*programs}
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = trace(pieces["block"], "cuda").graph
    called = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    ours = [target._schema.name for target in called if target.namespace == "seko"]
    assert ours == ["seko::row_norm", "seko::qk_norm_rope", "seko::attention_bf16", *["seko::row_norm"] * 2]
    (attends,) = (node for node in graph.nodes if "attention_bf16" in str(node.target))
    for arg in attends.args[1:3]:
        assert arg.meta["val"].numel() == config.workload.stream.cache_tokens * preset.model.dim
        assert arg.meta["val"].is_contiguous()


def test_the_scratch_holds_whatever_the_cache_can() -> None:
    scale = torch.tensor([1.0, 0.5, 4.0])
    constants = scratch_constants({"v_global_scale": scale})
    assert constants.keys() == {"v_fp8_scale"}
    assert torch.equal(constants["v_fp8_scale"], scale * 8)  # 6 * 448 / 8 is below 448


# -- builds ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_fused_build_for_this_cpu_keeps_its_goldens(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every room: model, lowering, manifest, replay by the runtime in a process of its own.

    With a resident window: an engine writes into what others read.
    """
    folder = tmp_path_factory.mktemp("fused")
    model = replace(PRESETS["tiny"].model, layers=2, dim=64, heads=2, ffn_dim=64)
    config = VideoBuild(
        model,
        VideoConfig(StreamConfig(32, 32, 2, 1, 4), Schedule.warped(2), "fp4"),
        TargetConfig("cpu", fused=True, fp8=True, fp8_except=(0,), attention="fp8", resident_window=True),
    )
    write_random_checkpoint(folder / "tiny.pt", model, format="self-forcing", seed=0, dtype=torch.float32)
    with programs_as_they_are():
        result = build_artifact(
            config, folder / "tiny.pt", folder / "artifact", backend="compile", compiler_cache=False
        )
        assert (result.kernels, result.attention) == ("fused", "fp8")
        with open_artifact(folder / "artifact", device="cpu") as artifact:
            blocks = {e.name for e in artifact.manifest.engines if e.name.startswith("block")}
            assert blocks == {"block", "block_wide", "block_context_wide", "block_last"}
            kernels = json.loads((folder / "artifact" / artifact.manifest.extra["kernels"]).read_text())
            assert (kernels["layers"], kernels["matmuls"], kernels["fp8_except"]) == ("fused", "fp8", [0])
            assert kernels["resident_window"] is True
            stored = {w.name: w for w in artifact.manifest.weights if w.dtype == "float8_e4m3fn"}
            matrices = ("self_attn.qkv", "self_attn.o", "cross_attn.q", "cross_attn.o", "ffn.0", "ffn.2")
            assert stored.keys() == {f"blocks.1.{matrix}.weight_fp8" for matrix in matrices}
            assert not {f"blocks.1.{matrix}.weight" for matrix in matrices} & {
                w.name for w in artifact.manifest.weights
            }
            assert all(error.within for error in artifact.verify())
