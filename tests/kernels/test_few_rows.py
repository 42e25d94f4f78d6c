"""Ops on few rows and few tokens: the layer's own maths, rows by themselves; what compiles; GPU within rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from seko_export.engines.piece import FlatModule, Piece
from seko_export.families.voxcpm2.pieces import SpeechLayout, step_pieces
from seko_export.families.voxcpm2.presets import FULL, PRESETS
from seko_kernels.errors import KernelsError
from seko_kernels.few_rows import (
    FEW_ROWS,
    TICKETS,
    Weight,
    linear_added,
    norm_gated_linear,
    norm_linear,
)
from seko_kernels.few_tokens import (
    QuantisedCache,
    decode_attention,
    decode_parts,
    local_attention,
    quantised_decode_attention,
)
from seko_kernels.formats import FP4, INT4, INT8, NumberFormat
from seko_kernels.matmul import quantise_weight
from seko_kernels.triton.few_rows import few_rows_kernel
from seko_kernels.triton.few_tokens import decode_attention_kernel, local_attention_kernel
from seko_kernels.triton.warpgroup_rows import warpgroup_rows_kernel
from seko_kernels.tuned_rows import RowTiles
from tests.kernels.captured import run_and_replay
from tests.kernels.conftest import HOPPER, OTHERS
from tests.kernels.few_rows_inputs import (
    DECODES,
    LOCALS,
    Decode,
    DecodeInputs,
    Local,
    decode_inputs,
    local_inputs,
    quantised,
)
from tests.support.tolerances import ROUNDED_TO_BF16, relative_error

EPS, SCALE = 1e-5, 0.25
# Rows, width and hidden width of a layer: the public model's, and sides that no tile divides.
LAYERS = [(1, 2048, 6144), (22, 1024, 4096), (32, 2048, 6144), (44, 1024, 4096), (7, 200, 136)]
MATRICES = ("in", "gate_up", "out")
FULL_LOCALS = [*LOCALS, Local(2, 11, 16, 2, 128), Local(128, 11, 16, 2, 128), Local(64, 5, 16, 2, 128)]
FULL_DECODES = [
    *DECODES,
    Decode((600,), 16, 2, 128),
    Decode((0,), 16, 2, 128, rotated=False),
    Decode((*range(0, 1600, 29), *[None] * 8), 16, 2, 128),
]


def attended(inputs: DecodeInputs) -> Tensor:
    """What a row's token attends to, with its own keys behind the row's, softmax written out in float64."""
    places, kv_heads, head_dim = inputs.k_cache.shape
    rows = []
    for row, position in enumerate(inputs.positions.tolist()):
        begin = int(inputs.starts[row])
        every = inputs.qkv[row].double().view(-1, head_dim)
        heads = len(every) - 2 * kv_heads
        turned = every.clone()
        if inputs.cos is not None and inputs.sin is not None:
            low, high = every.chunk(2, dim=-1)
            cos, sin = (table[row].double() for table in (inputs.cos, inputs.sin))
            turned = every * cos + torch.cat((-high, low), dim=-1) * sin
        keys = torch.cat(
            (inputs.k_cache[begin : begin + position].double(), turned[None, heads : heads + kv_heads])
        )
        values = torch.cat(
            (inputs.v_cache[begin : begin + position].double(), every[None, heads + kv_heads :])
        )
        for head in range(heads):
            shared = head * kv_heads // heads
            weights = (keys[:, shared] @ turned[head] / math.sqrt(head_dim)).softmax(0)
            rows.append(weights @ values[:, shared])
    assert places > 0
    return torch.stack(rows).view(len(inputs.positions), -1)


@given(
    positions=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    shared=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    rotated=st.booleans(),
)
def test_a_token_attends_to_its_row_and_itself(
    positions: list[int], shared: int, kv_heads: int, rotated: bool
) -> None:
    inputs = decode_inputs(Decode(tuple(positions), shared * kv_heads, kv_heads, 4, rotated))
    truth = attended(inputs)
    before = inputs.v_cache.clone()
    out = decode_attention(*inputs, torch.zeros(TICKETS, dtype=torch.int32))
    assert relative_error(out, truth) < 1e-6
    v = inputs.qkv.unflatten(-1, (-1, 4))[:, -kv_heads:]
    assert torch.equal(inputs.v_cache[inputs.write_index], v)
    before[inputs.write_index] = v
    assert torch.equal(inputs.v_cache.nan_to_num(9), before.nan_to_num(9))


# Of normal numbers keys and values are each off by 9 % in norm in e2m1, by 0.6 % in int8.
@pytest.mark.parametrize(("form", "bound"), [(INT8, 0.01), (FP4, 0.15)], ids=["int8", "fp4"])
def test_a_quantised_cache_holds_nearly_the_same(form: NumberFormat, bound: float) -> None:
    inputs = decode_inputs(Decode((40, 100, 7), 4, 2, 32))
    truth = attended(inputs)
    keys, values = quantised(form, inputs)
    tickets = torch.zeros(TICKETS, dtype=torch.int32)
    out = quantised_decode_attention(*inputs[:3], keys, values, inputs.starts, inputs.positions, tickets)
    assert 1e-4 < relative_error(out, truth) < bound
    other = values._replace(form=INT4)
    with pytest.raises(KernelsError, match="expected both"):
        quantised_decode_attention(*inputs[:3], keys, other, inputs.starts, inputs.positions, tickets)


@pytest.mark.parametrize("shape", LOCALS, ids=str)
def test_local_attention_is_that_of_each_row_alone(shape: Local) -> None:
    qkv, cos, sin = local_inputs(shape)
    out = local_attention(qkv, cos, sin, shape.heads, shape.kv_heads)
    places = 1 + shape.tokens
    for row in range(shape.batch):  # the last token, as one that decodes behind the others
        _, k, v = (
            qkv[row]
            .view(shape.tokens, -1, shape.head_dim)
            .split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        )
        low, high = k.chunk(2, dim=-1)
        k = k * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
        caches = [F.pad(x, (0, 0, 0, 0, 0, places - shape.tokens)) for x in (k, v)]
        last = torch.tensor([shape.tokens - 1])
        inputs = DecodeInputs(
            qkv[row, -1:], cos[-1:], sin[-1:], caches[0], caches[1], torch.tensor([0]), last, last
        )
        assert relative_error(out[row, -1], attended(inputs)[0]) < 1e-6


def layer_inputs(
    rows: int, width: int, hidden: int, dtype: torch.dtype, device: str = "cpu"
) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    tensors = {
        "x": torch.randn(rows, width) * torch.exp(torch.randn(rows, 1)),
        "inner": torch.randn(rows, hidden),
        "norm": 1 + 0.3 * torch.randn(width),
        "in": torch.randn(hidden, width) / math.sqrt(width),
        "gate_up": torch.randn(2 * hidden, width) / math.sqrt(width),
        "out": torch.randn(width, hidden) / math.sqrt(hidden),
    }
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def run_layer(inputs: dict[str, Tensor], weights: dict[str, Weight] | None = None) -> list[Tensor]:
    """The three linear layers of a layer, and its tickets."""
    weights = weights or {name: Weight(inputs[name]) for name in MATRICES}
    y, tickets = norm_linear(inputs["x"], inputs["norm"], EPS, weights["in"])
    gated = norm_gated_linear(inputs["x"], inputs["norm"], EPS, weights["gate_up"], tickets)
    added = linear_added(inputs["inner"], weights["out"], inputs["x"], SCALE, tickets)
    return [y, gated, added, tickets]


def true_layer(inputs: dict[str, Tensor]) -> list[Tensor]:
    """The same by torch's modules, in float64."""
    i = {name: tensor.double() for name, tensor in inputs.items()}
    normed = F.rms_norm(i["x"], i["x"].shape[-1:], i["norm"], EPS)
    gate, up = (normed @ i["gate_up"].T).chunk(2, dim=-1)
    return [normed @ i["in"].T, nn.SiLU()(gate) * up, i["x"] + SCALE * (i["inner"] @ i["out"].T)]


