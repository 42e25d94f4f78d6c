"""Pieces of text encoder and VAE: what they take and give, traced and eager; what does not fit is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from seko_export.backends.compile import export_piece
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import FlatModule, Piece
from seko_export.errors import UsageError
from seko_export.families.layers.pieces import make_buffers, make_pieces, make_programs
from seko_export.families.wan.presets import PRESETS
from seko_export.lowering.agree import random_inputs
from seko_export.lowering.trace import trace
from seko_export.media.umt5.embedding import WithEmbeddingParts
from seko_export.media.umt5.encoder import TextEncoder
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.media.wan_vae.modules import VaeDecode, VaeEncode
from seko_export.video.recording import encoded_text
from tests.export.media_files import TEXT, VAE
from tests.truth.eager_stream import same_bytes

TINY = PRESETS["tiny"].model
STREAM = StreamConfig(32, 48, chunk_frames=3, sink_frames=1, ring_frames=6, batch=2)
CONFIG = VideoBuild(
    TINY, VideoConfig(STREAM, Schedule.warped(), "fp32", text=TEXT, vae=VAE), TargetConfig("cpu")
)
ON_HOST = CONFIG.changed(offload_text=True)
TEXT_PIECES = ("text_start", "text_layer", "text_end")
MEDIA = ("vae_encode", "vae_decode_first", "vae_decode")
PIECES = dict.fromkeys((*TEXT_PIECES, *MEDIA), CONFIG) | {
    "text_part": ON_HOST,
    "text_start of parts": ON_HOST,
}


def by_name(piece: Piece, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip((a.name for a in piece.signature), inputs, strict=True))


def module_with(kind, piece: Piece, inputs: list[torch.Tensor], **options):
    """The plain module with a piece's weights."""
    module = kind(VAE, **options).eval().requires_grad_(False)
    weights = {
        name.removeprefix("weights."): tensor
        for name, tensor in by_name(piece, inputs).items()
        if name.startswith("weights.")
    }
    module.load_state_dict(weights)
    return module


@pytest.mark.parametrize("name", PIECES)
def test_every_piece_traces_and_equals_itself(name):
    """Static, without constants, nothing written; the traced module gives the eager piece's bytes."""
    piece = make_pieces(PIECES[name])[name.split()[0]]
    program = trace(piece, "cpu")
    assert not program.constants
    assert not program.graph_signature.user_inputs_to_mutate
    inputs, untouched = random_inputs(piece, "cpu"), random_inputs(piece, "cpu")
    with torch.no_grad():
        wanted, got = FlatModule(piece)(*inputs), program.module()(*inputs)
    assert len(wanted) == len(got) == len(piece.outputs)
    for argument, expected, found in zip(piece.outputs, wanted, got, strict=True):
        assert tuple(expected.shape) == argument.shape, argument.name
        assert expected.dtype == argument.dtype, argument.name
        assert expected.is_contiguous(), argument.name
        assert same_bytes(expected, found), argument.name
    assert all(map(same_bytes, inputs, untouched))


@pytest.mark.parametrize("first", [True, False])
def test_decoding_gives_the_vaes_pictures_rounded(first):
    """One row's call is the module's; -1..1 becomes the nearest of 256 levels; red stays red."""
    piece = make_pieces(CONFIG)["vae_decode_first" if first else "vae_decode"]
    inputs = random_inputs(piece, "cpu")
    named = by_name(piece, inputs)
    caches = [tensor[None] for name, tensor in named.items() if name.startswith("caches.")]
    half = module_with(VaeDecode, piece, inputs, first=first, frames=3)
    video, *caches_after = half(named["latents"][None], *caches)
    with torch.no_grad():
        got, *carried = FlatModule(piece)(*inputs)
    assert got.shape == (9 if first else 12, 32, 48, 3)
    wanted = ((video[0].double() + 1) * 127.5).permute(1, 2, 3, 0)
    assert (got.double() - wanted).abs().max() <= 0.5 + 1e-4  # a half rounds either way in float32
    assert got.unique().numel() > 100
    assert all(same_bytes(cache, other[0]) for cache, other in zip(carried, caches_after, strict=True))


def test_encoding_a_picture_is_the_vaes_first_frame():
    piece = make_pieces(CONFIG)["vae_encode"]
    inputs = random_inputs(piece, "cpu")
    image = by_name(piece, inputs)["image"]
    half = module_with(VaeEncode, piece, inputs, first=True, frames=1)
    video = image.permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
    with torch.no_grad():
        (got,) = FlatModule(piece)(*inputs)
    assert got.shape == (16, 1, 4, 6)
    assert torch.equal(got, half(video)[0][0])


