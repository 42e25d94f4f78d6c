"""Run the build's own programs eagerly over plain dictionaries of tensors: no runtime, no engine, no capture.

This is the code under test in its plainest form: pieces, buffer table and programs of
`seko_export.families.layers.pieces`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import FlatModule
from seko_export.families.base import MediaTensors
from seko_export.families.registry import family_of
from seko_export.families.wan_layout.keys import wan_shapes
from seko_export.video.calibration import layer_constants
from seko_kernels.kv_formats import ChannelStatistics
from seko_runtime.format.manifest import Call
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.video.ring import Ring

SMALL = ModelConfig(
    name="small", layers=2, dim=256, heads=2, ffn_dim=320, text_dim=48, text_tokens=9, freq_dim=64
)
# Largest magnitude that the FP4 scales are calibrated for: normed keys stay below it, and so do the values.
CALIBRATED_AMAX = 8.0
CALIBRATED_MEAN = 0.25  # size of the keys' means: these are seeded numbers, as a mean may be anything


@dataclass(frozen=True)
class Pass:
    """What went into one pass of the transformer, and what came out."""

    timestep: float
    latents: Tensor  # [B, C, F, h, w] float32
    velocity: Tensor | None  # the same; None: the context pass
    kept: bool = False  # whether later chunks read its keys and values


class EagerStream:
    """A session of the eager pieces.

    Parameters
    ----------
    config : VideoBuild
        For the CPU.
    wan : mapping of str to Tensor
        A checkpoint by the names of the model's family, such as Wan's.
    text : Tensor or None
        [B, text tokens, text_dim] float32; None for a model that takes none.
    """

    def __init__(self, config: VideoBuild, wan: Mapping[str, Tensor], text: Tensor | None) -> None:
        self.config = config
        family = family_of(config)
        graph = family.graph(config)  # not the shared one of `graph_of`: tests replace parts of it
        self.pieces, self.programs = graph.pieces, graph.programs
        self.engines: dict[str, Callable[..., tuple[Tensor, ...]]] = {
            name: FlatModule(piece) for name, piece in self.pieces.items()
        }
        self.weights = dict(family.weights(self.pieces, wan)) | config.workload.schedule.tables(
            config.workload.stream
        )
        self.weights |= family.tables(config, wan)
        known = known_channels(config.model)
        for name, scale in config.kv.calibrate(known, known).items():
            self.weights |= {f"blocks.{layer}.kv.{name}": scale for layer in range(config.model.layers)}
        self.weights |= layer_constants(config, self.weights)
        self.buffers = {b.name: torch.zeros(b.shape, dtype=getattr(torch, b.dtype)) for b in graph.buffers}
        s = config.workload.stream
        self.ring = Ring(s.sink_frames, s.ring_frames, s.chunk_frames, s.reference_frames)
        self.set_text(text)

    def set_text(self, text: Tensor | None) -> None:
        """Run the prompt program."""
        if text is not None:
            self.buffers["text.embeddings"].copy_(text)
        self._run(self.programs["prompt"], number=0)

    def run_chunk(
        self,
        first_frames: Sequence[int],
        seeds: Sequence[int],
        feed: Sequence[Tensor] | None = None,
        conditioning: tuple[Sequence[int], Tensor] | None = None,
    ) -> list[Pass]:
        """Run one chunk, each row at its own frame, and return its passes, a context pass last.

        ``feed``, if given, replaces the latents [B, C, F, h, w] that go into each pass: two implementations
        are compared pass by pass, not by the drift of two feedback loops. ``conditioning``: how many leading frames of
        each row are conditioning frames, and the latents [B, C, F, h, w] that they are taken from.
        """
        self.buffers["conditioning_frames"].zero_()
        if conditioning is not None:
            self.buffers["conditioning_frames"].copy_(torch.tensor(conditioning[0]))
            self.buffers["conditioning.latents"].copy_(conditioning[1])
        s, latents = self.config.workload.stream, self.buffers["latents"]
        self.buffers["seeds"].copy_(torch.tensor(seeds))
        self._stand_at(first_frames)
        self._run(self.programs["begin"], number=0)
        # As the schedule's float32 table holds them: 833.333... in float64 would move its sinusoid by 3e-5.
        times = self.weights["schedule.timestep"][:, 0, 0].tolist()
        if not s.has_context:
            times.pop()
        passes = []
        for number, timestep in enumerate(times):
            if feed is not None:
                latents.copy_(feed[number])
            before, last = latents.clone(), number == len(times) - 1 and s.has_context
            key = ProgramKey("context" if last else "denoise", first=not any(first_frames))
            calls = self.programs.get(key.name, self.programs[key.role])
            values = self._run(calls, number)
            kept = s.pass_caches or number == len(times) - 1
            passes.append(Pass(timestep, before, None if last else values["velocity"], kept))
        return passes

    def write_references(self, reference: Tensor) -> None:
        """Write the frames [B, C, R, h, w] that stand before every row's stream."""
        s = self.config.workload.stream
        self.buffers["conditioning_frames"].fill_(s.chunk_frames)
        for first in range(-s.reference_frames, 0, s.chunk_frames):
            self._stand_at([first] * s.batch)
            self._run(self.programs["begin"], number=0)
            latents = self.buffers["latents"].zero_()
            for place, frame in enumerate(self.ring.latent_frames(first)):
                if frame < 0:
                    latents[:, :, place] = reference[:, :, frame]
            passes = len(self.config.workload.schedule.timesteps)
            last = passes if s.has_context else passes - 1
            for number in range(passes) if s.pass_caches else (last,):
                self._run(self.programs["context" if s.has_context else "denoise"], number)

    def _stand_at(self, first_frames: Sequence[int]) -> None:
        """Fill the buffers that say where each row stands."""
        s = self.config.workload.stream
        self.buffers["frames"].copy_(torch.tensor([self.ring.latent_frames(f) for f in first_frames]))
        for group in self.config.layer_groups:
            own = Ring(s.sink_frames, group.ring_frames, s.chunk_frames, s.reference_frames)
            slots = [own.write_slots(f) for f in first_frames]
            self.buffers[group.own("write_slots")].copy_(torch.tensor(slots))
            valid = [own.valid_frames(f) * s.frame_tokens for f in first_frames]
            self.buffers[group.own("valid_tokens")].copy_(torch.tensor(valid))

    def caches(self) -> dict[str, Tensor]:
        """Return every cache tensor that holds tokens, [layers, B*N, ...]."""
        return {f"kv.{c.name}": self.buffers[f"kv.{c.name}"] for c in self.config.kv.cache_tensors}

    def cache_rows(self, row: int) -> dict[str, Tensor]:
        """Return one batch row's part of every cache tensor, [layers, N, ...]."""
        s = self.config.workload.stream
        return {n: t.unflatten(1, (s.batch, -1))[:, row] for n, t in self.caches().items()}

    def slot_tokens(self, row: int, slot: int) -> dict[str, Tensor]:
        """Return what one slot of one row holds, [layers, frame_tokens, ...] by cache tensor."""
        s, rows, tokens = self.config.workload.stream, self.cache_rows(row), {}
        for cache in self.config.kv.cache_tensors:
            first = s.pinned_frames if cache.part == "ring" else 0
            frames = s.pinned_frames if cache.part == "sink" else s.cache_frames
            if first <= slot < frames:
                start = (slot - first) * s.frame_tokens
                tokens[f"kv.{cache.name}"] = rows[f"kv.{cache.name}"][:, start : start + s.frame_tokens]
        return tokens

    @torch.no_grad()
    def _run(self, calls: Sequence[Call], number: int) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for call in calls:
            results = self.engines[call.engine](*(self._look_up(ref, values, number) for ref in call.inputs))
            for ref, result in zip(call.outputs, results, strict=True):
                if ref.startswith("value:"):
                    values[ref.removeprefix("value:")] = result
                else:
                    self._look_up(ref, values, number).copy_(result)
        return values

    def _look_up(self, ref: str, values: Mapping[str, Tensor], number: int) -> Tensor:
        kind, name = ref.split(":", 1)
        name, *indices = name.replace("]", "").split("[")
        home: Mapping[str, Tensor] = {"weight": self.weights, "buffer": self.buffers, "value": values}[kind]
        tensor = home[name]
        for index in indices:
            tensor = tensor[number if index == "pass" else int(index)]
        return tensor