def test_linear_layers_are_torchs() -> None:
    inputs = layer_inputs(7, 200, 136, torch.float32)
    *ours, tickets = run_layer(inputs)
    for mine, truth in zip(ours, true_layer(inputs), strict=True):
        assert relative_error(mine, truth) < 1e-6
    assert not tickets.any()


def test_wrong_tensors_are_refused() -> None:
    inputs = layer_inputs(3, 32, 48, torch.float32)
    x, norm, tickets = inputs["x"], inputs["norm"], torch.zeros(TICKETS, dtype=torch.int32)
    with pytest.raises(KernelsError, match="x has shape"):
        norm_linear(inputs["inner"], norm, EPS, Weight(inputs["in"]))
    with pytest.raises(KernelsError, match="norm_weight is"):
        norm_linear(x, norm.double(), EPS, Weight(inputs["in"]))
    with pytest.raises(KernelsError, match="weight is"):
        norm_linear(x, norm, EPS, Weight(inputs["in"], torch.ones(48, 1)))
    with pytest.raises(KernelsError, match="even number"):
        norm_gated_linear(x, norm, EPS, Weight(inputs["in"][:7].contiguous()), tickets)
    with pytest.raises(KernelsError, match="hidden has shape"):
        linear_added(inputs["inner"], Weight(inputs["out"]), x[:2], 1.0, tickets)
    with pytest.raises(KernelsError, match="tickets has shape"):
        linear_added(inputs["inner"], Weight(inputs["out"]), x, 1.0, tickets[:5])
    decode = decode_inputs(DECODES[0])
    with pytest.raises(KernelsError, match="positions has shape"):
        decode_attention(*decode._replace(positions=decode.positions[:1]), tickets)
    with pytest.raises(KernelsError, match="must both be"):
        decode_attention(*decode._replace(cos=None), tickets)
    with pytest.raises(KernelsError, match="heads of queries"):
        decode_attention(*decode._replace(qkv=decode.qkv[:, :-32].contiguous()), tickets)
    qkv, cos, sin = local_inputs(LOCALS[0])
    with pytest.raises(KernelsError, match="cos has shape"):
        local_attention(qkv, cos[1:], sin, 4, 2)


