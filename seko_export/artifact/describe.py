"""The manifest of a build: every fact of the configs and pieces as the runtime reads it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, replace

import torch

from seko_export.artifact.manifest_json import least_version
from seko_export.backends.onnx_form.functional import functional_piece
from seko_export.config.build import BuildConfig
from seko_export.config.stream import VAE_TEMPORAL_STRIDE
from seko_export.engines.kernel_table import KERNEL_TABLE
from seko_export.engines.piece import Piece
from seko_export.families.wan.pieces import make_buffers, make_pieces, make_programs
from seko_export.host import environment
from seko_export.host.tensorrt_library import require_tensorrt
from seko_export.media.pieces import text_table, video_table
from seko_runtime.format.manifest import (
    EngineSpec,
    FileEntry,
    Golden,
    KvPool,
    Manifest,
    Pool,
    Schedule,
    Stream,
    Target,
    Weight,
)

COMPILER_CACHE = "engines/compiler.cache"
PASS_FILES = {"denoise": "denoise.onnx", "context": "context.onnx"}  # one whole pass in a file each
_EXTRA_FILES = {"compiler_cache": COMPILER_CACHE, "kernels": KERNEL_TABLE} | {
    f"onnx_{name}": file for name, file in PASS_FILES.items()
}
TENSORRT = "tensorrt"  # in `extra`: the version whose builder made the plans
FUNCTIONAL = ("onnx", "tensorrt")  # backends whose engines return what they write
_SUFFIXES = {
    "onnx": ".onnx",
    "tensorrt": ".plan",
}  # of engine files; the other backends' are torch's archives
_BF16_BITS = 16


def describe(
    config: BuildConfig,
    backend: str,
    weights: tuple[Weight, ...],
    files: Mapping[str, FileEntry],
    golden: Golden | None = None,
) -> Manifest:
    """Return the manifest of an artifact.

    Parameters
    ----------
    config : BuildConfig
        What was built.
    backend : str
        How its engines are packed.
    weights : tuple of Weight
        The table that `write_weights` gave.
    files : mapping of str to FileEntry
        Every file of the artifact.
    golden : Golden, optional
        What `verify` replays.

    Returns
    -------
    Manifest
    """
    pieces = make_pieces(config)
    if backend in FUNCTIONAL:
        pieces = {name: functional_piece(piece) for name, piece in pieces.items()}
    programs = make_programs(pieces)
    pool = None if config.pool is None else Pool(config.pool.buckets)
    device = torch.device(config.device)
    cpu = device.type == "cpu"
    target = environment.resolve_target("cpu" if cpu else "auto")
    manifest = Manifest(
        name=f"{config.model.name}-{config.kv_scheme}-{target.arch}",
        backend=backend,
        target=Target(
            device=target.device,
            arch=target.arch,
            torch=str(torch.__version__).split("+")[0],
            cuda=None if cpu else torch.version.cuda,
            # A GPU engine's host side is compiled for this processor too; `compile` compiles where it is opened.
            cpu_flags=environment.cpu_flags() if backend == "aoti" else (),
            host_arch=platform.machine(),
        ),
        producer=environment.producer(),
        model={
            **asdict(config.model),
            "head_dim": config.model.head_dim,
            "dtype": str(config.dtype).split(".")[1],
            **({} if config.text is None else {"text_encoder": asdict(config.text)}),
            **({} if config.vae is None else {"vae": asdict(config.vae)}),
        },
        stream=_stream(config),
        kv=kv_pool(config),
        schedule=_schedule(config),
        buffers=make_buffers(config),
        weights=weights,
        engines=tuple(engine_spec(piece, engine_suffix(backend)) for piece in pieces.values()),
        programs=programs,
        output="latents",
        golden=golden,
        text=text_table(config),
        video=video_table(config),
        pool=pool,
        files=dict(files),
        extra={key: file for key, file in _EXTRA_FILES.items() if file in files} | _versions(backend),
    )
    return replace(manifest, format_version=least_version(manifest))


def _versions(backend: str) -> dict[str, str]:
    """Return what an opener compares its own library with."""
    if backend != "tensorrt":
        return {}
    return {TENSORRT: require_tensorrt()}


def engine_suffix(backend: str) -> str:
    """Return what an engine file's name ends with."""
    return _SUFFIXES.get(backend, ".pt2")


def kv_pool(config: BuildConfig) -> KvPool:
    """Return the pool's size in its own format and in bf16."""
    model, stream = config.model, config.stream
    tokens = sum(len(kind.layers) * config.of_kind(kind).stream.cache_tokens for kind in config.kinds)
    numbers = 2 * config.slots * tokens * model.dim  # K and V
    if stream.pass_caches:
        numbers *= len(config.schedule.timesteps)
    return KvPool(
        scheme=config.kv.name,
        pool_bytes=sum(buffer.nbytes for buffer in make_buffers(config) if buffer.role == "cache"),
        bf16_pool_bytes=numbers * _BF16_BITS // 8,
        bits_per_number=config.kv.bits_per_number,
    )


def _stream(config: BuildConfig) -> Stream:
    stream = config.stream
    return Stream(
        batch=config.slots,
        chunk_frames=stream.chunk_frames,
        sink_frames=stream.sink_frames,
        ring_frames=stream.ring_frames,
        frame_tokens=stream.frame_tokens,
        latent_shape=(config.model.in_channels, stream.latent_height, stream.latent_width),
        height=stream.height,
        width=stream.width,
        video_frames_per_latent=VAE_TEMPORAL_STRIDE,
        fps=stream.fps,
        reference_frames=stream.reference_frames,
        rings={kind.name: kind.ring_frames for kind in config.kinds if kind.name},
    )


def _schedule(config: BuildConfig) -> Schedule:
    schedule = config.schedule
    return Schedule(
        denoise_passes=len(schedule.timesteps),
        timesteps=schedule.timesteps,
        sigmas=schedule.sigmas,
        context_timestep=schedule.context_timestep,
        sampler="renoise",
        shift=schedule.shift,
    )


def engine_spec(piece: Piece, suffix: str) -> EngineSpec:
    """Return what the manifest says of a piece's engine, whose file's name ends with ``suffix``."""
    return EngineSpec(
        name=piece.name,
        file=f"engines/{piece.name}{suffix}",
        inputs=tuple(a.spec for a in piece.signature),
        outputs=tuple(a.spec for a in piece.outputs),
        mutates=piece.mutates,
    )
