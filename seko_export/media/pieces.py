"""Engines around the transformer: the text encoder, and the VAE's decoder and encoder.

A build may have none, some or all of the engines around the transformer. Names of the weights of these engines begin
with `TEXT_WEIGHTS` or `VAE_WEIGHTS`. Buffers that the host writes or reads have names that the artifact's format fixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from seko_export.config.media import TOKENIZER_FILE, TextEncoderConfig, VaeConfig
from seko_export.config.stream import REBUILD
from seko_export.config.video import VideoBuild
from seko_export.engines.collectives import RANK_ARGUMENT
from seko_export.engines.key import EngineKey
from seko_export.engines.piece import Argument, Piece, dtype_name, on_meta, shared_on_meta
from seko_export.errors import UsageError
from seko_export.media.umt5.embedding import EMBEDDING_PARTS
from seko_export.media.umt5.encoder import EmbeddingPart, TextEnd, TextLayer, TextStart
from seko_export.media.vaes import vae_of
from seko_runtime.format.manifest import Buffer, Call
from seko_runtime.video.contract import (
    ENCODE_VIDEO,
    ENCODE_VIDEO_FIRST,
    IMAGE,
    IMAGE_LATENTS,
    PICTURE_AXIS,
    PICTURE_CHANNELS,
    TEXT_ENCODED,
    TEXT_IDS,
    VIDEO,
    VIDEO_FIRST,
    VIDEO_IN_FRAMES,
    VIDEO_IN_LATENTS,
)
from seko_runtime.video.manifest import DECODE_LATENTS, Text, Video

TEXT_WEIGHTS, VAE_WEIGHTS = "text.", "vae."
VAE_ENCODER_WEIGHTS = "vae_encoder."  # of a VAE that only encodes, as another one decodes
AUDIO_ENCODER = "hubert"  # module of a family that hears; its weights begin with it
IMAGE_ENCODER = "clip"  # the same of a family that sees a picture beside the text
# Roles. The text encoder is its start, the parts of an embedding on the host, a layer, and its end.
TEXT_START, TEXT_PART, TEXT_LAYER, TEXT_END = "text_start", "text_part", "text_layer", "text_end"
VAE_ENCODE, VAE_DECODE_FIRST, VAE_DECODE, VIDEO_ENCODE_FIRST, VIDEO_ENCODE = (
    "vae_encode",
    "vae_decode_first",
    "vae_decode",
    "video_encode_first",
    "video_encode",
)
_PROGRAMS = {
    "encode": VAE_ENCODE,
    "decode_first": VAE_DECODE_FIRST,
    "decode": VAE_DECODE,
    ENCODE_VIDEO_FIRST: VIDEO_ENCODE_FIRST,
    ENCODE_VIDEO: VIDEO_ENCODE,
}  # program -> the one piece that it calls


def media_pieces(config: VideoBuild) -> list[Piece]:
    """Return the engines of text encoder and VAE, as far as the build has them; UsageError if a VAE that encodes is
    missing without which the model makes no video, or a chunk's frame that it encodes would not be kept."""
    if config.workload.stream.context == REBUILD and config.workload.encoding_vae is None:
        raise UsageError(
            f"--context {REBUILD}: the first frame of each chunk's context is a video frame that the VAE encodes "
            "again; give a --vae that encodes, or --vae-encoder beside one that only decodes"
        )
    if config.workload.stream.context == REBUILD and (parts := decode_parts(config)) > 1:
        raise UsageError(
            f"--context {REBUILD} encodes a frame of the chunk's first latent frame again, and of {parts} parts in "
            "which the chunk is decoded only the last is kept: leave out --decode-frames, or make smaller video"
        )
    pieces = [] if config.workload.text is None else _text_pieces(config, config.workload.text)
    pieces += [] if config.workload.vae is None else _vae_pieces(config, config.workload.vae)
    return pieces if config.workload.stream.strength is None else pieces + _video_encoders(config)


def media_programs(pieces: Mapping[EngineKey, Piece]) -> dict[str, tuple[Call, ...]]:
    """Return the programs of the text encoder and the VAE, as far as the build has their engines."""
    programs = {
        program: pieces[EngineKey(role)].calls()
        for program, role in _PROGRAMS.items()
        if EngineKey(role) in pieces
    }
    if EngineKey(TEXT_END) in pieces:
        roles = [EngineKey(role) for role in (TEXT_START, TEXT_PART, TEXT_LAYER, TEXT_END)]
        programs["text"] = tuple(call for key in roles if key in pieces for call in pieces[key].calls())
    return programs