@given(
    rows=st.integers(1, FEW_ROWS),
    outer=st.integers(1, 12_288),
    inner=st.integers(1, 8192),
    gated=st.booleans(),
    shared=st.booleans(),
)
def test_tiles_cover_every_sum(rows: int, outer: int, inner: int, gated: bool, shared: bool) -> None:
    tiles = RowTiles.of(rows, outer, inner, gated=gated, shared=shared)
    assert tiles.rows >= rows
    part = -(-inner // tiles.splits)
    assert tiles.splits == 1 or (shared and part >= tiles.products)
    turn = 2 * tiles.products * (tiles.rows + tiles.channels * (1 + gated))
    assert turn * tiles.stages <= 227 * 1024  # of shared memory
    assert tiles.splits * -(-part // tiles.products) * tiles.products >= inner
    if tiles.splits > 1:
        assert -(-outer // tiles.channels) <= TICKETS


@given(st.integers(1, 256), st.integers(1, 8))
def test_parts_are_few_where_rows_are_many(batch: int, kv_heads: int) -> None:
    parts = decode_parts(batch, kv_heads)
    assert 1 <= parts <= 16
    assert parts == 1 or parts * batch * kv_heads <= 132


def compiled_cases() -> dict[str, tuple[Any, dict[str, str], dict[str, Any], str]]:
    """Kernel, signature, constants and the instruction of its products; the first case of a kernel bears its name."""
    linear = {
        **dict.fromkeys(("X", "NORM_WEIGHT", "W"), "*bf16"),
        "W_SCALE": "*fp32",
        **dict.fromkeys(("HIDDEN", "OUT"), "*bf16"),
        "SUMS": "*fp32",
        "TICKETS": "*i32",
        "rows": "i32",
    }
    constants = {"EPS": EPS, "BRANCH_SCALE": 1.0, "BN": 16, "SLICES": 4, "STAGES": 4, "BM": 32, "BK": 256}
    norm = {"NORM": True, "ADD": False, "SPLITS": 1, "PART": 1024, "K": 1024}
    plain = {"SCALED": False, "NEW_TICKETS": 0, "GATED": False}
    added = {"NORM": False, "ADD": True, "SPLITS": 4, "PART": 512, "K": 2048, "N": 1024}
    shared = {name: value for name, value in constants.items() if name != "SLICES"}
    gated = shared | plain | norm | {"N": 4096, "GATED": True, "BN": 64, "BK": 128}
    fp8 = shared | plain | added | {"SCALED": True, "BN": 64, "BK": 128, "BM": 16, "PART": 512}
    attention = {"QKV": "*bf16", "COS": "*fp32", "SIN": "*fp32"}
    heads = {"SCALE": 0.1, "HEADS": 16, "KV_HEADS": 2, "HEAD_DIM": 128, "BH": 64, "BD": 128}
    local = heads | {"TOKENS": 11, "BT": 16}
    decode = {
        **attention,
        **dict.fromkeys(("K_CACHE", "V_CACHE"), "*bf16"),
        **dict.fromkeys(("K_SCALES", "V_SCALES"), "*u8"),
        **dict.fromkeys(("STARTS", "POSITIONS", "WRITE_INDEX"), "*i64"),
        "OUT": "*bf16",
        **dict.fromkeys(("SUMS", "TOPS"), "*fp32"),
        "TICKETS": "*i32",
    }
    heads |= {"ROPE": True, "SPLITS": 16, "BG": 16, "BN": 64}
    exact = heads | {"BITS": 0, "GROUP": 1, "GLOBAL_SCALE": 1.0}
    eighths = linear | {"W": "*fp8e4nv"}
    few_rows = constants | plain
    cases = {
        "linear": (few_rows_kernel, linear, few_rows | norm | {"N": 4096, "GATED": True}, "HMMA"),
        "linear-tickets": (
            few_rows_kernel,
            linear,
            few_rows | norm | {"N": 2560, "NEW_TICKETS": TICKETS},
            "HMMA",
        ),
        "linear-added-fp8": (few_rows_kernel, eighths, few_rows | added | {"SCALED": True}, "HMMA"),
        "warpgroup": (warpgroup_rows_kernel, eighths, fp8, "HGMMA"),
        "warpgroup-gated": (warpgroup_rows_kernel, linear, gated, "HGMMA"),
        "local": (local_attention_kernel, attention | {"OUT": "*bf16"}, local, "HMMA"),
        "decode": (decode_attention_kernel, decode, exact, "HMMA"),
    }
    for name, form, kind in (("int8", INT8, "*i8"), ("fp4", FP4, "*u8")):
        codes = decode | dict.fromkeys(("K_CACHE", "V_CACHE"), kind)
        quantised = {"BITS": form.code_bits, "GROUP": form.group, "GLOBAL_SCALE": 0.01}
        cases[f"decode-{name}"] = (decode_attention_kernel, codes, heads | quantised, "HMMA")
    return cases


CASES = compiled_cases()
EVERYWHERE = ("linear", "local", "decode")  # the others are of Hopper alone, or differ by constants


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        pytest.param(name, arch, marks=[pytest.mark.slow] * (arch not in HOPPER or "-" in name))
        for name in CASES
        for arch in (*HOPPER, *(OTHERS if name in EVERYWHERE else ()))
    ],
)
def test_kernels_compile_without_spills(
    cross_compile: Callable[..., Any],
    sass_of: Callable[[Any], list[str]],
    loops_of: Callable[[Any], list[list[str]]],
    case: str,
    arch: int,
) -> None:
    kernel, signature, constants, product = CASES[case]
    compiled = cross_compile(kernel, signature, constants, arch, 4)
    if arch in HOPPER:
        opcodes = sass_of(compiled)
        assert product in opcodes
        slow = [loop for loop in loops_of(compiled) if "F2F" in loop]
        assert "W" not in signature or not slow, "conversions of an eighth of the rate"
        assert not {"LDL", "STL"} & set(opcodes), f"{kernel.__name__} spills with {constants}"


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("sizes", LAYERS, ids=str)
def test_gpu_linear_layers_are_as_near_as_torchs(sizes: tuple[int, int, int], fp8: bool) -> None:
    if fp8 and any(side % 16 for side in sizes[1:]):
        pytest.skip("no fp8 matrix")
    inputs = layer_inputs(*sizes, torch.bfloat16)
    weights, rounded = {name: Weight(inputs[name]) for name in MATRICES}, dict(inputs)
    for name in MATRICES if fp8 else ():
        weights[name] = Weight(*quantise_weight(inputs[name]))
        values, scale = quantise_weight(inputs[name])
        rounded[name] = values.float() * scale
    gpu = {name: tensor.cuda() for name, tensor in inputs.items()}
    on_gpu = {name: Weight(*(t if t is None else t.cuda() for t in w)) for name, w in weights.items()}
    with torch.no_grad():
        direct, replayed = run_and_replay(lambda _: run_layer(gpu, on_gpu)[:3], [])
        *_, tickets = run_layer(gpu, on_gpu)
    theirs = run_layer(inputs, weights)[:3]
    for mine, again, same, truth in zip(direct, replayed, theirs, true_layer(rounded), strict=True):
        assert relative_error(mine.cpu(), truth) <= 2 * relative_error(same, truth)
        assert torch.equal(mine, again)
    assert not tickets.any()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FULL_LOCALS, ids=str)
