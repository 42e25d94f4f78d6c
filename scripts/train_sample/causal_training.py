"""The exported causal DiT as one forward over many chunks, and as a stream with a cache; losses are elsewhere.

`CausalDit` has exactly Wan's parameter names and shapes (`families/wan_layout/keys.py`), so its state dict is a
checkpoint of `seko_export`. Teacher forcing: one sequence holds clean context frames and noisy chunks,

    [clean frame, clean frame, ... | noisy chunk, noisy chunk, ...],

each token at its absolute frame and time. A clean frame sees what its context pass saw: the clean frames that were
in the sink and the ring then. A noisy chunk sees itself and the clean frames of earlier chunks that are in the sink
or the ring while it is denoised. A test holds this forward to the exported step, pass by pass.

Shapes: B rows, K clean and M noisy latent frames, S = K + M, n tokens a frame, d width, H heads, D channels a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn

from seko_export.config.model import ModelConfig
from seko_export.config.stream import PATCH, StreamConfig
from seko_export.families.layers.block import RmsNormWeight, attention, gated_residual, modulate, rms_norm
from seko_export.families.layers.causal_dit import Head, patchify, sinusoid
from seko_export.families.layers.rotary import rotary_tables, rotate

Cache = list[
    tuple[Tensor, Tensor]
]  # K (after RoPE) and V of one layer, each [B, cached tokens, H, D], oldest first


class CausalDit(nn.Module):
    """The causal DiT for training: float32 parameters, matmuls in autocast's dtype.

    Parameters
    ----------
    model, stream
        Dimensions and layout, as the exporter takes them.
    """

    def __init__(self, model: ModelConfig, stream: StreamConfig) -> None:
        super().__init__()
        self.model, self.stream = model, stream
        d = model.dim
        self.patch_embedding = nn.Conv3d(model.in_channels, d, (1, PATCH, PATCH), (1, PATCH, PATCH))
        self.text_embedding = nn.Sequential(
            nn.Linear(model.text_dim, d), nn.GELU(approximate="tanh"), nn.Linear(d, d)
        )
        self.time_embedding = nn.Sequential(nn.Linear(model.freq_dim, d), nn.SiLU(), nn.Linear(d, d))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))
        self.blocks = nn.ModuleList(self.make_layer() for _ in range(model.layers))
        self.head = _Head(model, stream)

    def make_layer(self) -> Block:
        """Return one new layer."""
        return Block(self.model)

    def forward(
        self,
        clean: Tensor,
        noisy: Tensor,
        times: Tensor,
        text: Tensor,
        frames: Tensor,
        mask: Tensor,
        camera: Tensor | None = None,
        text_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the velocity of the noisy chunks.

        Parameters
        ----------
        clean, noisy : Tensor
            [B, C, K, h, w] (K may be 0) and [B, C, M, h, w] float32.
        times : Tensor
            [B, S] float32, 0..1000, of each frame of the sequence; the context time for clean ones.
        text : Tensor
            [B, text tokens, text_dim], zero-padded.
        frames : Tensor
            [B, S] int64, absolute latent-frame numbers, clean first.
        mask : Tensor
            [1 or B, 1, S*n, S*n] bool from `sequence_mask`.
        camera : Tensor, optional
            [B, S*n, d], what layers with a camera take.
        text_mask : Tensor, optional
            [B, 1, S*n, text tokens] bool: which text tokens each token sees, where ``text`` holds several prompts.

        Returns
        -------
        Tensor
            [B, C, M, h, w] float32.
        """
        x, time, modulation, cos, sin = self._embed(torch.cat((clean, noisy), dim=2), times, frames)
        context = self.text_embedding(text)
        for block in self._layers:
            x, _ = block(x, modulation, cos, sin, block.text_kv(context), None, mask, camera, text_mask)
        made = noisy.shape[2]
        velocity: Tensor = self.head(x[:, -made * self.stream.frame_tokens :], time[:, -made:])
        return velocity

    def text_kv(self, text: Tensor) -> Cache:
        """Return every layer's cross-attention K and V of a prompt [B, text tokens, text_dim]."""
        context = self.text_embedding(text)
        return [block.text_kv(context) for block in self._layers]

    def step(
        self,
        latents: Tensor,
        times: Tensor,
        frames: Tensor,
        text_kv: Cache,
        cache: Cache | None,
        camera: Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        """Run one pass of one chunk behind a cache, as the exported step does.

        Parameters
        ----------
        latents, times, frames
            [B, C, F, h, w], [B, F], [B, F] of the chunk; all rows stand at the same place of their cache.
        text_kv : Cache
            From `text_kv`.
        cache : Cache or None
            What earlier context passes gave back; None at the start.
        camera : Tensor, optional
            [B, F*n, d], as in `forward`.

        Returns
        -------
        velocity : Tensor
            [B, C, F, h, w] float32.
        cache : Cache
            The cache with this chunk in it, cut to sink and ring: keep it after a context pass only.
        """
        x, time, modulation, cos, sin = self._embed(latents, times, frames)
        n, s = self.stream.frame_tokens, self.stream
        fresh: Cache = []
        for layer, block in enumerate(self._layers):
            cached = None if cache is None else cache[layer]
            cut = 0 if cached is None else max(0, cached[0].shape[1] // n + frames.shape[1] - s.cache_frames)
            if cached is not None and cut:  # the oldest frames behind the sink go, before this chunk looks
                k, v = (
                    torch.cat((t[:, : s.sink_frames * n], t[:, (s.sink_frames + cut) * n :]), 1)
                    for t in cached
                )
                cached = (k, v)
            x, written = block(x, modulation, cos, sin, text_kv[layer], cached, None, camera)
            fresh.append(written)
        return self.head(x, time), fresh

    @property
    def _layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _embed(self, latents: Tensor, times: Tensor, frames: Tensor) -> tuple[Tensor, ...]:
        weight = self.patch_embedding.weight.flatten(1)
        x = F.linear(patchify(latents), weight, self.patch_embedding.bias).float()  # [B, S*n, d]
        with torch.autocast(
            latents.device.type, enabled=False
        ):  # time and modulation in float32, as exported
            time = self.time_embedding(sinusoid(times, self.model.freq_dim))  # [B, S, d]
            modulation = self.time_projection(time).unflatten(-1, (6, self.model.dim))
        return x, time, modulation, *rotary_tables(frames, self.model, self.stream)


def sequence_mask(
    clean_frames: Sequence[int], noisy_frames: Sequence[int], stream: StreamConfig, device: torch.device | str
) -> Tensor:
    """Return which token sees which, [1, 1, S*n, S*n] bool, for one row's clean and noisy frame numbers.

    Frames of a chunk are whole multiples of ``chunk_frames`` in both lists. Only order and distance to the ring
    matter, so rows that stand elsewhere share the mask if their frames lie alike: sink, gap beyond the ring, window.
    """
    chunk, sink, ring = stream.chunk_frames, stream.sink_frames, stream.ring_frames
    frames = torch.tensor([*clean_frames, *noisy_frames], device=device)
    noisy = torch.arange(len(frames), device=device) >= len(clean_frames)
    start = frames // chunk * chunk  # of each frame's chunk
    end = (start + chunk)[:, None]
    in_cache = (frames < sink) | (frames >= end - ring)  # [S, S]: row looks, column is seen
    same = start[:, None] == start
    # The noisy copy of a chunk takes the slots of the clean one, which is not written yet.
    sees_clean = torch.where(noisy[:, None], frames < start[:, None], frames < end) & in_cache & ~noisy
    sees_noisy = noisy[:, None] & noisy & same & in_cache
    seen = sees_clean | sees_noisy
    n = stream.frame_tokens
    return seen.repeat_interleave(n, 0).repeat_interleave(n, 1)[None, None]


def init_weights(model: CausalDit, seed: int) -> None:
    """Draw the weights as Wan does: Xavier matrices, small embeddings, a zero head (the first output is zero)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.fill_(1.0)
            elif name.endswith("modulation"):
                p.copy_(torch.randn(p.shape, generator=generator) / model.model.dim**0.5)
            elif name.endswith("bias") or name.startswith("head.head"):
                p.zero_()
            else:
                fan_out, fan_in = p.shape[0], p[0].numel()
                std = 0.02 if "embedding" in name and "patch" not in name else (2 / (fan_in + fan_out)) ** 0.5
                p.copy_(torch.randn(p.shape, generator=generator) * std)


class Block(nn.Module):
    """One layer; the maths of `block.Block` over a masked sequence or behind a cache."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        d, self.eps, self.heads = model.dim, model.norm_eps, (model.heads, model.head_dim)
        self.modulation = nn.Parameter(torch.empty(1, 6, d))
        self.self_attn = _Attention(model)
        self.norm3 = nn.LayerNorm(d, model.norm_eps)
        self.cross_attn = _Attention(model)
        self.ffn = nn.Sequential(
            nn.Linear(d, model.ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(model.ffn_dim, d)
        )

    def text_kv(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prompt's K and V, each [B, text tokens, H, D]."""
        a = self.cross_attn
        k, v = rms_norm(a.k(context), a.norm_k), a.v(context)
        return k.to(v.dtype).unflatten(-1, self.heads), v.unflatten(-1, self.heads)

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        cos: Tensor,
        sin: Tensor,
        text_kv: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        camera: Tensor | None = None,
        text_mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the next hidden state [B, S*n, d] float32, and K and V with ``cached`` before them."""
        per_frame = (self.modulation.unsqueeze(0) + modulation).unsqueeze(3)  # [B, S, 6, 1, d]
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = per_frame.unbind(2)
        a = self.self_attn
        y = self._modulated(x, shift_1, scale_1)
        v = a.v(y).unflatten(-1, self.heads)
        q = rotate(rms_norm(a.q(y), a.norm_q).unflatten(-1, self.heads), cos, sin).to(v.dtype)
        k = rotate(rms_norm(a.k(y), a.norm_k).unflatten(-1, self.heads), cos, sin).to(v.dtype)
        if cached is not None:
            k, v = torch.cat((cached[0], k), dim=1), torch.cat((cached[1], v), dim=1)
        x = self.steered(gated_residual(x, a.o(attention(q, k, v, mask)), gate_1), camera)
        a = self.cross_attn
        q = rms_norm(a.q(self.norm3(x)), a.norm_q).to(v.dtype).unflatten(-1, self.heads)
        x = x + a.o(attention(q, *text_kv, text_mask))
        return gated_residual(x, self.ffn(self._modulated(x, shift_2, scale_2)), gate_2), (k, v)

    def _modulated(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Return the norm of x [B, S*n, d], scaled and shifted per frame by [B, S, 1, d]."""
        return modulate(F.layer_norm(x, (x.shape[-1],), eps=self.eps), shift, scale)

    def steered(self, x: Tensor, camera: Tensor | None) -> Tensor:
        """Return the hidden state behind self-attention, with what a camera makes of it: here nothing."""
        del camera
        return x


class _Attention(nn.Module):
    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        d = model.dim
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.norm_q, self.norm_k = RmsNormWeight(model), RmsNormWeight(model)


class _Head(Head):
    """The exported head for any number of frames, in float32 whatever the layers compute in."""

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.modulation.unsqueeze(0) + time.unsqueeze(2)).unsqueeze(3).unbind(2)
        with torch.autocast(hidden.device.type, enabled=False):
            x = F.layer_norm(hidden, (hidden.shape[-1],), eps=self.model.norm_eps)
            x = self.head(modulate(x, shift, scale))
        rows, columns = self.stream.latent_height // PATCH, self.stream.latent_width // PATCH
        x = x.reshape(x.shape[0], time.shape[1], rows, columns, PATCH, PATCH, self.model.out_channels)
        velocity: Tensor = x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)
        return velocity
