"""Bounds for the errors of replayed chunks against recorded chunks, by cache format, dtype and rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.families.layers.sampler import ADVANCE
from seko_export.families.registry import graph_of
from seko_runtime.video.golden import cache_error, relative_error, video_error
from seko_runtime.video.manifest import GoldenBound

# Bounds for |engine - eager| / |eager| of a golden chunk's latents. Engine and eager model sum in different orders,
# and the five passes of a chunk build on each other. Rounding differences can also flip a code of a quantised cache,
# or a value of latents that are rounded to bfloat16; builds with either count as lossy here. Measured: float32 2.4e-7
# with random weights, 1.8e-5 with the sample's trained ones; bfloat16 at full size 1.3e-2. Planted
# faults in the tiny model give 0.02 (a stale ring) to 0.14 (layers swapped; docs/benchmarks/cpu.jsonl): too little
# for bfloat16's bound to see. So the cache is recorded too: there the same faults give 1 or more, in any format.
TOLERANCES = {
    torch.float32: {"exact": 1e-4, "lossy": 1e-3},
    torch.bfloat16: {"exact": 4e-2, "lossy": 4e-2},
}
# Bounds for the root mean square difference of decoded frames, in levels of 255. Frames are rounded to whole levels,
# and thirty layers in bfloat16 lie between latents and pixels.
VIDEO_TOLERANCES = {
    torch.float32: {"exact": 0.1, "lossy": 1.0},
    torch.bfloat16: {"exact": 6.0, "lossy": 6.0},
}
MOST_CODES = 0.85  # share of a token's codes that may differ; of an unrelated token's codes more differ
CHAOTIC_CODES = 0.7  # share of flipped codes above which other last bits could exceed the bound above
UNJUDGED = 1.0  # share if all codes may differ
CACHE_TOLERANCES = {
    torch.float32: {"exact": 1e-4, "lossy": 0.05},
    torch.bfloat16: {
        "exact": 0.1,
        "lossy": 0.5,
    },  # measured at full size: error 0.024, and 0.22 of a token's FP4 bytes differ
}


@dataclass(frozen=True)
class EagerChunk:
    """One chunk that the eager model made.

    Parameters
    ----------
    latents : Tensor
        Latents of the chunk, [B, C, F, h, w] float32.
    cache : dict of str to Tensor
        The first token of every cache slot, read after the chunk, for each cache buffer, [L, B*cache_frames, ...] in
        the buffer's dtype.
    video : Tensor or None
        Sampled video frames, [B, T, rows, columns, 3] uint8, every `video_step`-th pixel in both directions; None
        without a VAE.
    """

    latents: Tensor
    cache: dict[str, Tensor]
    video: Tensor | None = None


def golden_bound(
    config: VideoBuild, recorded: EagerChunk, other: EagerChunk, exact: EagerChunk
) -> GoldenBound:
    """Return the bounds for the errors of a replayed chunk against the recorded chunk.

    Parameters
    ----------
    config : VideoBuild
        The configuration of the build.
    recorded, other, exact : EagerChunk
        The recorded chunk, the chunk with changed last bits, and the chunk with an exact cache. For an exact cache
        format all three arguments are the same chunk.

    Returns
    -------
    GoldenBound
        The error bounds of the chunk, which are at least the bounds of cache format and dtype. With a quantised cache
        the bounds are also at least twice the effect of the changed last bits. If rounding of the cache dominates, the
        bounds are at least the expected distance of two independent roundings, sqrt(2) times the distance to the exact
        chunk. The bound for cached codes is then so loose that it only detects a token with another token's codes.
        Cached codes are not compared if changed last bits change nearly all codes of some token, as happens for trained
        weights with random text.
    """
    kind = "exact" if config.lossless and not ADVANCE[config.workload.schedule.sampler].rounded else "lossy"
    least = tuple(
        table[config.target.dtype][kind] for table in (TOLERANCES, CACHE_TOLERANCES, VIDEO_TOLERANCES)
    )
    last_bits, loss = difference(config, other, recorded), difference(config, exact, recorded)
    rounded = loss.latents > least[0]  # the first chunk has no cached frames and a distance of 0
    codes = MOST_CODES if last_bits.cache < CHAOTIC_CODES else UNJUDGED
    return GoldenBound(
        max(least[0], 2 * last_bits.latents, 2**0.5 * loss.latents),
        codes if rounded else min(MOST_CODES, max(least[1], 2 * last_bits.cache)),
        max(least[2], 2 * last_bits.video, 2**0.5 * loss.video) if config.workload.vae else 0.0,
    )


def difference(config: VideoBuild, actual: EagerChunk, wanted: EagerChunk) -> GoldenBound:
    """Return the errors between two chunks in latents, in the worst cached token and in video, measured as `verify`
    measures errors. Caches of different formats cannot be compared, and are left out.
    """
    cache, video = 0.0, 0.0
    for buffer in graph_of(config).buffers:
        if buffer.role == "cache" and buffer.name in actual.cache:
            ours, theirs = (chunk.cache[buffer.name].float().numpy() for chunk in (actual, wanted))
            cache = max(cache, cache_error(ours, theirs, buffer.dtype, row_axis=buffer.row_axis))
    if actual.video is not None and wanted.video is not None:
        # both videos are sampled already
        video = video_error(actual.video.numpy(), wanted.video.numpy(), step=1)
    return GoldenBound(relative_error(actual.latents.numpy(), wanted.latents.numpy()), cache, video)
