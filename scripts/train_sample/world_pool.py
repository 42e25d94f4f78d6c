"""A pool of encoded walks over worlds, some of which change their look on the way; training draws from it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scripts.train_sample.latent_pool import CHUNKS, FARTHEST
from scripts.train_sample.text import PromptTexts
from scripts.train_sample.train_vae import FrozenVae
from scripts.train_sample.world import Worlds, captions_of, draw_keys, draw_worlds, render, views_of, walk
from seko_export.config.stream import StreamConfig
from seko_export.families.wan_layout.picture_sizes import MASK_CHANNELS, TABLE_FRAMES
from seko_runtime.controls.poses import VIDEO_PER_LATENT

# Rows of a picture's own: from the next on, tables of two pictures were measured to be alike by 0.003 and less.
OWN_ROWS = 9
LATENT_CHANNELS = 16


@dataclass(frozen=True)
class Walks:
    """B walks: what is seen, from where, and what was asked for.

    Parameters
    ----------
    before, after : Worlds
        The look until ``switch``, and from then on.
    switch : Tensor
        [B] int64, the first chunk with the second look; 0 where there is only one.
    poses : Tensor
        [B, F, 3, 4] float32, framewise.
    """

    before: Worlds
    after: Worlds
    switch: Tensor
    poses: Tensor

    def switching_at(self, chunk: int) -> Walks:
        """Return the same walks, all of which change their look with one chunk."""
        return replace(self, switch=torch.full_like(self.switch, chunk))

    def video(self, chunk_frames: int, look: Worlds | None = None) -> Tensor:
        """Return [B, 3, 4F - 3, 96, 96], all in one look if that is given."""
        views = views_of(self.poses)
        if look is not None:
            return render(look, views)
        first = (VIDEO_PER_LATENT * chunk_frames * self.switch - 3).clamp_min(0)  # video frame of the switch
        later = torch.arange(views.shape[1], device=views.device) >= first[:, None]
        return torch.where(
            later[:, None, :, None, None], render(self.after, views), render(self.before, views)
        )


def draw_walks(
    count: int,
    chunks: int,
    chunk_frames: int,
    seed: int,
    device: str,
    *,
    switched: float,
    keys: list[str] | None = None,
) -> Walks:
    """Draw walks of so many chunks, a share of them ``switched``; their keys are drawn, or those given."""
    generator, rng = torch.Generator(device).manual_seed(seed), random.Random(seed)
    frames = chunks * chunk_frames
    before, other = draw_worlds(count, generator), draw_worlds(count, generator, two_figures=0.0)
    changes = torch.rand(count, generator=generator, device=device) < switched
    at = torch.randint(1, chunks, (count,), generator=generator, device=device)
    poses = [walk(draw_keys(frames, rng) if keys is None else keys[i], frames) for i in range(count)]
    return Walks(
        before,
        before.looking_like(other).where(changes, before),
        at * changes,
        torch.stack([torch.from_numpy(pose) for pose in poses]).to(device),
    )


@torch.no_grad()
def picture_rows(vae: FrozenVae, picture: Tensor, rows: int) -> Tensor:
    """Return the first rows [B, 16, rows, h, w] of the condition of pictures [B, 3, H, W], the mask apart."""
    video = picture.new_zeros(*picture.shape[:2], VIDEO_PER_LATENT * (rows - 1) + 1, *picture.shape[2:])
    video[:, :, 0] = picture
    return vae.encode(video)


def rows_at(own: Tensor, tail: Tensor, frames: Tensor) -> Tensor:
    """Return the condition [B, 20, F, h, w] of latent frames [B, F], mask first.

    Parameters
    ----------
    own : Tensor
        [B, 16, rows, h, w], the table's first rows.
    tail : Tensor
        [1, 16, 30, h, w], a whole table, whose later rows are anybody's.
    """
    row = frames.clamp(max=TABLE_FRAMES - 1)
    rows = own.shape[2]
    table = torch.cat((own.float(), tail[:, :, rows:].float().expand(len(own), -1, -1, -1, -1)), 2)
    taken = table.gather(2, row[:, None, :, None, None].expand(-1, table.shape[1], -1, *table.shape[3:]))
    mask = (frames == 0)[:, None, :, None, None].expand(-1, MASK_CHANNELS, -1, *table.shape[3:])
    return torch.cat((mask.float(), taken), 1)


@dataclass(frozen=True)
class WorldBatch:
    """B samples: latents [B, 16, F, h, w], condition [B, 20, F, h, w], frames [B, F], poses [B, F, 3, 4], text, and
    which frames count, [B, F] float32.
    """

    latents: Tensor
    condition: Tensor
    frames: Tensor
    poses: Tensor
    text: Tensor
    judged: Tensor


class WorldPool:
    """N encoded walks of six chunks; ``renew`` exchanges the oldest.

    Parameters
    ----------
    size, batch : int
        Walks held; walks made at once.
    stream : StreamConfig
        Chunk length and latent size.
    vae, texts
        The sample's.
    device : str
        Where everything lives.
    seed : int
        Equal seeds give equal pools.
    switched : float
        Share of walks that change their look.
    """

    def __init__(
        self, size: int, batch: int, stream: StreamConfig, vae: FrozenVae, texts: PromptTexts, device: str, seed: int,
        switched: float,
    ) -> None:  # fmt: skip
        self.size, self.batch, self.stream, self.vae, self.texts = size, batch, stream, vae, texts
        self.device, self.seed, self.switched = device, seed, switched
        frames, latent = CHUNKS * stream.chunk_frames, (stream.latent_height, stream.latent_width)
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(size, *shape, dtype=dtype, device=device)

        self.latents = zeros(LATENT_CHANNELS, frames, *latent)
        self.rows = zeros(LATENT_CHANNELS, OWN_ROWS, *latent)
        self.poses = torch.zeros(size, frames, 3, 4, device=device)
        self.text = zeros(texts.tokens, texts.encoder.config.d_model)
        self.switch = torch.zeros(size, dtype=torch.int64, device=device)
        self.written = 0
        self.tail = torch.empty(0)

    def renew(self) -> None:
        """Make the next few walks, in place of those that were made longest ago."""
        size = self.stream.chunk_frames
        walks = draw_walks(
            self.batch,
            CHUNKS,
            size,
            self.seed * 1_000_003 + self.written,
            self.device,
            switched=self.switched,
        )
        video = walks.video(size)
        at = (torch.arange(self.batch, device=self.device) + self.written) % self.size
        if not self.written:
            self.tail = picture_rows(self.vae, video[:1, :, 0], TABLE_FRAMES)
        self.latents[at] = self.vae.encode(video).to(self.latents.dtype)
        self.rows[at] = picture_rows(self.vae, video[:, :, 0], OWN_ROWS).to(self.rows.dtype)
        self.poses[at], self.switch[at] = walks.poses, walks.switch
        self.text[at] = self.texts(captions_of(walks.after)).to(self.text.dtype)
        self.written += self.batch

    def draw(self, count: int, generator: torch.Generator) -> WorldBatch:
        """Draw samples: half at a stream's beginning, half with chunk 0 there and the others far down the stream."""
        device, size = self.device, self.stream.chunk_frames

        def uniform() -> Tensor:
            return torch.rand(count, generator=generator, device=device)

        at = torch.randint(self.size, (count,), generator=generator, device=device)
        far = uniform() < 0.5
        away = torch.exp(uniform() * math.log(FARTHEST)).round().long() * far
        number = torch.arange(CHUNKS, device=device).repeat_interleave(size)  # chunk of each frame
        frames = torch.arange(CHUNKS * size, device=device) + size * away[:, None] * (number > 0)
        # Far down, what was before chunk 1 is not there: chunk 2 is the first that can follow.
        first = torch.maximum(self.switch[at], 2 * far)
        return WorldBatch(
            self.latents[at].float(),
            rows_at(self.rows[at], self.tail, frames),
            frames,
            self.poses[at],
            self.text[at].float(),
            (number >= first[:, None]).float(),
        )
