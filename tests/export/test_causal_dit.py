"""The parts of the static step against their definitions, and every piece traced, checked and equal to itself."""

from __future__ import annotations

import dataclasses

import mpmath
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_export.config.stream import StreamConfig
from seko_export.engines.key import EngineKey
from seko_export.engines.piece import FlatModule, Piece
from seko_export.families.layers.block import Block, fill_bias
from seko_export.families.layers.causal_dit import patchify, sinusoid, unpatchify
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.ring_positions import token_index
from seko_export.families.layers.rotary import rotary_tables, rotate
from seko_export.families.wan.presets import PRESETS
from seko_export.lowering.trace import trace
from seko_runtime.video.ring import Ring
from tests.support.tiers import first_is_fast
from tests.support.tolerances import REORDERED_SUM, ROUNDED_ONCE, STEP, ULP, relative_error
from tests.truth.eager_stream import (
    EagerStream,
    random_text,
    random_wan_weights,
    same_bytes,
    small_config,
)

MODEL = PRESETS["tiny"].model
STREAM = StreamConfig(64, 96, chunk_frames=3, sink_frames=1, ring_frames=6, batch=2)


@pytest.mark.parametrize("frame", [0, 1, 1023, 1024, 1_000_000, 2**24 + 1])
def test_rotary_tables_against_fifty_digits(frame):
    """Any frame number: each entry is the true cosine or sine, rounded once to fp32."""
    stream = StreamConfig(32, 48, chunk_frames=2, sink_frames=0, ring_frames=2)  # 2 x 3 tokens a frame
    cos, sin = rotary_tables(torch.tensor([[frame, frame + 1]]), MODEL, stream)
    assert cos.shape == sin.shape == (1, 12, 64)
    assert cos.dtype == sin.dtype == torch.float32
    wanted_cos, wanted_sin = [], []
    with mpmath.workdps(50):
        for token in range(12):
            place = (frame + token // 6, token % 6 // 3, token % 3)
            for position, channels in zip(place, (44, 42, 42), strict=True):
                for pair in range(channels // 2):
                    angle = position * mpmath.mpf(10_000) ** (-mpmath.mpf(2 * pair) / channels)
                    wanted_cos.append(float(mpmath.cos(angle)))
                    wanted_sin.append(float(mpmath.sin(angle)))
    for got, wanted in ((cos, wanted_cos), (sin, wanted_sin)):
        error = (got.flatten().double() - torch.tensor(wanted, dtype=torch.float64)).abs().max()
        assert float(error) <= ROUNDED_ONCE[torch.float32]


def test_rotation_is_a_rotation():
    """Norms stay; a turn by p of q against a turn by p of k is no turn; a turn by 0 is the identity."""
    x = torch.randn(2, 72, 2, 128, generator=torch.Generator().manual_seed(0))
    cos, sin = rotary_tables(torch.tensor([[5, 6, 7], [1_000_000, 1_000_001, 1_000_002]]), MODEL, STREAM)
    turned = rotate(x, cos, sin)
    assert relative_error(rotate(turned, cos, -sin), x) <= ULP[torch.float32]
    assert relative_error(turned.norm(dim=-1), x.norm(dim=-1)) <= ULP[torch.float32]
    first = rotary_tables(torch.tensor([[0, 1, 2]]), MODEL, STREAM)
    assert torch.equal(first[0][:, 0], torch.ones(1, 64))
    assert torch.equal(first[1][:, 0], torch.zeros(1, 64))


def test_rows_have_their_own_positions():
    both = rotary_tables(torch.tensor([[0, 1, 2], [30, 31, 32]]), MODEL, STREAM)
    for row, first in enumerate((0, 30)):
        alone = rotary_tables(torch.tensor([[first, first + 1, first + 2]]), MODEL, STREAM)
        for table, other in zip(both, alone, strict=True):
            assert same_bytes(table[row], other[0])


@pytest.mark.parametrize("timestep", [0.0, 1.0, 625.0, 937.5, 1000.0])
def test_sinusoid_against_fifty_digits(timestep):
    got = sinusoid(torch.tensor([[timestep]]), 64)[0, 0].double()
    with mpmath.workdps(50):
        angles = [timestep * mpmath.mpf(10_000) ** (-mpmath.mpf(i) / 32) for i in range(32)]
        wanted = [float(f(a)) for f in (mpmath.cos, mpmath.sin) for a in angles]
    error = (got - torch.tensor(wanted, dtype=torch.float64)).abs().max()
    assert float(error) <= ROUNDED_ONCE[torch.float32]


def test_patchify_orders_channels_as_the_convolution_does():
    """A Linear over our patches is the checkpoint's Conv3d: token by token, in rows and columns."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(2, 16, 3, 8, 12, generator=generator),
        torch.randn(5, 16, 1, 2, 2, generator=generator),
    )
    wanted = F.conv3d(x.double(), weight.double(), stride=(1, 2, 2)).flatten(2).transpose(1, 2)
    got = F.linear(patchify(x).double(), weight.double().flatten(1))
    assert got.shape == (2, 72, 5)
    assert relative_error(got, wanted) <= REORDERED_SUM[torch.float64]


def test_unpatchify_undoes_patchify():
    """Up to the order of channels in a patch: (C, row, column) going in, (row, column, C) coming out."""
    x = torch.randn(2, 16, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    patches = patchify(x).unflatten(-1, (16, 4)).transpose(-1, -2).flatten(-2)
    assert torch.equal(unpatchify(patches, STREAM, 16), x)


def test_unpatchify_orders_pixels_as_diffusers_does():
    """diffusers: reshape to (B, F, rows, columns, 1, 2, 2, C), permute(0, 7, 1, 4, 2, 5, 3, 6)."""
    x = torch.randn(2, 72, 64, generator=torch.Generator().manual_seed(0))
    wanted = x.reshape(2, 3, 4, 6, 1, 2, 2, 16).permute(0, 7, 1, 4, 2, 5, 3, 6)
    assert torch.equal(unpatchify(x, STREAM, 16), wanted.flatten(6, 7).flatten(4, 5).flatten(2, 3))


@settings(max_examples=60)
@given(data=st.data(), chunk=st.integers(1, 4), sink=st.integers(0, 4), spare=st.integers(0, 4))
def test_token_index_properties(data, chunk, sink, spare):
    """Distinct, inside the row's own cache, and row, slot and token in order."""
    batch = data.draw(st.integers(1, 3))
    stream = StreamConfig(32, 48, chunk, sink, chunk + spare, batch)
    ring = Ring(sink, chunk + spare, chunk)
    slots = [ring.write_slots(data.draw(st.integers(0, 10**9))) for _ in range(batch)]
    index = token_index(torch.tensor(slots), stream)
    assert index.dtype == torch.int64
    assert index.tolist() == [
        row * stream.cache_tokens + slot * stream.frame_tokens + token
        for row in range(batch)
        for slot in slots[row]
        for token in range(stream.frame_tokens)
    ]
    assert len(set(index.tolist())) == batch * stream.chunk_tokens
    rows = index.view(batch, -1) // stream.cache_tokens
    assert torch.equal(rows, torch.arange(batch)[:, None].expand_as(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fill_bias(dtype):
    bias = fill_bias(torch.tensor([0, 3, 5]), 5, dtype)
    assert bias.shape == (3, 1, 1, 5)
    assert bias.dtype == dtype
    inf = float("inf")
    assert bias[:, 0, 0].tolist() == [[-inf] * 5, [0, 0, 0, -inf, -inf], [0] * 5]


@pytest.mark.parametrize("scheme", ["fp32", "fp4"])
def test_what_lies_behind_the_fill_is_never_seen(scheme):
    """Slots not yet valid may hold anything finite, as after a restarted row: outputs keep their bytes, no NaN."""
    config = small_config(2, 1, 4, batch=2, scheme=scheme, passes=1)
    weights, text = random_wan_weights(config.model), random_text(config.model, 2)
    clean, stale = EagerStream(config, weights, text), EagerStream(config, weights, text)
    for cache in stale.caches().values():
        # Codes 0x77 and scale 0x77 are large and finite in FP4; 1e4 is far above any key.
        cache.fill_(0x77 if cache.dtype == torch.uint8 else 1e4)
    for number in range(4):
        expected, found = (s.run_chunk([2 * number] * 2, [1, 2]) for s in (clean, stale))
        assert expected[0].velocity.isfinite().all()
        assert same_bytes(expected[0].velocity, found[0].velocity), number
        assert same_bytes(clean.buffers["latents"], stale.buffers["latents"])


def test_a_full_cache_needs_no_mask():
    """The block without a bias gives what the masked one gives, once every row is full."""
    config = small_config(2, 1, 4, passes=1)
    weights, text = random_wan_weights(config.model), random_text(config.model, 1)
    masked, full = EagerStream(config, weights, text), EagerStream(config, weights, text)
    unmasked = FlatModule(unmasked_block(config))
    for number in range(6):
        if 2 * number + 2 >= config.workload.stream.cache_frames:
            full.engines["block"] = unmasked
        expected, found = (s.run_chunk([2 * number], [1]) for s in (masked, full))
        assert relative_error(found[0].velocity, expected[0].velocity) <= STEP[torch.float32]
    assert full.engines["block"] is unmasked


WINDOW = ", window"  # positions within the window, and rings of two sizes
# Only the block depends on the cache format.
TRACED = [
    *[(name, "fp32", 2) for name in ("embed", "head", "prompt", "prompt_kv", "noise", "advance")],
    *[("block", "fp32", 1), ("block_full", "fp4", 2)],
    *[(name, f"fp32{WINDOW}", 2) for name in ("embed", "places_ring3", "block_ring3")],
    ("block", f"fp4{WINDOW}", 2),
    *[("block", scheme, 2) for scheme in ("int8", "fp32-int4-hadamard", "int4-fp8-sink")],
]


@pytest.mark.parametrize(("name", "scheme", "batch"), first_is_fast(TRACED, 6))
def test_every_piece_traces_and_equals_itself(name, scheme, batch):
    """It passes the check, and the traced module gives the eager piece's bytes, caches included."""
    config = small_config(3, 1, 6, batch=batch, scheme=scheme.removesuffix(WINDOW))
    stream = config.workload.stream
    if scheme.endswith(WINDOW):
        stream = dataclasses.replace(config.workload.stream, window_positions=True, layer_rings=(3, 6))
        config = config.changed(stream=stream)
        ring = 3 if name.endswith("ring3") else 6
        stream = dataclasses.replace(stream, ring_frames=ring, layer_rings=())
    piece = unmasked_block(config) if name == "block_full" else make_pieces(config)[name]
    program = trace(piece, "cpu")
    eager, traced = random_inputs(piece, stream), random_inputs(piece, stream)
    with torch.no_grad():
        wanted, got = FlatModule(piece)(*eager), program.module()(*traced)
    assert len(wanted) == len(got) == len(piece.outputs)
    for argument, expected, found in zip(piece.outputs, wanted, got, strict=True):
        assert tuple(expected.shape) == argument.shape, argument.name
        assert expected.dtype == argument.dtype, argument.name
        assert not expected.dtype.is_floating_point or expected.isfinite().all()
        assert same_bytes(expected, found), argument.name
    untouched = random_inputs(piece, stream)
    for argument, expected, found, before in zip(piece.signature, eager, traced, untouched, strict=True):
        assert same_bytes(expected, found), argument.name
        written = argument.name in piece.mutates and not argument.name.endswith("_sink")  # long full
        assert same_bytes(expected, before) == (not written), argument.name


def test_pieces_take_every_weight_once():
    """The signatures name each of the artifact's weights, and no piece names another's."""
    config = small_config(3, 1, 6)
    refs = [a.ref for piece in make_pieces(config).values() for a in piece.parameters]
    assert len(refs) == len(set(refs))


@pytest.mark.parametrize("scheme", ["bf16", "fp4"])
def test_the_pieces_of_a_gpu_build_keep_their_signatures(scheme):
    """In bfloat16, run on the CPU: outputs have the dtypes that the manifest will name, and are finite."""
    config = small_config(3, 1, 6, batch=2, scheme=scheme).changed(device="cuda")
    pieces = make_pieces(config)
    assert "block_full" in pieces
    for piece in pieces.values():
        with torch.no_grad():
            results = FlatModule(piece)(*random_inputs(piece, config.workload.stream))
        for argument, result in zip(piece.outputs, results, strict=True):
            assert (tuple(result.shape), result.dtype) == (argument.shape, argument.dtype), piece.name
            assert not result.dtype.is_floating_point or result.isfinite().all()
    assert pieces["block"].outputs[0].dtype == torch.bfloat16
    precise = {
        a.ref.removeprefix("weight:blocks.{layer}.")
        for a in pieces["block"].parameters
        if a.dtype == torch.float32
    }
    assert precise == {
        *("modulation", "norm3.weight", "norm3.bias"),
        *("self_attn.norm_q.weight", "self_attn.norm_k.weight", "cross_attn.norm_q.weight"),
    }


def unmasked_block(config) -> Piece:
    """Return the block that GPU builds use for full rows, for the CPU."""
    masked = make_pieces(config)["block"]
    with torch.device("meta"):
        module = Block(
            config.model, config.workload.stream, config.kv, config.target.dtype, masked=False
        ).eval()
    return Piece(
        EngineKey("block", variant=("full",)),
        module,
        masked.prefix,
        masked.layers,
        masked.inputs,
        masked.outputs,
        masked.mutates,
    )


def random_inputs(piece: Piece, stream: StreamConfig) -> list[torch.Tensor]:
    """Return seeded inputs of a piece that a stream could meet, row 1 in another place than row 0."""
    generator = torch.Generator().manual_seed(0)
    ring = Ring(stream.sink_frames, stream.ring_frames, stream.chunk_frames)
    firsts = [9, 3][: stream.batch]
    positions = {
        "frames": torch.tensor([[f + i for i in range(stream.chunk_frames)] for f in firsts]),
        "write_slots": torch.tensor([ring.write_slots(f) for f in firsts]),
        "valid_tokens": torch.tensor([ring.valid_frames(f) * stream.frame_tokens for f in firsts]),
    }
    positions["token_index"] = token_index(positions["write_slots"], stream)
    inputs = []
    for argument in piece.signature:
        if argument.name in positions:
            inputs.append(positions[argument.name].clone())
        elif argument.dtype == torch.int64:
            inputs.append(torch.randint(0, 99, argument.shape, generator=generator))
        elif argument.dtype == torch.uint8:  # below e4m3's NaN, in codes and scale bytes alike
            inputs.append(torch.randint(0, 0x70, argument.shape, generator=generator, dtype=torch.uint8))
        elif "global_scale" in argument.name:
            inputs.append(torch.full(argument.shape, 2.0**-6))
        else:
            inputs.append((torch.randn(argument.shape, generator=generator) * 0.1).to(argument.dtype))
    return inputs