@pytest.mark.parametrize("config", [CONFIG, ON_HOST], ids=["on the device", "on the host"])
def test_the_engines_of_the_text_are_the_encoder(config):
    """One prompt, with tokens at both ends of each part of the embedding, and padding behind."""
    encoder = TextEncoder(TEXT).requires_grad_(False)
    random = torch.Generator().manual_seed(3)
    for parameter in encoder.parameters():
        parameter.normal_(0, 0.5, generator=random)
    own = WithEmbeddingParts(encoder.state_dict(), TEXT)
    text = {name: p for name, p in make_pieces(config).items() if name.startswith("text_")}
    weights = {name: own[name.removeprefix("text.")] for piece in text.values() for name in piece.weights}
    part = TEXT.vocab_size // TEXT.embedding_parts
    ends = [row for first in range(0, TEXT.vocab_size, part) for row in (first, first + part - 1)]
    ids = torch.full((1, TINY.text_tokens), TEXT.pad_id)
    wanted = [row for row in ends if row != TEXT.pad_id][: TINY.text_tokens - 1]
    ids[0, : len(wanted)] = torch.tensor(wanted)
    with torch.no_grad():
        expected = encoder(ids).expand(2, -1, -1)
    assert same_bytes(encoded_text(config, weights, ids), expected)
    on_host = {name for piece in text.values() if piece.on_host for name in piece.weights}
    assert bool(on_host) == config.target.offload_text
    assert not on_host or weights.keys() - on_host == {"text.norm.weight"}


def test_a_gpu_build_computes_in_bfloat16():
    """Run on the CPU: the signatures' dtypes are what comes out; statistics and latents stay float32."""
    config = CONFIG.changed(device="cuda", kv_scheme="bf16")
    for name in (*TEXT_PIECES, *MEDIA):
        piece = make_pieces(config)[name]
        precise = {a.name for a in piece.parameters if a.dtype != torch.bfloat16}
        assert precise == ({"weights.latents_mean", "weights.latents_std"} if name in MEDIA else set())
        with torch.no_grad():
            results = FlatModule(piece)(*random_inputs(piece, "cpu"))
        for argument, result in zip(piece.outputs, results, strict=True):
            assert (tuple(result.shape), result.dtype) == (argument.shape, argument.dtype), name


def test_tables_hold_what_the_engines_take():
    """Every buffer that a call names has its shape, a row of it where [row] stands; nothing but the format's roles."""
    buffers = {b.name: b for b in make_buffers(CONFIG)}
    pieces = make_pieces(CONFIG)
    programs = make_programs(pieces, CONFIG.workload.stream)
    assert {"text", "encode", "decode_first", "decode"} < set(programs)
    for name in MEDIA:
        for argument in (*pieces[name].inputs, *pieces[name].outputs):
            kind, ref = argument.ref.split(":")
            assert kind == "buffer"
            buffer = buffers[ref.removesuffix("[row]")]
            by_row = ref.endswith("[row]")
            assert buffer.role == ("lane" if name.startswith("vae_decode") else "session")
            assert by_row == (buffer.role == "lane")
            assert buffer.shape == ((2, *argument.shape) if by_row else argument.shape)
            assert buffer.dtype == str(argument.dtype).removeprefix("torch.")
    pool = [b.nbytes for b in make_buffers(CONFIG) if b.role == "cache"]
    plain = CONFIG.changed(text=None, vae=None)
    assert sum(pool) == sum(b.nbytes for b in make_buffers(plain) if b.role == "cache")
    assert {b.role for b in make_buffers(plain)} == {"cache", "session", "host", "state"}
    assert set(make_programs(make_pieces(plain), plain.workload.stream)) == {
        "prompt",
        "begin",
        "denoise",
        "context",
    }


def test_caches_of_the_full_vae():
    """32 slots at 480x832; 1801 MiB in bfloat16, a row."""
    big = PRESETS["self-forcing-1.3b"]
    config = VideoBuild(
        big.model,
        VideoConfig(big.stream, Schedule.warped(), "bf16", vae=WanVaeConfig()),
        TargetConfig("cuda"),
    )
    caches = [b for b in make_buffers(config) if b.name.startswith("vae.cache.")]
    assert [b.name for b in caches][::31] == ["vae.cache.00", "vae.cache.31"]
    assert sum(math.prod(b.shape) for b in caches) == 944_286_720


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": dataclasses.replace(TEXT, dim=32)}, ["32 wide", "takes 64"]),
        (
            {"vae": WanVaeConfig(z_dim=4, base_dim=4, latents_mean=(0.0,) * 4, latents_std=(1.0,) * 4)},
            ["4 latent channels", "gives 16"],
        ),
        (
            {"vae": WanVaeConfig(base_dim=4, dim_mult=(1, 2, 4), temporal_downsample=(True, True))},
            ["strides are 4 pixels and 4 frames", "expected 8 and 4"],
        ),
    ],
)
def test_parts_of_other_models_are_refused(change, words):
    with pytest.raises(UsageError) as raised:
        CONFIG.changed(**change)
    for word in words:
        assert word in str(raised.value)


def test_the_backend_compile_traces_what_it_saved(tmp_path):
    """`torch.compile` takes the whole graph; it refused comparisons of dtypes, whose results nothing used."""
    piece = make_pieces(CONFIG)["vae_decode"]
    export_piece(CONFIG, piece, tmp_path / "piece.pt2")
    run = torch.export.load(tmp_path / "piece.pt2").module(check_guards=False)
    inputs, untouched = random_inputs(piece, "cpu"), random_inputs(piece, "cpu")
    with torch.no_grad():
        got = torch.compile(run, fullgraph=True, backend="eager")(*inputs)
        wanted = FlatModule(piece)(*untouched)
    assert all(same_bytes(*pair) for pair in zip(got, wanted, strict=True))