def test_gpu_local_attention_is_as_near_as_torchs(shape: Local) -> None:
    qkv, cos, sin = local_inputs(shape)
    heads = (shape.heads, shape.kv_heads)
    truth = local_attention(qkv.double().float(), cos, sin, *heads)
    same = local_attention(qkv.bfloat16(), cos, sin, *heads)
    ours = local_attention(qkv.bfloat16().cuda(), cos.cuda(), sin.cuda(), *heads)
    assert relative_error(ours.cpu(), truth) <= 2 * relative_error(same, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", FULL_DECODES, ids=str)
def test_gpu_decode_attention_is_as_near_as_torchs(shape: Decode) -> None:
    inputs = decode_inputs(shape)
    rows = [position is not None for position in shape.positions]
    tickets = torch.zeros(TICKETS, dtype=torch.int32)
    ours, same = inputs.on("cuda", torch.bfloat16), inputs.on("cpu", torch.bfloat16)
    truth = attended(inputs)[rows]
    mine = decode_attention(*ours, tickets.cuda())
    again = decode_attention(*inputs.on("cuda", torch.bfloat16), tickets.cuda())
    theirs = decode_attention(*same, tickets)[rows]
    assert relative_error(mine.cpu()[rows], truth) <= 2 * relative_error(theirs, truth)
    assert torch.equal(mine, again)  # whichever part is last
    for cache, expected in ((ours.k_cache, same.k_cache), (ours.v_cache, same.v_cache)):
        at = shape.own_places
        assert relative_error(cache.cpu()[at], expected[at]) <= ROUNDED_TO_BF16
        assert torch.equal(cache.isnan().cpu()[:-1], expected.isnan()[:-1])


def engine_inputs(piece: Piece, places: int) -> list[Tensor]:
    """Arguments of a layer's engine on a GPU; index 1 is a row that holds 40 positions, 0 is no row."""
    generator = torch.Generator("cuda").manual_seed(3)
    indices = {"starts": [places - 1, 5], "first": [0, 40], "write_index": [places - 1, 45]}
    inputs = []
    for argument in piece.signature:
        if argument.name in indices:
            inputs.append(torch.tensor(indices[argument.name], device="cuda"))
            continue
        drawn = torch.randn(argument.shape, generator=generator, device="cuda")
        if argument.name.endswith("weight"):
            drawn = drawn / math.sqrt(argument.shape[-1]) if drawn.dim() == 2 else 1 + 0.1 * drawn
        if argument.name in ("cos", "sin"):
            drawn[..., argument.shape[-1] // 2 :] = drawn[..., : argument.shape[-1] // 2]
        inputs.append(drawn.to(argument.dtype))
    return inputs


@pytest.mark.gpu
@pytest.mark.parametrize("role", ["solver_layer", "patch_layer", "base_layer"])
def test_gpu_engine_of_a_layer_is_five_launches(package_runner: Callable[..., Any], role: str) -> None:
    """Compiled as in an artifact: nothing is copied, and a replay repeats the call."""
    layout = SpeechLayout(rows=3, places=200, dtype=torch.bfloat16, fused=True)
    pieces = step_pieces(PRESETS[FULL], layout, batch=2, length=64)
    piece = next(piece for piece in pieces.values() if piece.key.role == role)
    module, inputs = FlatModule(piece), engine_inputs(piece, layout.places)
    with torch.no_grad():
        engine = package_runner(module, tuple(inputs))
        caches = [place for place, argument in enumerate(piece.signature) if argument.name in piece.mutates]
        copies = list(inputs)
        for place in caches:
            copies[place] = inputs[place].clone()
        expected = module(*copies)
        direct, replayed = run_and_replay(engine, inputs)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as profiled:
            engine(list(inputs))
            torch.cuda.synchronize()
        at = next(place for place, argument in enumerate(piece.signature) if argument.name == "hidden")

        def chain(run: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]) -> list[Tensor]:
            tensors, x = list(tensors), tensors[at]
            for _ in range(30):
                tensors[at] = x
                (x,) = run(list(tensors))
            return [x]

        long = chain(lambda tensors: module(*tensors), copies)
        _, long_replayed = run_and_replay(lambda tensors: chain(engine, tensors), inputs)
    assert torch.equal(long_replayed[0], long[0])
    assert torch.equal(direct[0], expected[0])
    assert torch.equal(direct[0], replayed[0])
    for place in caches:
        assert torch.equal(inputs[place], copies[place])
    launches = [
        event.name for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    assert len(launches) == 5, launches


@pytest.mark.gpu
@pytest.mark.parametrize("form", [INT8, FP4], ids=lambda form: form.name)
@pytest.mark.parametrize("shape", FULL_DECODES[3:], ids=str)
def test_gpu_decode_over_a_quantised_cache_is_the_reference(shape: Decode, form: NumberFormat) -> None:
    inputs = decode_inputs(shape)
    keys, values = quantised(form, inputs)
    tickets = torch.zeros(TICKETS, dtype=torch.int32)
    truth = quantised_decode_attention(*inputs[:3], keys, values, inputs.starts, inputs.positions, tickets)
    on_gpu = inputs.on("cuda", torch.bfloat16)
    caches = (QuantisedCache(form, cache.codes.cuda(), cache.scales.cuda()) for cache in (keys, values))
    ours = quantised_decode_attention(*on_gpu[:3], *caches, on_gpu.starts, on_gpu.positions, tickets.cuda())
    rows = [position is not None for position in shape.positions]
    assert (
        relative_error(ours.cpu()[rows], truth[rows]) <= 4 * ROUNDED_TO_BF16
    )  # of q, k, weights and the result