def decode_parts(config: VideoBuild) -> int:
    """Return the number of equal parts in which a chunk is decoded, with an engine call for each; 1 without a VAE."""
    s, vae = config.workload.stream, config.workload.vae
    if vae is None:
        return 1
    cells = s.latent_height // config.decode_ranks, s.latent_width
    least = vae.decode_parts(s.chunk_frames, *cells, config.target.dtype.itemsize)
    most = config.target.decode_frames or s.chunk_frames
    counts = (parts for parts in range(least, s.chunk_frames + 1) if s.chunk_frames % parts == 0)
    return next(parts for parts in counts if s.chunk_frames // parts <= most or parts == s.chunk_frames)


def media_buffers(config: VideoBuild) -> tuple[Buffer, ...]:
    """Return the buffers of the text encoder's and the VAE's engines."""
    m, s, dtype = config.model, config.workload.stream, dtype_name(config.target.dtype)
    buffers = []
    if config.workload.text is not None:
        buffers += [
            Buffer(TEXT_IDS, (1, m.text_tokens), "int64", "session"),
            Buffer(TEXT_ENCODED, (1, m.text_tokens, m.text_dim), dtype, "session"),
        ]
    if config.workload.vae is not None:
        picture, length = (s.height, s.width, PICTURE_CHANNELS), s.chunk_frames // decode_parts(config)
        first, later = (config.workload.vae.video_frames(length, first=first) for first in (True, False))
        ranks = config.decode_ranks
        decoded, share = (s.height // ranks, *picture[1:]), PICTURE_AXIS if ranks > 1 else 0
        if config.workload.encoding_vae is not None:
            buffers += [
                Buffer(IMAGE, picture, "uint8", "session"),
                Buffer(IMAGE_LATENTS, _latent_shape(config, 1), "float32", "session"),
            ]
        buffers += [
            Buffer(DECODE_LATENTS, (config.workload.rows, *_latent_shape(config, length)), "float32", "lane"),
            *(
                Buffer(_cache_name(slot), (config.workload.rows, *shape), dtype, "lane", rank_axis=share)
                for slot, shape in enumerate(_cache_shapes(config, config.workload.vae))
            ),
            Buffer(
                VIDEO_FIRST,
                (config.workload.rows, first, *decoded),
                "uint8",
                "lane",
                rank_axis=share,
            ),
            Buffer(
                VIDEO,
                (config.workload.rows, later, *decoded),
                "uint8",
                "lane",
                rank_axis=share,
            ),
        ]
    if s.strength is not None:
        buffers += [
            Buffer(VIDEO_IN_FRAMES, (config.workload.state_rows, *taken_frames(config)), "uint8", "session"),
            Buffer(
                VIDEO_IN_LATENTS,
                (config.workload.state_rows, *_latent_shape(config, s.chunk_frames)),
                "float32",
                "session",
            ),
            *(
                Buffer(_video_cache(slot), (config.workload.rows, *shape), dtype, "lane")
                for slot, shape in enumerate(_video_cache_shapes(config))
            ),
        ]
    return tuple(buffers)


def encoder_weights(config: VideoBuild) -> str:
    """Return the name prefix of the weights of the VAE that encodes pictures."""
    return VAE_WEIGHTS if config.workload.vae_encoder is None else VAE_ENCODER_WEIGHTS


def text_table(config: VideoBuild) -> Text | None:
    """Return the manifest's table about prompts: the tokenizer and the limits of a prompt."""
    if config.workload.text is None:
        return None
    return Text(
        TOKENIZER_FILE,
        config.model.text_tokens,
        config.workload.text.pad_id,
        config.workload.text.truncate,
    )


def video_table(config: VideoBuild) -> Video | None:
    """Return the manifest's table about decoded pictures: their number and size."""
    if config.workload.vae is None:
        return None
    s = config.workload.stream
    first, later = (config.workload.vae.video_frames(s.chunk_frames, first=first) for first in (True, False))
    return Video(first, later, s.height, s.width, config.workload.vae.title)


def _text_pieces(config: VideoBuild, text: TextEncoderConfig) -> list[Piece]:
    """Return the engines of the text encoder: a layer is compiled once, and called for each of the layers."""
    dtype, offloaded, i64 = config.target.dtype, config.target.offload_text, torch.int64
    shape, tokens = (1, config.model.text_tokens), config.model.text_tokens
    ids = Argument("ids", f"buffer:{TEXT_IDS}", shape, i64)
    hidden = Argument("hidden", "value:text_hidden", (*shape, text.dim), dtype)
    bucket = Argument("bucket", "value:text_bucket", (tokens, tokens), i64)
    mask = Argument("mask", "value:text_mask", (1, 1, 1, tokens), torch.float32)
    left = Argument("ids", "value:text_ids", shape, i64)  # counted from the first row of the next part
    encoded = Argument("encoded", f"buffer:{TEXT_ENCODED}", (*shape, config.model.text_dim), dtype)

    def piece(
        role: str,
        make: partial[Any],
        prefix: str,
        layers: int,
        inputs: tuple[Argument, ...],
        outputs: tuple[Argument, ...],
    ) -> Piece:
        key = EngineKey(role)
        on_host = offloaded and layers > 0
        made = (key, shared_on_meta(make), f"{TEXT_WEIGHTS}{prefix}", layers, inputs, outputs)
        return Piece(*made, recorded=False, on_host=on_host)

    start = partial(TextStart, text, dtype, embeds=not offloaded)
    pieces = [
        piece(TEXT_START, start, "", 0, (ids,), (hidden, bucket, mask, *((left,) if offloaded else ()))),
        piece(TEXT_LAYER, partial(TextLayer, text, dtype), "blocks.{layer}.", text.layers,
              (replace(hidden, name="x"), bucket, mask), (hidden,)),
        piece(TEXT_END, partial(TextEnd, text, dtype), "", 0, (hidden, ids), (encoded,)),
    ]  # fmt: skip
    if offloaded:
        part, prefix = partial(EmbeddingPart, text, dtype), f"{EMBEDDING_PARTS}{{layer}}."
        pieces.append(piece(TEXT_PART, part, prefix, text.embedding_parts, (hidden, left), (hidden, left)))
    return pieces


def vae_module(
    config: VideoBuild, vae: VaeConfig, make: partial[Any], inputs: Sequence[Argument]
) -> nn.Module:
    """Return a module of the VAE on the meta device. If the build uses Seko's convolutions
    (`TargetConfig.convolutions`), they replace those of torch's convolutions that were measured to be slower.

    Builds whose modules are the same share one module, which is made and counted once, and never changed.

    Parameters
    ----------
    config : VideoBuild
        The build.
    vae : VaeConfig
        The VAE of which the module is a part.
    make : partial
        A method of the VAE that creates the module, with all its arguments.
    inputs : sequence of Argument
        The inputs of the module, whose sizes determine the convolutions.
    """
    options = tuple(sorted(make.keywords.items()))
    sizes = tuple((a.shape, a.dtype) for a in inputs)
    return shared_vae_module(vae, make.func, make.args, options, config.target.convolutions, sizes)


@lru_cache(maxsize=32)
def shared_vae_module(
    vae: VaeConfig,
    method: Callable[..., nn.Module],
    arguments: tuple[Any, ...],
    options: tuple[tuple[str, Any], ...],
    arch: str,
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...],
) -> nn.Module:
    """Return the module of `vae_module`; the tables of measured convolutions do not change in a process."""
    module = on_meta(partial(method, *arguments, **dict(options)))
    if arch:
        examples = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in inputs]
        vae_of(vae).use_own_convolutions(module, examples, arch)
    return module


