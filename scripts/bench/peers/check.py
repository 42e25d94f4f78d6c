"""Is a peer right? Its latents and its cache against the exact model, before any of its times counts.

The reference is the exporter's eager exact model in the same dtype, from the same weights, text and noise. Latents tell
whether the stream computes what it should. Of the cache, the first token of every frame that must be in it is compared:
a stale, doubled or missing chunk shows there as an error of 1 and more, where latents of random weights hardly move.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.bench.peers.network import RandomWan, device_weights
from scripts.bench.peers.peers import Stream
from scripts.bench.peers.shapes import Shape
from seko_export.config.stream import StreamConfig
from seko_export.video.bounds import CACHE_TOLERANCES, TOLERANCES
from seko_export.video.recording import eager_session, golden_text
from seko_runtime.video.ring import Ring

# An engine over a 4-bit cache: rounding to 4 bits moves a token by about a tenth (a step of a third of the spread, over
# the root of 12), and the network averages over keys, so latents move by less (0.006 at the tiny shape on a CPU).
LOSSY_LATENTS = 0.05
# An engine whose matmuls are fp8 too: e4m3 numbers are off by up to a sixteenth, in every matmul of every layer. Such
# an artifact has its own goldens; this bound is there to tell it from another stream.
FP8_LATENTS = 0.2


@dataclass(frozen=True)
class Verdict:
    """How far a stream is from the reference.

    Parameters
    ----------
    first, wrapped : float
        Relative error of the latents of chunk 0, and of the first chunk that evicts.
    cache : float or None
        Largest relative error of a token of the cache behind that chunk; None: not looked at.
    latents_bound, cache_bound : float
        What they may be.
    """

    first: float
    wrapped: float
    cache: float | None
    latents_bound: float
    cache_bound: float

    @property
    def ok(self) -> bool:
        """Whether all are within bounds; NaN is not."""
        latents = all(error <= self.latents_bound for error in (self.first, self.wrapped))
        return latents and (self.cache is None or self.cache <= self.cache_bound)


def bounds(dtype: torch.dtype) -> tuple[float, float]:
    """Return what latents and cache of an exact stream may be off by: the goldens' tolerances."""
    return TOLERANCES[dtype]["exact"], CACHE_TOLERANCES[dtype]["exact"]


def write_reference(shape: Shape, device: str, path: Path) -> None:
    """Run the exact model through fill and wrap, and keep what is compared."""
    config = shape.config(device)
    last = shape.wrapped_chunk
    weights = device_weights(config, RandomWan(shape.model, device))
    tensors: dict[str, Tensor] = {}
    with eager_session(config, weights, golden_text(config), [0]) as session:
        for number in range(last + 1):
            latents = torch.from_numpy(session.run_chunk().to_host())
            if number in (0, last):
                tensors[f"latents.{number}"] = latents
        sample = session.cache_sample(config.workload.stream.frame_tokens)
    slots = slots_in_time(config.workload.stream, (last + 1) * config.workload.stream.chunk_frames)
    for name in ("k", "v"):
        by_slot = torch.from_numpy(sample[f"kv.{name}"])  # [L, cache_frames, H, D]
        tensors[name] = by_slot[:, slots].contiguous()
    save_file(tensors, path)


def judge(stream: Stream, first: Tensor, wrapped: Tensor, reference: Path) -> Verdict:
    """Compare a stream that has just made the first chunk that evicts.

    Parameters
    ----------
    stream : Stream
        The peer.
    first, wrapped : Tensor
        [1, C, F, h, w], latents of chunk 0 and of its last chunk.
    reference : Path
        From `write_reference`.
    """
    config, wanted = stream.network.config, load_file(reference)
    errors = latents_errors(first, wrapped, wanted)
    s, worst = config.workload.stream, 0.0
    places = slots_in_time(s, stream.next_frame) if stream.store.by_slot else list(range(s.cache_frames))
    for number in range(config.model.layers):
        for name, cached in zip(("k", "v"), stream.store.tokens(number), strict=True):
            frames = cached[0, :: s.frame_tokens]
            if len(frames) != s.cache_frames:
                raise ValueError(
                    f"the cache of layer {number} holds {len(frames)} frames, expected {s.cache_frames}"
                )
            tokens, truth = frames[places].float().cpu(), wanted[name][number]
            error = ((tokens - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)).max()
            worst = max(worst, float(error.nan_to_num(torch.inf)))
    return Verdict(*errors, worst, *bounds(config.target.dtype))


def latents_errors(first: Tensor, wrapped: Tensor, wanted: dict[str, Tensor]) -> tuple[float, float]:
    """Return the relative errors of the latents of chunk 0 and of the first chunk that evicts."""
    numbers = sorted(int(name.removeprefix("latents.")) for name in wanted if name.startswith("latents."))
    pairs = zip((first, wrapped), (wanted[f"latents.{number}"] for number in numbers), strict=True)
    first_error, wrapped_error = (
        float((latents.cpu() - truth).norm() / truth.norm()) for latents, truth in pairs
    )
    return first_error, wrapped_error


def slots_in_time(stream: StreamConfig, next_frame: int) -> list[int]:
    """Return the slots of the frames that a full cache holds, the oldest first: sink, then the last of the others."""
    ring = Ring(stream.sink_frames, stream.ring_frames, stream.chunk_frames)
    rest = range(max(stream.sink_frames, next_frame - stream.ring_frames), next_frame)
    return [ring.slot(frame) for frame in (*range(stream.sink_frames), *rest)]
