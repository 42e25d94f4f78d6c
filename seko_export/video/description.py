"""The object ``workload`` in the manifest of a video build."""

from __future__ import annotations

from seko_export.config.stream import REBUILD
from seko_export.config.video import VideoBuild
from seko_export.families.registry import graph_of
from seko_export.media.pieces import text_table, video_table
from seko_runtime.format.manifest import KvPool
from seko_runtime.video.manifest import KIND, Golden, Schedule, Stream, VideoWorkload
from seko_runtime.video.schedule import sigmas_of

_BF16_BITS = 16


def video_workload(config: VideoBuild, golden: Golden | None = None) -> VideoWorkload:
    """Return the object ``workload`` of a video manifest; ``golden`` is the description of the recorded chunks."""
    return VideoWorkload(
        kind=KIND,
        stream=stream_table(config),
        kv=kv_pool(config),
        schedule=schedule_table(config),
        output="latents",
        golden=golden,
        text=text_table(config),
        video=video_table(config),
        viewer=config.workload.viewer,
    )


def kv_pool(config: VideoBuild) -> KvPool:
    """Return the size of the KV cache in bytes, in the build's format and in bf16."""
    model = config.model
    tokens = sum(
        len(group.layers) * config.of_layer_group(group).workload.stream.cache_tokens
        for group in config.layer_groups
    )
    cache_rows = config.workload.state_rows * config.workload.cache_passes
    numbers = 2 * cache_rows * tokens * model.dim // config.target.ranks  # K and V
    return KvPool(
        scheme=config.kv.name,
        pool_bytes=sum(buffer.nbytes for buffer in graph_of(config).buffers if buffer.role == "cache"),
        bf16_pool_bytes=numbers * _BF16_BITS // 8,
        bits_per_number=config.kv.bits_per_number,
    )


def stream_table(config: VideoBuild) -> Stream:
    """Return the layout of the stream for the manifest."""
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
        rebuilt=stream.context == REBUILD,
        rings={group.name: group.ring_frames for group in config.layer_groups if group.name},
    )


def schedule_table(config: VideoBuild) -> Schedule:
    """Return the manifest's description of the passes of a chunk."""
    schedule = config.workload.schedule
    return Schedule(
        denoise_passes=len(schedule.timesteps),
        timesteps=schedule.timesteps,
        sigmas=schedule.sigmas,
        context_timestep=schedule.context_timestep,
        sampler=schedule.sampler,
        shift=schedule.shift,
        first_timesteps=schedule.first_timesteps,
        first_sigmas=schedule.first_sigmas or sigmas_of(schedule.first_timesteps),
        scaled_passes=schedule.scaled_passes(config.workload.stream),
        chunks_at_once=config.workload.chunks_at_once,
    )