def _vae_pieces(config: VideoBuild, vae: VaeConfig) -> list[Piece]:
    s, dtype, kind = config.workload.stream, config.target.dtype, vae_of(vae)
    picture = (s.height, s.width, PICTURE_CHANNELS)
    length = s.chunk_frames // decode_parts(config)  # latent frames of a call
    latents = Argument(
        "latents", f"buffer:{DECODE_LATENTS}[row]", _latent_shape(config, length), torch.float32
    )
    caches = tuple(
        Argument(f"caches.{slot:02d}", f"buffer:{_cache_name(slot)}[row]", shape, dtype)
        for slot, shape in enumerate(_cache_shapes(config, vae))
    )
    ranks = config.decode_ranks
    rank = (RANK_ARGUMENT,) if ranks > 1 else ()
    method = partial(kind.shared_decoder, ranks=ranks) if ranks > 1 else kind.decoder

    def decode(role: str, video: str, *, first: bool) -> Piece:
        frames = vae.video_frames(length, first=first)
        decoded = (frames, s.height // ranks, *picture[1:])
        pictures = Argument("video", f"buffer:{video}[row]", decoded, torch.uint8)
        inputs = (latents, *rank, *(() if first else caches))
        make = partial(method, vae, first=first, frames=length, dtype=dtype)
        module = vae_module(config, vae, make, inputs)
        return Piece(
            EngineKey(role),
            module,
            VAE_WEIGHTS,
            0,
            inputs,
            (pictures, *caches),
            positional=True,
            large=True,
            recorded=False,
        )

    pieces = [
        decode(VAE_DECODE_FIRST, VIDEO_FIRST, first=True),
        decode(VAE_DECODE, VIDEO, first=False),
    ]
    encoding = config.workload.encoding_vae
    if encoding is None:
        return pieces
    image = (Argument("image", f"buffer:{IMAGE}", picture, torch.uint8),)
    encode = Piece(
        EngineKey(VAE_ENCODE),
        vae_module(config, encoding, partial(vae_of(encoding).encoder, encoding, dtype=dtype), image),
        encoder_weights(config),
        0,
        image,
        (Argument("latents", f"buffer:{IMAGE_LATENTS}", _latent_shape(config, 1), torch.float32),),
        positional=True,
        large=True,
        recorded=False,
    )
    return [*pieces, encode]


def _video_encoders(config: VideoBuild) -> list[Piece]:
    """Return the engines that encode a chunk of input video: the first one of a stream, and later ones."""
    vae, s, dtype = _video_vae(config), config.workload.stream, config.target.dtype
    video = Argument("video", f"buffer:{VIDEO_IN_FRAMES}[row]", taken_frames(config), torch.uint8)
    latents = Argument(
        "latents", f"buffer:{VIDEO_IN_LATENTS}[row]", _latent_shape(config, s.chunk_frames), torch.float32
    )
    caches = tuple(
        Argument(f"caches.{slot:02d}", f"buffer:{_video_cache(slot)}[row]", shape, dtype)
        for slot, shape in enumerate(_video_cache_shapes(config))
    )
    pieces = []
    for role, first in ((VIDEO_ENCODE_FIRST, True), (VIDEO_ENCODE, False)):
        inputs = (video, *(() if first else caches))
        make = partial(
            vae_of(vae).video_encoder,
            vae,
            first=first,
            frames=s.chunk_frames,
            dtype=dtype,
            normalised=not s.motion_strength,
        )
        piece = Piece(
            EngineKey(role),
            vae_module(config, vae, make, inputs),
            VAE_WEIGHTS if vae is config.workload.vae else VAE_ENCODER_WEIGHTS,
            0,
            inputs,
            (latents, *caches),
            positional=True,
            large=True,
            recorded=False,
        )
        pieces.append(piece)
    return pieces


def _video_vae(config: VideoBuild) -> VaeConfig:
    """Return the VAE that encodes input video; UsageError if the build has none."""
    vae = config.workload.video_vae
    if vae is None:
        titles = [vae.title for vae in config.workload.vaes]
        what = (
            f"a {' and a '.join(titles)} encodes no video" if titles else "this build has no VAE that encodes"
        )
        raise UsageError(
            f"--strength {config.workload.stream.strength}: {what}; give a --vae that does, or --vae-encoder beside "
            "one that only decodes"
        )
    return vae


def taken_frames(config: VideoBuild) -> tuple[int, int, int, int]:
    """Return the shape [T, H, W, 3] of the frames of input video of one row's chunk."""
    s = config.workload.stream
    return (s.chunk_frames * s.temporal_stride, s.height, s.width, PICTURE_CHANNELS)


def _video_cache_shapes(config: VideoBuild) -> list[tuple[int, ...]]:
    """Return the shape of each cache of one row's encoder of input video."""
    vae, s = _video_vae(config), config.workload.stream
    return vae_of(vae).encoder_cache_shapes(vae, s.latent_height, s.latent_width)


def _video_cache(slot: int) -> str:
    return f"video_in.cache.{slot:02d}"


def _latent_shape(config: VideoBuild, frames: int) -> tuple[int, int, int, int]:
    """Return the shape of the latents of one row."""
    s = config.workload.stream
    return (config.model.out_channels, frames, s.latent_height, s.latent_width)


def _cache_shapes(config: VideoBuild, vae: VaeConfig) -> list[tuple[int, ...]]:
    """Return the shape of each cache of one row, on one rank."""
    height, width = config.workload.stream.latent_height, config.workload.stream.latent_width
    return vae_of(vae).cache_shapes(vae, height // config.decode_ranks, width)


def _cache_name(slot: int) -> str:
    return f"vae.cache.{slot:02d}"
