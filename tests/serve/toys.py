"""Toy pools that hear a voice, or follow a camera. No tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from seko_runtime import Pool
from seko_runtime.controls.actions import AXES, ActionsControl, Axis, Binding
from seko_runtime.controls.strengths import VideoInParameters
from seko_runtime.controls.video_in import (
    FRAMES_KIND,
    STRENGTH_KIND,
    TIMES_KIND,
    VideoInControl,
)
from seko_runtime.controls.voice import PLAIN, WINDOW
from seko_runtime.format.manifest import Buffer, Call, ControlSpec, EngineSpec, InputSpec, TensorSpec
from seko_runtime.video.contract import VIDEO_IN_FRAMES, VIDEO_IN_LATENTS
from seko_runtime.video.manifest import VideoManifest, Viewer
from tests.runtime import toy, toy_pool, toy_whole
from tests.runtime.toy import CHANNELS, CHUNK, COLUMNS, ROWS

VOICE = InputSpec("audio", (1, CHUNK, WINDOW), "float32", "input.audio", "chunk", "caller", "required", PLAIN)
CAMERA = (
    InputSpec(
        "camera", (CHUNK, 3, 4), "float32", "input.camera", "chunk", "caller", "required", "camera_poses"
    ),
    InputSpec(
        "intrinsics",
        (CHUNK, 4),
        "float32",
        "input.intrinsics",
        "chunk",
        "caller",
        "required",
        "camera_intrinsics",
    ),
)
Added = Callable[[list[torch.Tensor]], torch.Tensor]


def loudness(inputs: list[torch.Tensor]) -> torch.Tensor:
    """What a voice adds to latents [b, C, F, h, w]: how loud each latent frame's window [b, 1, F, n] is."""
    (windows,) = inputs
    return windows.square().mean((1, 3)).sqrt()[:, None, :, None, None] * 5


def motion(inputs: list[torch.Tensor]) -> torch.Tensor:
    """What a camera adds: how far it moves to the right and ahead, in two channels."""
    moved = inputs[0][:, :, :, 3]  # [b, F, 3]
    channels = torch.zeros(len(moved), CHANNELS, CHUNK, 1, 1)
    channels[:, 0, :, 0, 0], channels[:, 1, :, 0, 0] = moved[:, :, 0], moved[:, :, 2]
    return channels


def pushed(inputs: list[torch.Tensor]) -> torch.Tensor:
    """What actions [b, rows, axes] add: how far two axes were moved."""
    channels = torch.zeros(len(inputs[0]), CHANNELS, CHUNK, 1, 1)
    channels[:, :2, :, 0, 0] = inputs[0].mean(1)[:, :2, None]
    return channels


def toy_manifest(inputs: Sequence[InputSpec], controls: Sequence[ControlSpec] = ()) -> VideoManifest:
    """The toy pool's manifest, of which each pass begins with what these inputs add to the latents."""
    base = toy_pool.pool_manifest()
    assert base.pool is not None
    programs, engines = dict(base.programs), [*base.engines]
    for b in base.pool.buckets:
        x = TensorSpec("x", (b, CHANNELS, CHUNK, ROWS, COLUMNS), "float32")
        taken = [TensorSpec(spec.name, (b, *spec.shape), spec.dtype) for spec in inputs]
        engines.append(EngineSpec(f"add.{b}", f"engines/add.{b}.pt2", (x, *taken), (replace(x, name="y"),)))
        refs = [f"buffer:{spec.buffer}[bucket]" for spec in inputs]
        add = Call(f"add.{b}", ("value:hidden", *refs), ("value:hidden",))
        for role in ("denoise", "context", "denoise_full", "context_full"):
            load, *rest = programs[f"{role}.{b}"]
            programs[f"{role}.{b}"] = (load, add, *rest)
    buffers = [Buffer(spec.buffer, (base.call_rows, *spec.shape), spec.dtype, "host") for spec in inputs]
    fields: dict[str, Any] = {
        "engines": tuple(engines),
        "programs": programs,
        "buffers": (*base.buffers, *buffers),
        "inputs": tuple(inputs),
    }
    if VOICE in inputs:  # a window is the sound of a latent frame at this rate
        fields["stream"] = replace(base.workload.stream, fps=16)
    if controls:
        fields["controls"] = tuple(controls)
    return toy.changed(base, **fields)


def toy_opener(
    inputs: Sequence[InputSpec], added: Added, controls: Sequence[ControlSpec] = ()
) -> Callable[[], Any]:
    """Return what opens the pool of such a toy."""

    @contextmanager
    def opener() -> Iterator[Pool]:
        engines = {
            f"add.{b}": lambda tensors: [tensors[0] + added(list(tensors[1:]))] for b in toy_pool.BUCKETS
        }
        with toy_pool.open_pool(manifest=toy_manifest(inputs, controls), engines=engines) as pool:
            yield pool

    return opener


talk_opener = toy_opener((VOICE,), loudness)
world_opener = toy_opener(CAMERA, motion)
game_opener = toy_opener(
    (InputSpec("axes", (CHUNK, 2), "float32", "input.axes", "chunk"),),
    pushed,
    (
        ActionsControl.declared(
            (
                Binding("ahead", ("KeyW",), axis="pitch", step=0.5),
                Binding("left", ("ArrowLeft",), axis="yaw", step=-0.5, pad="Look", face="←"),
            ),
            {AXES: "axes"},
            chunk_frames=CHUNK,
            axes=(Axis("pitch", 1.0), Axis("yaw", 1.0)),
            gamepad={"button0": "KeyW", "axis2": "yaw", "axis3": "-pitch", "axis0-": "ArrowLeft"},
            mouse={"x": "yaw", "y": "-pitch"},
            mouse_pixels=100,
        ),
    ),
)


@contextmanager
def shown_opener() -> Iterator[Pool]:
    """Open a world that brings an example."""
    manifest = toy_manifest(CAMERA)
    workload = replace(manifest.workload, viewer=Viewer(help="Walk.", prompts=("a b", "c a")))
    engines = {f"add.{b}": lambda tensors: [tensors[0] + motion(list(tensors[1:]))] for b in toy_pool.BUCKETS}
    with toy_pool.open_pool(manifest=replace(manifest, workload=workload), engines=engines) as pool:
        yield pool


@contextmanager
def film_opener() -> Iterator[Pool]:
    """Open a pool whose video follows an input video: its latents are as bright as the frames, less the strength."""
    frames = CHUNK * toy_whole.PER_LATENT
    shape = (frames, toy_whole.HEIGHT, toy_whole.WIDTH, 3)
    latent, size = (CHANNELS, CHUNK, ROWS, COLUMNS), (toy_whole.HEIGHT, toy_whole.WIDTH)
    video = InputSpec("video", shape, "uint8", VIDEO_IN_FRAMES, "chunk", kind=FRAMES_KIND)
    levels = (
        InputSpec("strength", (1,), "float32", "input.strength", "chunk", kind=STRENGTH_KIND),
        InputSpec("time_scale", (2,), "float32", "input.time_scale", "chunk", kind=TIMES_KIND),
    )
    parameters = VideoInParameters(*size, 16, toy_whole.FIRST_FRAMES, 0.5)
    control = VideoInControl.declared("video", "strength", "time_scale", parameters)
    base = toy_manifest(levels)
    taken, kept = TensorSpec("frames", shape, "uint8"), TensorSpec("cache", (1,), "float32")
    made = (TensorSpec("latents", latent, "float32"), kept)
    added = TensorSpec("video", (base.state_rows, *latent), "float32")
    programs, engines = dict(base.programs), []
    for engine in base.engines:
        if engine.name.startswith("add."):
            b = engine.inputs[0].shape[0]
            engine = replace(engine, inputs=(*engine.inputs, added, TensorSpec("rows", (b,), "int64")))
        engines.append(engine)
    for name, calls in base.programs.items():
        more = ("buffer:video_in.latents", "buffer:rows[bucket]")
        programs[name] = tuple(
            replace(call, inputs=(*call.inputs, *more)) if call.engine.startswith("add.") else call
            for call in calls
        )
    outputs = (f"buffer:{VIDEO_IN_LATENTS}[row]", "buffer:video_in.cache.00[row]")
    for name, inputs in (("encode_video_first", (taken,)), ("encode_video", (taken, kept))):
        engines.append(EngineSpec(name, f"engines/{name}.pt2", inputs, made))
        refs = (f"buffer:{VIDEO_IN_FRAMES}[row]", outputs[1])[: len(inputs)]
        programs[name] = (Call(name, refs, outputs),)
    buffers = (
        *base.buffers,
        Buffer(VIDEO_IN_FRAMES, (base.state_rows, *shape), "uint8", "session"),
        Buffer(VIDEO_IN_LATENTS, (base.state_rows, *latent), "float32", "session"),
        Buffer("video_in.cache.00", (base.rows, 1), "float32", "lane"),
    )
    manifest = toy.changed(
        base,
        engines=tuple(engines),
        programs=programs,
        buffers=buffers,
        inputs=(video, *levels),
        controls=(*base.control_specs, control),
    )

    def add(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        x, strength, _, latents, rows = tensors
        share = (1 - strength)[:, :, None, None, None]
        return [(1 - share) * x + share * latents.index_select(0, rows)]

    def encode(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        bright = tensors[0].float().mean() / 127.5 - 1
        return [bright.expand(latent).clone(), bright[None]]

    own: dict[str, Any] = {f"add.{b}": add for b in toy_pool.BUCKETS}
    own |= {"encode_video_first": encode, "encode_video": encode}
    with toy_pool.open_pool(manifest=manifest, engines=own) as pool:
        yield pool
