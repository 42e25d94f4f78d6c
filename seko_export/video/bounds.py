"""The bounds of an engine's difference from a recorded chunk: by format, dtype and rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.families.layers.sampler import ADVANCE
from seko_export.families.registry import graph_of
from seko_runtime.video.golden import cache_error, relative_error, video_error
from seko_runtime.video.manifest import GoldenBound

# How far an engine may be from the eager model over a golden chunk, as |a - b| / |b|. The two sum in other orders,
# and a chunk is five passes that feed on each other; with a quantised cache a rounding can also flip a code, and with
# latents in steps of bfloat16 a number of theirs: a build with either is lossy here.
# Measured: float32 2.4e-7 with random weights, 1.8e-5 with the sample's trained ones; bfloat16 at full size 1.3e-2
# (docs/LOG.md). Planted faults in the tiny model give 0.02 (a stale ring) to 0.14 (layers swapped;
# docs/benchmarks/cpu.jsonl): too little for bfloat16's bound to see. So the cache is recorded too: there the same
# faults give 1 or more, in any format.
TOLERANCES = {
    torch.float32: {"exact": 1e-4, "lossy": 1e-3},
    torch.bfloat16: {"exact": 4e-2, "lossy": 4e-2},
}
# Root mean square difference of the decoded frames, in levels of 255. They are rounded to whole levels, and in bfloat16
# thirty layers stand between latents and pixels.
VIDEO_TOLERANCES = {
    torch.float32: {"exact": 0.1, "lossy": 1.0},
    torch.bfloat16: {"exact": 6.0, "lossy": 6.0},
}
MOST_CODES = 0.85  # of a token's codes; an unrelated token has more of them wrong
CHAOTIC_CODES = 0.7  # from here on another draw of the last bits may pass the bound above
UNJUDGED = 1.0  # all of them
CACHE_TOLERANCES = {
    torch.float32: {"exact": 1e-4, "lossy": 0.05},
    torch.bfloat16: {
        "exact": 0.1,
        "lossy": 0.5,
    },  # measured at full size: 0.024, and 0.22 of a token's FP4 bytes
}


@dataclass(frozen=True)
class EagerChunk:
    """One chunk of the eager model.

    Parameters
    ----------
    latents : Tensor
        [B, C, F, h, w] float32.
    cache : dict of str to Tensor
        By buffer name, in its dtype: the first token of every slot after the chunk, [L, B*cache_frames, ...].
    video : Tensor or None
        [B, T, rows, columns, 3] uint8, every `video_step`-th pixel in both directions; None without a VAE.
    """

    latents: Tensor
    cache: dict[str, Tensor]
    video: Tensor | None = None


def golden_bound(
    config: VideoBuild, recorded: EagerChunk, other: EagerChunk, exact: EagerChunk
) -> GoldenBound:
    """Return how much an engine may differ from one recorded chunk.

    Parameters
    ----------
    config : VideoBuild
        The build.
    recorded, other, exact : EagerChunk
        The recorded chunk; the same with perturbed last bits; the same with an exact cache. For an exact format all
        three are the same.

    Returns
    -------
    GoldenBound
        The least bound of the format and dtype; with a lossy cache also twice what the last bits do, and where its
        roundings are in play, what two independent draws of them are apart: sqrt(2) times the distance to the exact
        track. Then a token's codes fall anyhow, and only another token's are told from it; not even those where the
        last bits alone exchange nearly all codes of some token (trained weights, a text of no encoder).
    """
    kind = "exact" if config.lossless and not ADVANCE[config.workload.schedule.sampler].rounded else "lossy"
    least = tuple(
        table[config.target.dtype][kind] for table in (TOLERANCES, CACHE_TOLERANCES, VIDEO_TOLERANCES)
    )
    last_bits, loss = difference(config, other, recorded), difference(config, exact, recorded)
    rounded = loss.latents > least[0]  # the first chunk's is 0: no cached frames
    codes = MOST_CODES if last_bits.cache < CHAOTIC_CODES else UNJUDGED
    return GoldenBound(
        max(least[0], 2 * last_bits.latents, 2**0.5 * loss.latents),
        codes if rounded else min(MOST_CODES, max(least[1], 2 * last_bits.cache)),
        max(least[2], 2 * last_bits.video, 2**0.5 * loss.video) if config.workload.vae else 0.0,
    )


def difference(config: VideoBuild, actual: EagerChunk, wanted: EagerChunk) -> GoldenBound:
    """Return how much two chunks differ in latents, in the worst cache token and in video, measured as `verify` does.

    Caches of different formats are not compared.
    """
    cache, video = 0.0, 0.0
    for buffer in graph_of(config).buffers:
        if buffer.role == "cache" and buffer.name in actual.cache:
            ours, theirs = (chunk.cache[buffer.name].float().numpy() for chunk in (actual, wanted))
            cache = max(cache, cache_error(ours, theirs, buffer.dtype, row_axis=buffer.row_axis))
    if actual.video is not None and wanted.video is not None:
        video = video_error(actual.video.numpy(), wanted.video.numpy(), step=1)  # both are sampled already
    return GoldenBound(relative_error(actual.latents.numpy(), wanted.latents.numpy()), cache, video)