def known_channels(model: ModelConfig) -> ChannelStatistics:
    """Return what a calibration might have seen: the same range in every channel, another mean in each."""
    shape = (model.heads, model.head_dim)
    reach = torch.full(shape, CALIBRATED_AMAX)
    mean = CALIBRATED_MEAN * torch.randn(shape, generator=torch.Generator().manual_seed(2))
    return ChannelStatistics(-reach, reach, mean)


def small_config(
    chunk: int,
    sink: int,
    ring: int,
    *,
    batch: int = 1,
    scheme: str = "fp32",
    passes: int = 4,
    layers: int = 2,
) -> VideoBuild:
    """Return a build of a small model on 8x12 latents (24 tokens a frame)."""
    model = ModelConfig(**{**vars(SMALL), "layers": layers})
    stream = StreamConfig(64, 96, chunk_frames=chunk, sink_frames=sink, ring_frames=ring, batch=batch)
    steps = tuple(1000.0 * (passes - i) / passes for i in range(passes))
    return VideoBuild(model, VideoConfig(stream, Schedule.warped(steps), scheme), TargetConfig("cpu"))


def weights_of(
    config: VideoBuild, checkpoint: Mapping[str, Tensor], media: MediaTensors | None = None
) -> dict[str, Tensor]:
    """Return the artifact's weights and tables of a build whose cache is exact."""
    family = family_of(config)
    weights = dict(family.weights(family.graph(config).pieces, checkpoint, media))
    return weights | config.workload.schedule.tables(config.as_batch.workload.stream)


def random_wan_weights(model: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return a random checkpoint by Wan's names."""
    return random_tensors(wan_shapes(model), seed)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Return random weights of these shapes, scaled by their names so that every one shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        weight = torch.randn(shape, generator=generator)
        if ".norm" in name and name.endswith("weight"):
            weight = 1 + 0.1 * weight
        elif len(shape) > 1 and "modulation" not in name:
            weight = weight / weight[0].numel() ** 0.5
        else:
            weight = 0.1 * weight
        weights[name] = weight
    return weights


def random_text(model: ModelConfig, batch: int, seed: int = 1) -> Tensor:
    """Return [B, text tokens, text_dim], zero-padded behind a third, another text in each row."""
    text = torch.randn(
        batch, model.text_tokens, model.text_dim, generator=torch.Generator().manual_seed(seed)
    )
    text[:, model.text_tokens // 3 :] = 0
    return text


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors hold equal bytes: NaN equals itself, and -0.0 differs from 0.0."""
    same_form = a.shape == b.shape and a.dtype == b.dtype
    return same_form and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )
