"""Modules of models that denoise several chunks in one pass, each at its own time, as Rolling Forcing's do.

A pass has a window of N chunks. The oldest has the smallest time and is finished by the pass; the newest begins as
noise. The other chunks are renoised to their next time and kept for the next pass, whose window begins one chunk later.
A stream's first chunk takes N passes, in which one chunk after the other enters the window. A finished chunk is written
to the cache by a context pass, which has the frames of that chunk alone.

Attention sees R frames at most, R being the stream's ``ring_frames``: a window sees the sink, the newest frames before
it, and all of itself; a context pass sees the R - F frames before its chunk, and the chunk. The sink's keys have, for a
window, the positions in front of the oldest other frame that it sees; all other positions are frame numbers. The cache
therefore stores keys before RoPE. Slots follow from frame numbers, so a cache cannot be rebuilt from part of a stream.

Shapes use the letters that `causal_dit` defines; W is the number of frames of a window, M the number of cached frames
that a pass sees, n the number of tokens of a frame, and S the number of rows of the caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.block import Block, LayerInputs, attention, window_attention
from seko_export.families.layers.causal_dit import Embed, patchify, sinusoid
from seko_export.families.layers.ring_positions import token_index
from seko_export.families.layers.rotary import rotary_tables, rotate
from seko_export.families.layers.sampler import gaussian

BANKS = 2  # a chunk reads the latents of one bank and writes the other one's, so it can be run again


@dataclass(frozen=True)
class Window:
    """The frames of a pass over several chunks.

    Parameters
    ----------
    stream : StreamConfig
        Layout of the stream; its ``ring_frames`` are the most frames that attention sees.
    chunks : int
        Number of chunks in a window.
    """

    stream: StreamConfig
    chunks: int

    @property
    def frames(self) -> int:
        """Number of latent frames in a window, W."""
        return self.chunks * self.stream.chunk_frames

    @property
    def working_frames(self) -> int:
        """Most frames behind the sink that a window sees of the cache."""
        return self.stream.ring_frames - self.frames - self.stream.sink_frames

    @property
    def past_frames(self) -> int:
        """Number of cached frames that a window sees at most, M."""
        return self.stream.sink_frames + self.working_frames

    @property
    def context_frames(self) -> int:
        """Number of cached frames that a context pass sees at most, M."""
        return self.stream.ring_frames - self.stream.chunk_frames

    @property
    def as_chunk(self) -> StreamConfig:
        """A stream whose chunk is the window, for modules that only ask for sizes of a chunk."""
        return replace(
            self.stream, chunk_frames=self.frames, sink_frames=0, ring_frames=self.frames, rolling=False
        )

    def parity(self, frames: Tensor) -> Tensor:
        """Return the bank [B] from which the chunk with these frames [B, F] is read: 0 or 1, by the chunk's number."""
        number: Tensor = frames[:, 0] // self.stream.chunk_frames % BANKS
        return number

    def numbers(self, frames: Tensor) -> Tensor:
        """Return the frame numbers [B, W] of the window that begins with a chunk's frames [B, F]."""
        return frames[:, :1] + torch.arange(self.frames, device=frames.device)

    def seen(self, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return slot, position and presence [B, M] of the cached frames that a window sees; ``frames`` [B, F] are
        those of its first chunk."""
        s, first, device = self.stream, frames[:, :1], frames.device
        working = first - self.working_frames + torch.arange(self.working_frames, device=device)
        sink = torch.arange(s.sink_frames, device=device).expand(len(first), -1)
        length = (first - s.sink_frames).clamp(0, self.working_frames)  # of the working frames that are there
        return (
            torch.cat((sink, self.slot(working)), 1),
            torch.cat((first - length - s.sink_frames + sink, working), 1),
            torch.cat(((first > 0).expand_as(sink), working >= s.sink_frames), 1),
        )

    def seen_by_context(self, frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return slot, position and presence [B, M] of the cached frames that a chunk's context pass sees."""
        past = frames[:, :1] - self.context_frames + torch.arange(self.context_frames, device=frames.device)
        return self.slot(past), past, past >= 0

    def slot(self, frames: Tensor) -> Tensor:
        """Return the slot of each frame; of a frame before the stream's beginning any slot."""
        s = self.stream
        return torch.where(
            frames < s.sink_frames,
            frames.clamp(min=0),
            s.sink_frames + (frames - s.sink_frames) % s.ring_frames,
        )


class RollingEmbed(Embed):
    """The beginning of a pass: of a window, or with ``context`` of a context pass."""

    groups = ()  # no argument is a mapping

    def __init__(self, model: ModelConfig, window: Window, dtype: torch.dtype, *, context: bool) -> None:
        super().__init__(model, window.stream, dtype, key_rotary=False)
        self.window, self.context = window, context

    def forward(  # type: ignore[override]
        self,
        latents: Tensor,
        timestep: Tensor,
        frames: Tensor,
        entered: Tensor | None = None,
        write_slots: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Embed the latents of a pass.

        Parameters
        ----------
        latents : Tensor
            Latents of the pass's frames, float32 [B, C, W, h, w], or [B, C, F, h, w] in a context pass.
        timestep : Tensor
            Timestep of each frame, float32 [W]; [1] for all frames of a context pass.
        frames : Tensor
            Numbers of the first chunk's frames, int64 [B, F].
        entered : Tensor, optional
            Whether the frame's chunk has entered the window, int64 [W]; None in a context pass.
        write_slots : Tensor, optional
            Cache slots of the chunk's frames, int64 [B, F]; only in a context pass.
        rows : Tensor, optional
            The row of the pool for each batch index, int64 [B]; only in a pool.

        Returns
        -------
        hidden, modulation, time, cos, sin : Tensor
            As `Embed` returns them.
        seen_tokens : Tensor
            Index into the flat cache of each cached token that the pass sees, int64 [B*M*n].
        seen_cos, seen_sin : Tensor
            Rotary tables of these tokens, float32 [B, M*n, D/2].
        seen : Tensor
            Whether there is each frame of the keys, cached ones first, bool [B, M+W] or [B, M+F].
        token_index : Tensor
            Index into the flat cache to which each token is written, int64 [B*T]; only in a context pass.
        """
        s, window = self.stream, self.window
        own = frames if self.context else window.numbers(frames)
        hidden = self.patch_embedding(patchify(latents).to(self.patch_embedding.weight.dtype))
        time = self.time_embedding(sinusoid(timestep.expand(own.shape), self.model.freq_dim))  # [B, W, d]
        modulation = self.time_projection(time).unflatten(-1, (6, self.model.dim))
        cos, sin = rotary_tables(own, self.model, s)
        slots, positions, there = window.seen_by_context(frames) if self.context else window.seen(frames)
        seen_cos, seen_sin = rotary_tables(positions, self.model, s)
        present = (
            torch.ones_like(own, dtype=torch.bool) if entered is None else (entered > 0).expand(own.shape)
        )
        results = (hidden, modulation, time, cos, sin, token_index(slots, s, rows), seen_cos, seen_sin)
        seen = torch.cat((there, present), 1)
        if write_slots is None:
            return (*results, seen)
        return (*results, seen, token_index(write_slots, s, rows))


class RollingBlock(Block):
    """One transformer layer of a window, or of a context pass, which writes its keys and values.

    Parameters
    ----------
    masked : bool
        Whether attention sees only the frames that are there; False for rows whose caches are full, where all are.
    """

    groups = ("caches",)

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        modulation: Tensor,
        cos: Tensor,
        sin: Tensor,
        seen_tokens: Tensor,
        seen_cos: Tensor,
        seen_sin: Tensor,
        seen: Tensor,
        text_k: Tensor,
        text_v: Tensor,
        caches: Mapping[str, Tensor],
        token_index: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the next hidden state [B, T, d]; with ``token_index`` also write keys before RoPE, and values. The
        parameters are results of `RollingEmbed`, or those of `Block.forward` with the same names."""
        none: dict[str, Tensor] = {}
        inputs = LayerInputs(text_k, text_v, caches, rows, None, none, none, none, None, None, none, none)

        def attend(qkv: Tensor) -> Tensor:
            q, k, v, unturned = self._norm_rope(qkv, cos, sin)
            past_k, past_v = (
                caches[side].index_select(0, seen_tokens).unflatten(0, (q.shape[0], -1))
                for side in ("k", "v")
            )
            keys = torch.cat((rotate(past_k.float(), seen_cos, seen_sin).to(k.dtype), k), 1)
            values = torch.cat((past_v, v), 1)
            if self.masked:
                there = seen.repeat_interleave(self.stream.frame_tokens, 1)[:, :, None, None]  # [B, N, 1, 1]
                bias = torch.where(there, 0.0, float("-inf")).to(q.dtype).transpose(1, 3)  # [B, 1, 1, N]
                y = attention(q, keys.masked_fill(~there, 0), values.masked_fill(~there, 0), bias)
            else:
                y = window_attention(q, keys, values, None)
            if token_index is not None:
                self.kv.write(caches, none, token_index, unturned.flatten(0, 1), v.flatten(0, 1))
            return y

        return self._layer(hidden, modulation, inputs, attend)


class RollingNoise(nn.Module):
    """The latents with which a chunk's window begins: those that the pass before left, and noise for its newest chunk;
    all noise at a stream's first chunk."""

    def __init__(self, model: ModelConfig, window: Window) -> None:
        super().__init__()
        self.window = window
        self.latent_shape = (model.out_channels, window.stream.latent_height, window.stream.latent_width)

    def forward(
        self, seeds: Tensor, frames: Tensor, draw: Tensor, banks: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Return the latents [B, C, W, h, w] float32.

        Parameters
        ----------
        seeds, frames, draw : Tensor
            Seed [B], numbers of the chunk's frames [B, F] and number of the draw [1], all int64.
        banks : Tensor
            The latents that passes leave for the next one, float32 [S*BANKS, C, W, h, w].
        rows : Tensor, optional
            The row of the pool for each batch index, int64 [B]; only in a pool.
        """
        window, first = self.window, frames[:, :1]
        noise = gaussian(seeds, window.numbers(frames), draw, self.latent_shape)
        of_call = torch.arange(len(first), device=first.device) if rows is None else rows
        left = banks.index_select(0, of_call * BANKS + window.parity(frames))
        places = torch.arange(window.frames, device=first.device)
        kept = (first > 0) & (places < window.frames - window.stream.chunk_frames)  # [B, W]
        return torch.where(kept[:, None, :, None, None], left, noise)


class RollingAdvance(nn.Module):
    """The end of a pass over a window: each chunk that has entered it is denoised, and renoised to its next time."""

    def __init__(self, model: ModelConfig, window: Window) -> None:
        super().__init__()
        self.window = window
        self.latent_shape = (model.out_channels, window.stream.latent_height, window.stream.latent_width)

    def forward(
        self,
        latents: Tensor,
        velocity: Tensor,
        sigma: Tensor,
        sigma_next: Tensor,
        draw: Tensor,
        entered: Tensor,
        seeds: Tensor,
        frames: Tensor,
        banks: Tensor,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the window's next latents [B, C, W, h, w], and the denoised latents of its first chunk
        [B, C, F, h, w]; write the latents of the next chunk's window to a bank.

        Parameters
        ----------
        latents, velocity : Tensor
            Latents before the pass, and the predicted velocity, float32 [B, C, W, h, w].
        sigma, sigma_next : Tensor
            Noise level of each frame before and after the pass, float32 [W].
        draw : Tensor
            Number of each frame's draw of noise, int64 [W].
        entered : Tensor
            Whether the frame's chunk has entered the window, int64 [W]; others do not change.
        seeds, frames, banks, rows : Tensor
            The parameters of `RollingNoise.forward` with the same names; ``banks`` is written in place.
        """
        window, chunk = self.window, self.window.stream.chunk_frames

        def by_frame(x: Tensor) -> Tensor:
            return x[:, None, None]  # [W, 1, 1]

        clean = latents - by_frame(sigma) * velocity
        noise = gaussian(seeds, window.numbers(frames), draw[:, None], self.latent_shape)
        level = by_frame(sigma_next)
        following = torch.where(by_frame(entered) > 0, (1 - level) * clean + level * noise, latents)
        of_call = torch.arange(len(frames), device=frames.device) if rows is None else rows
        bank = of_call * BANKS + 1 - window.parity(frames)
        banks.index_copy_(0, bank, following.roll(-chunk, 2))
        return following, clean[:, :, :chunk].contiguous()
