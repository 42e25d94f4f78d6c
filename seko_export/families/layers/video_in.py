"""The inputs of a model whose chunks start from an input video, and its control."""

from __future__ import annotations

import torch
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.engines.piece import Argument
from seko_export.media.pieces import taken_frames
from seko_runtime.controls.strengths import VideoInParameters
from seko_runtime.controls.video_in import (
    FRAMES_KIND,
    STRENGTH_KIND,
    TIMES_KIND,
    VideoInControl,
)
from seko_runtime.format.manifest import Buffer, ControlSpec, InputSpec
from seko_runtime.video.contract import VIDEO_IN_FRAMES, VIDEO_IN_LATENTS

VIDEO, STRENGTH, TIME_SCALE = "video", "strength", "time_scale"  # names of the inputs


def video_inputs(config: VideoBuild) -> tuple[InputSpec, ...]:
    """Return the inputs per chunk: frames uint8 [T, H, W, 3], the share of noise in the first latents [1], and the
    factors [2] by which times and noise levels of the passes are scaled; empty for a build without input video."""
    s = config.workload.stream
    if s.strength is None:
        return ()
    return (
        InputSpec(VIDEO, taken_frames(config), "uint8", VIDEO_IN_FRAMES, "chunk", kind=FRAMES_KIND),
        InputSpec(STRENGTH, (1,), "float32", f"input.{STRENGTH}", "chunk", kind=STRENGTH_KIND),
        InputSpec(TIME_SCALE, (2,), "float32", f"input.{TIME_SCALE}", "chunk", kind=TIMES_KIND),
    )


def video_buffers(config: VideoBuild) -> list[Buffer]:
    """Return the buffers of the two numbers; the frames' belong to the engines that encode them."""
    rows = config.workload.call_rows
    return [
        Buffer(spec.buffer, (rows, *spec.shape), spec.dtype, "host")
        for spec in video_inputs(config)
        if spec.name != VIDEO
    ]


def start_arguments(config: VideoBuild, rows: int, part: str) -> tuple[Argument, ...]:
    """Return what `Noise` takes of an input video: latents of all rows of the pool, and the shares of noise of a
    call's rows; empty for a build without input video."""
    s = config.workload.stream
    if s.strength is None:
        return ()
    latents = (config.workload.state_rows, config.model.out_channels, s.chunk_frames)
    shape = (*latents, s.latent_height, s.latent_width)
    return (
        Argument("video_latents", f"buffer:{VIDEO_IN_LATENTS}", shape, torch.float32),
        Argument("strength", f"buffer:input.{STRENGTH}{part}", (rows, 1), torch.float32),
    )


def scale_arguments(config: VideoBuild, rows: int, part: str) -> tuple[Argument, ...]:
    """Return what a pass takes to scale its times and levels: whether it and the next pass are scaled, and the factors
    of a call's rows; empty for a build without input video."""
    if config.workload.stream.strength is None:
        return ()
    return (
        Argument("scaled", "weight:schedule.scaled[pass]", (2,), torch.float32),
        Argument("time_scale", f"buffer:input.{TIME_SCALE}{part}", (rows, 2), torch.float32),
    )


def golden_video(config: VideoBuild, chunk: int | None) -> dict[str, Tensor]:
    """Return the inputs of a recorded chunk, [B, *shape]: a gradient that moves, and other levels for each chunk."""
    s, rows = config.workload.stream, config.workload.stream.batch
    if s.strength is None or chunk is None:
        return {}
    frames, height, width, _ = video_inputs(config)[0].shape
    time = torch.arange(frames)[:, None, None] + chunk * frames
    down, across = torch.arange(height)[:, None], torch.arange(width)
    channels = (down * 3 + time * 5, across * 2 - time * 3, down + across + time * 7)
    levels = torch.stack(torch.broadcast_tensors(*channels), dim=-1)
    video = (levels % 256).to(torch.uint8).expand(rows, *levels.shape).contiguous()
    numbers = _parameters(config).levels((0.75, 0.8, 0.9)[chunk % 3])
    share, factors = (torch.from_numpy(each).repeat(rows, 1) for each in numbers)
    return {VIDEO: video, STRENGTH: share, TIME_SCALE: factors}


def video_control(config: VideoBuild) -> ControlSpec:
    """Return the control of a build with an input video."""
    return VideoInControl.declared(VIDEO, STRENGTH, TIME_SCALE, _parameters(config))


def _parameters(config: VideoBuild) -> VideoInParameters:
    s, schedule = config.workload.stream, config.workload.schedule
    motion: dict[str, float] = {}
    if s.motion_strength:
        motion = {
            "least": schedule.least_strength,
            "first_time": schedule.timesteps[0],
            "shift": schedule.shift or 1.0,
        }
    return VideoInParameters(
        s.height, s.width, s.fps, 1 + s.temporal_stride * (s.chunk_frames - 1), s.strength or 0.0, **motion
    )
