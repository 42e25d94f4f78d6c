"""Makes the manifest of a build from its configuration and its engines."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict

import torch

from seko_export.backends.base import ExportBackend
from seko_export.backends.onnx_form.functional import functional_graph
from seko_export.config.video import VideoBuild
from seko_export.engines.kernel_table import KERNEL_TABLE
from seko_export.engines.piece import engine_spec
from seko_export.families.registry import graph_of
from seko_export.host import environment
from seko_export.media.pieces import text_table, video_table
from seko_runtime.format.manifest import GPU_SEPARATOR, FileEntry, Pool, Target, Weight
from seko_runtime.video.manifest import (
    KIND,
    Golden,
    KvPool,
    Schedule,
    Stream,
    VideoManifest,
    VideoWorkload,
)

_BF16_BITS = 16


def describe(
    config: VideoBuild,
    backend: ExportBackend,
    weights: tuple[Weight, ...],
    files: Mapping[str, FileEntry],
    golden: Golden | None = None,
) -> VideoManifest:
    """Return the manifest of an artifact.

    Parameters
    ----------
    config : VideoBuild
        What was built.
    backend : ExportBackend
        The backend that made its engines.
    weights : tuple of Weight
        The table returned by `write_weights`.
    files : mapping of str to FileEntry
        Every file of the artifact.
    golden : Golden, optional
        The recorded chunks that `verify` replays.

    Returns
    -------
    VideoManifest
    """
    graph = graph_of(config)
    if backend.functional:
        graph = functional_graph(graph)
    extra_files = {"kernels": KERNEL_TABLE, **backend.extra_files}
    pool = None if config.workload.pool is None else Pool(config.workload.pool.buckets)
    device = torch.device(config.target.device)
    cpu = device.type == "cpu"
    target = (
        environment.Target(config.target.device, GPU_SEPARATOR.join(config.target.archs))
        if config.target.archs
        else environment.resolve_target("cpu" if cpu else "auto")
    )
    return VideoManifest(
        name=f"{config.model.name}-{config.workload.kv_scheme}-{target.arch}",
        backend=backend.name,
        target=Target(
            device=target.device,
            arch=target.arch,
            torch=str(torch.__version__).split("+")[0],
            cuda=None if cpu else torch.version.cuda,
            cpu_flags=environment.cpu_flags() if backend.fits_one_cpu else (),
            host_arch=platform.machine(),
        ),
        producer=environment.producer(),
        model={
            **asdict(config.model),
            "head_dim": config.model.head_dim,
            "dtype": str(config.target.dtype).split(".")[1],
            **({} if config.workload.text is None else {"text_encoder": asdict(config.workload.text)}),
            **({} if config.workload.vae is None else {"vae": asdict(config.workload.vae)}),
            **({} if config.workload.audio is None else {"audio_encoder": asdict(config.workload.audio)}),
            **({} if config.workload.image is None else {"image_encoder": asdict(config.workload.image)}),
        },
        workload=VideoWorkload(
            kind=KIND,
            stream=_stream(config),
            kv=kv_pool(config),
            schedule=_schedule(config),
            output="latents",
            golden=golden,
            text=text_table(config),
            video=video_table(config),
        ),
        state_rows=config.workload.state_rows,
        buffers=graph.buffers,
        weights=weights,
        engines=tuple(engine_spec(piece, backend.suffix) for piece in graph.pieces.values()),
        programs=graph.programs,
        pool=pool,
        ranks=config.target.ranks,
        inputs=graph.inputs,
        files=dict(files),
        extra={key: file for key, file in extra_files.items() if file in files} | backend.versions(config),
    )


def kv_pool(config: VideoBuild) -> KvPool:
    """Return the size of the KV pool in bytes, in the build's own format and in bf16."""
    model = config.model
    tokens = sum(
        len(group.layers) * config.of_layer_group(group).workload.stream.cache_tokens
        for group in config.layer_groups
    )
    held = config.workload.state_rows * config.workload.cache_passes
    numbers = 2 * held * tokens * model.dim // config.target.ranks  # K and V
    return KvPool(
        scheme=config.kv.name,
        pool_bytes=sum(buffer.nbytes for buffer in graph_of(config).buffers if buffer.role == "cache"),
        bf16_pool_bytes=numbers * _BF16_BITS // 8,
        bits_per_number=config.kv.bits_per_number,
    )


def _stream(config: VideoBuild) -> Stream:
    stream = config.workload.stream
    return Stream(
        chunk_frames=stream.chunk_frames,
        sink_frames=stream.sink_frames,
        ring_frames=stream.ring_frames,
        frame_tokens=stream.frame_tokens,
        latent_shape=(config.model.out_channels, stream.latent_height, stream.latent_width),
        height=stream.height,
        width=stream.width,
        video_frames_per_latent=stream.temporal_stride,
        fps=stream.fps,
        reference_frames=stream.reference_frames,
        rings={group.name: group.ring_frames for group in config.layer_groups if group.name},
    )


def _schedule(config: VideoBuild) -> Schedule:
    schedule = config.workload.schedule
    return Schedule(
        denoise_passes=len(schedule.timesteps),
        timesteps=schedule.timesteps,
        sigmas=schedule.sigmas,
        context_timestep=schedule.context_timestep,
        sampler=schedule.sampler,
        shift=schedule.shift,
    )
