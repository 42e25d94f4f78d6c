"""Lossy streams against the exact one: latents and decoded frames after so many chunks, and whether prompts hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scripts.kv_quality.measures import psnr, relative_error
from scripts.kv_quality.sample import DECODE_ROWS, Sample, decoded
from scripts.train_sample.judge import CLIP_LATENTS, verdicts_of

WINDOW_CHUNKS = 7  # "after N chunks" is measured over the last of these
WARMUP_CHUNKS = 2  # decoded before the window and dropped, where it does not begin the stream
JUDGED_FRAMES = 4 * CLIP_LATENTS - 3  # at either end of the stream

Judged = dict[str, list[bool]]  # which prompts are followed, at ``start`` and ``end`` of the stream


def compare(
    sample: Sample,
    latents: dict[str, Tensor],
    exact: str,
    prompts: list[str],
    chunks: Sequence[int],
    device: str,
    show: Callable[[str], None],
) -> tuple[dict[str, dict[int, Tensor]], dict[str, Judged]]:
    """Measure every stream against the exact one.

    Parameters
    ----------
    sample : Sample
        Its decoder is used.
    latents : dict of str to Tensor
        [prompts, C, frames, h, w] by format, the exact one among them.
    exact : str
        Its name.
    prompts : list of str
        What the streams were asked for.
    chunks : sequence of int
        After how many to look, rising; the first within `WINDOW_CHUNKS`, so that its window begins the stream.
    device : str
        Where frames are decoded and compared.
    show : callable
        Told how far it is.

    Returns
    -------
    after : dict
        By format (the exact one too), by chunk count: the PSNR of each prompt's frames, [prompts].
    judged : dict
        By format.
    """
    size = sample.stream.chunk_frames
    after: dict[str, dict[int, Tensor]] = {name: {} for name in latents}
    judged: dict[str, Judged] = {name: {"start": [], "end": []} for name in latents}
    for count in chunks:
        begin = max(0, count - WINDOW_CHUNKS)
        warm = min(begin, WARMUP_CHUNKS)
        part = slice((begin - warm) * size, count * size)
        decode = sample.decoder((count - begin + warm) * size, device)
        pictures: dict[str, list[Tensor]] = {name: [] for name in latents}
        for rows in torch.arange(len(prompts)).split(DECODE_ROWS):
            show(f"after {count} chunks: prompts {int(rows[0])}..{int(rows[-1])} of {len(prompts)}")
            truth = decoded(decode, latents[exact][rows, :, part])[:, :, 4 * warm * size :]
            for name, x in latents.items():
                video = decoded(decode, x[rows, :, part])[:, :, 4 * warm * size :]
                asked = [prompts[row] for row in rows.tolist()]
                for end, at, clip in (
                    ("start", chunks[0], video[:, :, :JUDGED_FRAMES]),
                    ("end", chunks[-1], video[:, :, -JUDGED_FRAMES:]),
                ):
                    if count == at:
                        judged[name][end] += [verdict.followed for verdict in verdicts_of(clip, asked)]
                pictures[name].append(psnr(video, truth))
        for name, of_name in pictures.items():
            after[name][count] = torch.cat(of_name)
    return after, judged


def error_by_chunk(lossy: Tensor, exact: Tensor, size: int) -> Tensor:
    """Return the relative latent error of each chunk, [prompts, chunks], of streams [prompts, C, chunks*F, h, w]."""
    pairs = zip(lossy.split(size, dim=2), exact.split(size, dim=2), strict=True)
    return torch.stack([relative_error(a, b) for a, b in pairs], dim=1)
