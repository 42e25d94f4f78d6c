"""A static stream held to the naive model, pass by pass, far past the wrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from seko_export.config.stream import StreamConfig
from seko_export.config.video import VideoBuild
from tests.support.tolerances import STEP, relative_error
from tests.truth.eager_stream import EagerStream
from tests.truth.naive_dit import ShiftingDit


def chunks_of_two_rings(s: StreamConfig) -> int:
    """How many chunks fill the sink and each slot of the ring twice, and begin to fill it again."""
    return (s.sink_frames + 2 * s.ring_frames) // s.chunk_frames + 1


def naive_models(config: VideoBuild, weights: Mapping[str, Tensor], text: Tensor) -> list[ShiftingDit]:
    """The naive model of row 0, or where each pass has a cache of its own, one for each of two passes."""
    count = 2 if config.workload.stream.pass_caches else 1
    return [ShiftingDit(config.model, config.workload.stream, weights, text[0]) for _ in range(count)]


def hold_to_naive(
    static: EagerStream, naive: list[ShiftingDit], worst: Callable[[str, float], None], what: str
) -> None:
    """Run a stream until its ring has wrapped twice; each velocity is the naive model's, to float32's rounding."""
    s = static.config.workload.stream
    for number in range(chunks_of_two_rings(s)):
        for turn, done in enumerate(static.run_chunk([number * s.chunk_frames], [3])):
            model = naive[turn if s.pass_caches else 0]
            velocity = model.step(done.latents[0], done.timestep, number * s.chunk_frames, commit=done.kept)
            if done.velocity is not None:
                error = relative_error(done.velocity[0], velocity)
                worst(f"{what}, velocity", error)
                assert error <= STEP[torch.float32], (number, done.timestep)
