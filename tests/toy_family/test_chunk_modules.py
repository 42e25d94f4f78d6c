"""A camera behind every self-attention: embedded once a chunk, scale and shift by layer, as its reference says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import UsageError
from seko_export.families.base import ModelGraph
from seko_export.families.layers.choice import ChunkModule, LayerChoice, PromptModule
from seko_export.families.layers.front_tokens import FrontEmbed
from seko_export.families.layers.pieces import make_buffers, make_pieces, make_programs
from seko_export.families.registry import graph_of
from seko_export.video.recording import golden_text
from seko_runtime.format.manifest import InputSpec
from tests.support.eager_pool import eager_pool
from tests.support.stacked import eager_session
from tests.support.tolerances import relative_error
from tests.toy_family.family import CAMERA, MODEL, STREAM, CameraFamily, camera_of
from tests.toy_family.naive import NaiveToy
from tests.toy_family.test_toy_family import CHUNKS, SEEDS, STREAM_BAR

WORLD_MODEL = replace(MODEL, in_channels=MODEL.out_channels, family=f"{__name__}:WORLD")


class View(nn.Module):
    """Embeds a chunk's camera; it counts its calls."""

    groups = ("conditioning",)
    calls = 0

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        self.tokens = config.workload.stream.frame_tokens
        self.pose = nn.Linear(CAMERA, config.model.dim, dtype=config.target.dtype)

    def forward(self, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return [B, T, d] from a camera [B, F, CAMERA]."""
        View.calls += 1
        return self.pose(conditioning["camera"].to(self.pose.weight.dtype)).repeat_interleave(self.tokens, 1)


class ScaleShift(nn.Module):
    """What one layer makes of the view."""

    groups = ("conditioning",)

    def __init__(self, config: VideoBuild) -> None:
        super().__init__()
        self.both = nn.Linear(config.model.dim, 2 * config.model.dim, dtype=config.target.dtype)

    def forward(self, conditioning: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return scale and shift, [B, T, d] each."""
        scale, shift = self.both(conditioning["view"]).chunk(2, -1)
        return scale, shift


class Injector(nn.Module):
    """Scales and shifts the hidden state behind self-attention."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(model.dim, dtype=dtype))

    def forward(self, hidden: Tensor, conditioning: Mapping[str, Tensor]) -> Tensor:
        """Return the next hidden state [B, T, d]."""
        return hidden * (1 + conditioning["scale"]) + conditioning["shift"] * self.gain


class WorldFamily(CameraFamily):
    """The toy family with the camera in another place."""

    name = WORLD_MODEL.family

    def graph(self, config: VideoBuild) -> ModelGraph:
        """Return engines, programs, buffers and inputs of a build."""
        shape = (config.workload.stream.chunk_tokens, config.model.dim)
        outputs = (shape, config.target.dtype)
        view = ChunkModule("view", View, ("camera",), lambda _: {"view": outputs})
        by_layer = {"scale": outputs, "shift": outputs}
        camera = InputSpec(
            "camera", (config.workload.stream.chunk_frames, CAMERA), "float32", "input.camera", "chunk"
        )
        choice = LayerChoice(
            (camera,),
            after_attention=Injector,
            after_attention_inputs=tuple(by_layer),
            chunk_modules=(
                view,
                ChunkModule("turn", ScaleShift, ("view",), lambda _: by_layer, per_layer=True),
            ),
        )
        pieces = make_pieces(config, choice)
        programs = make_programs(pieces, config.workload.stream)
        return ModelGraph(pieces, programs, make_buffers(config, choice), choice.inputs)


WORLD = WorldFamily()


class NaiveWorld(NaiveToy):
    """Its reference: all of it in every layer and pass."""

    def with_extra_channels(self, latents: Tensor) -> Tensor:
        return latents

    def tail(self, layer: int, x: Tensor) -> Tensor:
        del layer
        return x

    def after_attention(self, layer: int, x: Tensor) -> Tensor:
        view = self._linear("view.pose", self.camera).repeat_interleave(self.stream.frame_tokens, 0)
        scale, shift = self._linear(f"blocks.{layer}.turn.both", view).chunk(2, -1)
        return x * (1 + scale) + shift * self.wan[f"blocks.{layer}.after_attention.gain"]


def world_config() -> VideoBuild:
    return VideoBuild(
        WORLD_MODEL, VideoConfig(STREAM, Schedule.warped((1000.0, 500.0)), "fp32"), TargetConfig("cpu")
    )


def random_weights(config: VideoBuild) -> dict[str, Tensor]:
    """Weights by the artifact's names; what fused layers add of the layer before is 0."""
    generator, weights = torch.Generator().manual_seed(0), {}
    for piece in graph_of(config).pieces.values():
        for layer in piece.served or (0,):
            for parameter in piece.parameters:
                name = parameter.ref.removeprefix("weight:").replace("{layer}", str(layer))
                if name not in weights:
                    drawn = torch.randn(parameter.shape, generator=generator)
                    wide = len(parameter.shape) > 1 and "modulation" not in name
                    is_norm = "norm" in name and name.endswith("weight")
                    weights[name] = (
                        1 + 0.1 * drawn
                        if is_norm
                        else drawn / parameter.shape[-1] ** 0.5
                        if wide
                        else 0.3 * drawn
                    )
    return weights


def with_tables(config: VideoBuild, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, **config.workload.schedule.tables(config.workload.stream)}


def cameras(row: int) -> list[Tensor]:
    return [camera_of(STREAM.chunk_frames, row, chunk) for chunk in range(CHUNKS)]


def wanted(row: int, weights: Mapping[str, Tensor]) -> list[Tensor]:
    config = world_config()
    naive = NaiveWorld(config, weights, golden_text(config)[0])
    return [naive.chunk(SEEDS[row], number, camera) for number, camera in enumerate(cameras(row))]


def test_it_runs_once_a_chunk_and_a_stream_is_its_reference() -> None:
    config = world_config()
    weights, text = random_weights(config), golden_text(config)
    with eager_session(config, with_tables(config, weights), text, SEEDS[:1]) as session:
        for camera, reference in zip(cameras(0), wanted(0, weights), strict=True):
            before = View.calls
            latents = torch.from_numpy(session.run_chunk({"camera": camera.numpy()}).to_host())[0]
            assert View.calls == before + 1
            assert relative_error(latents, reference) <= STREAM_BAR


def test_a_rebuilt_cache_sees_each_kept_chunks_camera() -> None:
    """With the same prompt, before anything is evicted, the next chunk is the same; with other cameras it is not."""
    config = world_config()
    weights, text = random_weights(config), golden_text(config)

    def after(row: int, *, recache: bool) -> np.ndarray:
        with eager_session(config, with_tables(config, weights), text, SEEDS[:1]) as session:
            for camera in cameras(row)[:2]:
                session.run_chunk({"camera": camera.numpy()})
            if recache:
                session.set_text(text.numpy(), recache=True)
            return session.run_chunk({"camera": cameras(0)[2].numpy()}).to_host()

    plain = after(0, recache=False)
    assert np.array_equal(after(0, recache=True), plain)
    assert not np.array_equal(after(1, recache=True), plain)


def test_fused_layers_add_their_residual_before_it() -> None:
    plain = world_config()
    fused = plain.changed(fused=True)
    weights, text, streams = random_weights(plain), golden_text(plain), []
    gates = {f"blocks.{n}.before": weights[f"blocks.{max(n - 1, 0)}.modulation"] for n in range(MODEL.layers)}
    for config in (plain, fused):
        with eager_session(config, with_tables(config, weights | gates), text, SEEDS[:1]) as session:
            streams.append([session.run_chunk({"camera": camera.numpy()}).to_host() for camera in cameras(0)])
    for latents, other in zip(*streams, strict=True):
        assert relative_error(torch.from_numpy(latents), torch.from_numpy(other)) <= STREAM_BAR


def test_rows_of_a_pool_have_cameras_of_their_own() -> None:
    config = world_config().changed(pool=PoolConfig(2, (1, 2)))
    drawn = random_weights(world_config())
    weights = with_tables(config, drawn) | config.workload.schedule.tables(config.as_batch.workload.stream)
    references = [wanted(row, drawn) for row in range(2)]
    with eager_pool(config, weights) as pool:
        text = golden_text(world_config()).numpy()
        sessions = [pool.open_session(seed=seed, text=text) for seed in SEEDS]
        for number in range(CHUNKS):
            inputs = [{"camera": cameras(row)[number].numpy()} for row in range(2)]
            for row, chunk in enumerate(pool.run(sessions, inputs)):
                latents = torch.from_numpy(chunk.to_host())[0]
                assert relative_error(latents, references[row][number]) <= STREAM_BAR
        for session in sessions:
            session.close()


def test_an_input_that_the_shared_layers_cannot_take_is_refused_at_once() -> None:
    camera = InputSpec("camera", (CAMERA,), "float32", "input.camera", "pass")
    with pytest.raises(
        UsageError, match="input 'camera' is per pass: the shared layers take inputs per chunk"
    ):
        LayerChoice((camera,))


def test_an_input_per_prompt_is_taken_by_a_prompt_module_alone() -> None:
    """In a pool it lies there for all rows, and is turned into what the layers take when it is given."""
    picture = InputSpec("picture", (CAMERA,), "float32", "input.picture", "prompt")
    outputs = {"seen": ((CAMERA,), torch.float32)}
    LayerChoice((picture,), prompt_modules=(PromptModule("look", View, ("picture",), lambda _: outputs),))
    chunk = ChunkModule("look", View, ("picture",), lambda _: outputs, numbered=True)
    for choice in (
        {"chunk_modules": (chunk,)},
        {"tail_inputs": ("picture",)},
        {"embed_inputs": ("picture",)},
    ):
        with pytest.raises(UsageError, match="input 'picture' is per prompt: only a PromptModule"):
            LayerChoice((picture,), **choice)
    often = replace(picture, per="chunk")
    with pytest.raises(UsageError, match="input 'picture' is per chunk: only a PromptModule"):
        LayerChoice((often,), prompt_modules=(PromptModule("look", View, ("picture",), lambda _: outputs),))


def test_an_input_per_session_is_taken_by_a_numbered_module_alone() -> None:
    """It lies there for all rows of a pool: what does not know its rows would read another's."""
    still = InputSpec("picture", (CAMERA,), "float32", "input.picture", "session")
    outputs = {"seen": ((CAMERA,), torch.float32)}
    plain = ChunkModule("look", View, ("picture",), lambda _: outputs)
    LayerChoice((still,), chunk_modules=(replace(plain, numbered=True),))
    for choice in (
        {"chunk_modules": (plain,)},
        {"tail_inputs": ("picture",)},
        {"embed_inputs": ("picture",)},
    ):
        with pytest.raises(UsageError, match="input 'picture' is per session"):
            LayerChoice((still,), **choice)


def test_front_tokens_belong_to_model_and_family_and_to_plain_layers() -> None:
    """A family's modules would have to run for them, too; and both must know of them."""
    for choice in ({"tail": Injector}, {"after_attention": Injector}, {"extra_text": ("k", "v")}):
        with pytest.raises(UsageError, match="front tokens run no module of the family"):
            LayerChoice(front=FrontEmbed, **choice)
    config = VideoBuild(WORLD_MODEL, VideoConfig(STREAM, Schedule.warped(), "fp32"), TargetConfig("cpu"))
    with pytest.raises(UsageError, match="has 0 front tokens, and its family a module for them"):
        make_pieces(config, LayerChoice(front=FrontEmbed))
