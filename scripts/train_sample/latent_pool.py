"""A pool of encoded scenes on the training device, slowly renewed; and the three layouts that training draws from it.

A sample is six chunks of one scene: chunk 0, the sink, is the stream's beginning, chunks 1 to 5 lie one behind
another, right after it or far down the stream. Layouts (numbers are chunks):

- ``start``: clean 0 1 2, noisy 0 1 2 3: the fill phase; only for samples whose chunks are contiguous;
- ``window``: clean 0 1 2 3 4, noisy 3 4 5: the full ring, with the gap between the sink and the window;
- ``first``: noisy 0 alone, many of them: where the shapes are is decided there, the hardest part.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.train_sample.captions import caption, describe
from scripts.train_sample.shapes import COUNT_ODDS, Scenes, draw_scenes, render
from scripts.train_sample.text import make_tokenizer, token_ids
from seko_export.config.stream import StreamConfig

CHUNKS = 6
CLEAN, NOISY = tuple(range(CHUNKS - 1)), tuple(range(CHUNKS))  # of a sequence of them all
FARTHEST = 1400  # largest chunk number at which a window begins
BATCH = 16  # scenes encoded at once
# Encoded and dropped before a far window. The encoder's start fades by half a latent frame: measured on a trained VAE,
# 29 % of error three frames in, 2 % six frames in.
WARMUP_CHUNKS = 2
PHRASINGS = 4  # captions kept of each scene
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "start": ((0, 1, 2), (0, 1, 2, 3)),
    "window": ((0, 1, 2, 3, 4), (3, 4, 5)),
    "first": ((), (0,)),
}


@dataclass(frozen=True)
class Batch:
    """Samples of one layout.

    Parameters
    ----------
    latents : Tensor
        [B, C, 6*F, h, w] float32, normalised.
    frames : Tensor
        [B, 6*F] int64, their absolute numbers.
    ids : Tensor
        [B, text tokens] int64.
    """

    latents: Tensor
    frames: Tensor
    ids: Tensor

    def chunks(self, numbers: tuple[int, ...], size: int) -> tuple[Tensor, Tensor]:
        """Return latents [B, C, len(numbers)*size, h, w] and frames of those chunks."""
        at = _places(numbers, size, self.frames.device)
        return self.latents[:, :, at], self.frames[:, at]


class LatentPool:
    """N encoded samples; ``renew`` exchanges the oldest.

    Parameters
    ----------
    size : int
        Samples held, whole batches in each half; the first half of the slots hold contiguous ones.
    stream : StreamConfig
        Chunk length and latent size.
    encode : callable
        Video [B, 3, T, H, W] to latents [B, C, F, h, w].
    text_tokens : int
        Of a caption.
    device : str
        Where everything lives.
    seed : int
        Equal seeds give equal pools.
    count_odds : sequence of float
        Of one, two and three shapes, as `draw_scenes` takes them.
    """

    def __init__(
        self,
        size: int,
        stream: StreamConfig,
        encode: Callable[[Tensor], Tensor],
        text_tokens: int,
        device: str,
        seed: int,
        count_odds: Sequence[float] = COUNT_ODDS,
    ) -> None:
        self.size, self.stream, self.encode, self.device, self.seed = size, stream, encode, device, seed
        self.tokenizer, self.text_tokens, self.count_odds = make_tokenizer(), text_tokens, count_odds
        self.batch = min(BATCH, size // 2)
        shape = (size, 16, CHUNKS * stream.chunk_frames, stream.latent_height, stream.latent_width)
        self.latents = torch.empty(
            shape, dtype=torch.bfloat16 if device.startswith("cuda") else torch.float32, device=device
        )
        self.starts = torch.zeros(size, dtype=torch.int64, device=device)  # latent frame of chunk 1
        self.ids = torch.zeros(size, PHRASINGS, text_tokens, dtype=torch.int64, device=device)
        self.written = 0
        while self.written < size:
            self.renew()

    def renew(self) -> None:
        """Encode the next few scenes into the slots that were written longest ago, in place."""
        half = self.size // 2
        step, self.written = self.written // self.batch, self.written + self.batch
        seed = self.seed * 1_000_003 + step
        scenes = draw_scenes(self.batch, seed + 50_000_000, self.device, count_odds=self.count_odds)
        rng = random.Random(seed)
        contiguous = step % 2 == 0
        # Contiguous samples fill the first half of the slots, the others the second.
        turn, begin = (step // 2) * self.batch, 0 if contiguous else half
        slots = [begin + (turn + i) % half for i in range(self.batch)]
        far = [
            1 if contiguous else max(WARMUP_CHUNKS, round(math.exp(rng.uniform(0, math.log(FARTHEST)))))
            for _ in slots
        ]
        latents = (
            self._clip(scenes, 0, CHUNKS * self.stream.chunk_frames) if contiguous else self._far(scenes, far)
        )
        starts = torch.tensor(far, device=self.device) * self.stream.chunk_frames
        texts = [caption(d, rng) for d in describe(scenes) for _ in range(PHRASINGS)]
        ids = token_ids(self.tokenizer, texts, self.text_tokens).unflatten(0, (-1, PHRASINGS))
        at = torch.tensor(slots, device=self.device)
        self.latents[at] = latents.to(self.latents.dtype)
        self.starts[at] = starts
        self.ids[at] = ids.to(self.device)

    def draw(self, layout: str, count: int, generator: torch.Generator) -> Batch:
        """Draw ``count`` samples that fit the layout, each with one of its captions."""
        half = self.size // 2
        low, high = (
            (0, half) if layout == "start" else (half, self.size) if layout == "window" else (0, self.size)
        )
        at = torch.randint(low, high, (count,), generator=generator, device=self.device)
        phrasing = torch.randint(0, PHRASINGS, (count,), generator=generator, device=self.device)
        chunk = self.stream.chunk_frames
        later = self.starts[at][:, None] + torch.arange((CHUNKS - 1) * chunk, device=self.device)
        first = torch.arange(chunk, device=self.device).expand(count, -1)
        return Batch(self.latents[at].float(), torch.cat((first, later), dim=1), self.ids[at, phrasing])

    def _far(self, scenes: Scenes, chunks: list[int]) -> Tensor:
        size = self.stream.chunk_frames
        first = self._clip(scenes, 0, size)
        # Latent frame j > 0 holds video frames 4j-3 .. 4j: a clip begun at video frame 4*f lines up with f, f+1, ...
        start = torch.tensor([[4 * size * (c - WARMUP_CHUNKS)] for c in chunks], device=self.device)
        later = self._clip(scenes, start, (CHUNKS - 1 + WARMUP_CHUNKS) * size)[:, :, WARMUP_CHUNKS * size :]
        return torch.cat((first, later), dim=2)

    def _clip(self, scenes: Scenes, start: Tensor | int, frames: int) -> Tensor:
        return self.encode(render(scenes, start + torch.arange(4 * frames - 3, device=self.device)))


def sequence_times(sigma: Tensor, clean_frames: int, chunk: int) -> Tensor:
    """Return times [B, S] of a sequence: 0 for clean frames, 1000 * sigma of each noisy chunk (sigma [B, chunks])."""
    noisy = (1000 * sigma).repeat_interleave(chunk, dim=1)
    return torch.cat((noisy.new_zeros(len(sigma), clean_frames), noisy), dim=1)


@functools.cache
def _places(numbers: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Return the frames of chunks, int64; kept, as each copy to a device waits for all of its work."""
    return torch.tensor([n * size + i for n in numbers for i in range(size)], device=device, dtype=torch.long)
