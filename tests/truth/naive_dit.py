"""Two references of the causal step, written the naive way: slice writes by Python ints, and a cache that shifts.

`SliceWrites` replaces only the write of the static step and keeps its reads, so results must be equal bit for
bit. `ShiftingDit` shares nothing with `causal_dit.py`: one row, Wan's own weight names, Python-int positions, a
table of complex rotations, softmax written out, and keys in the order of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_kernels.formats import FP4
from seko_kernels.kv_formats import KvFormat
from seko_kernels.kv_reference import encode
from seko_kernels.reference import nvfp4_encode


@dataclass
class SlotList:
    """Which frame each slot of one row holds, kept as a list: frames fill it, then the oldest non-sink goes."""

    sink_frames: int
    cache_frames: int
    frames: list[int] = field(default_factory=list)

    def place(self, frame: int) -> int:
        """Return the slot of ``frame``, giving it one if it has none."""
        if frame in self.frames:
            return self.frames.index(frame)
        if len(self.frames) < self.cache_frames:
            self.frames.append(frame)
            return len(self.frames) - 1
        oldest = min(frame for frame in self.frames if frame >= self.sink_frames)
        slot = self.frames.index(oldest)
        self.frames[slot] = frame
        return slot


class SliceWrites:
    """Reference (a): a KV format whose write is ``cache[start:end] = k`` per row and frame, by Python ints.

    Parameters
    ----------
    form
        The format whose bytes and reads are kept.
    stream
        The layout.
    """

    def __init__(self, form: KvFormat, stream: StreamConfig) -> None:
        self.form, self.stream = form, stream
        self.slots = [SlotList(stream.sink_frames, stream.cache_frames) for _ in range(stream.batch)]
        self.first_frames = [0] * stream.batch

    @property
    def keys_before_rope(self) -> bool:
        """As the format under test."""
        return self.form.keys_before_rope

    @property
    def exact(self) -> tuple[bool, bool]:
        """As the format under test."""
        return self.form.exact

    def start_chunk(self, first_frames: list[int]) -> None:
        """Say where each row stands; a row at frame 0 starts its stream anew."""
        self.first_frames = first_frames
        for row, frame in enumerate(first_frames):
            if frame == 0:
                self.slots[row].frames.clear()

    def write(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        token_index: Tensor,  # noqa: ARG002 - what this reference does without
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Store k and v [B*T, H, D] of the current chunk."""
        n, s = self.stream.frame_tokens, self.stream
        stored = stored_bytes(self.form, scales, k, v)
        apart = f"k{SINK}" in caches or f"v{SINK}" in caches
        for row, first in enumerate(self.first_frames):
            for i in range(s.chunk_frames):
                slot = self.slots[row].place(first + i)
                source = row * s.chunk_tokens + i * n
                for name, tokens in stored.items():
                    cache, frames, place = caches[name], s.cache_frames, slot
                    if name.endswith(SINK):
                        frames = s.sink_frames
                    elif apart and name not in ("k", "v"):
                        frames, place = s.ring_frames, slot - s.sink_frames
                    if 0 <= place < frames:
                        start = (row * frames + place) * n
                        cache[start : start + n] = tokens[source : source + n]

    def expand(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        places: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Read as the format under test does."""
        return self.form.expand(caches, scales, places, dtype)


SINK = "_sink"


def stored_bytes(form: KvFormat, scales: Mapping[str, Tensor], k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """Return what a format stores of tokens [T, H, D], by cache tensor, straight from the references of numbers."""
    stored = {}
    for side, x, exact in zip(("k", "v"), (k, v), form.exact, strict=True):
        if exact:
            stored[side] = x
            continue
        numbers = form.keys if side == "k" else form.values
        g, mean = scales[f"{side}_global_scale"], scales.get(f"{side}_mean")
        codes, groups = nvfp4_encode(x, g, mean) if numbers is FP4 else encode(numbers, x, g, mean)
        stored[f"{side}_codes"] = codes
        if groups is not None:
            stored[f"{side}_scales"] = groups
        if form.exact_sink is not None:
            stored[f"{side}{SINK}"] = x
    return stored


@dataclass(frozen=True)
class CachedFrame:
    """Keys and values of one latent frame in one layer, each [n, H, D]; keys after RoPE."""

    frame: int
    k: Tensor
    v: Tensor


class ShiftingDit:
    """Reference (b): one row of the causal model over a growing list that is cut to sink and window.

    Parameters
    ----------
    model, stream
        Dimensions and layout.
    wan : mapping of str to Tensor
        A checkpoint by Wan's names, q, k and v apart.
    text : Tensor
        [text tokens, text_dim]; everything is computed in its dtype, which is that of the weights, too.
    """

    ROPE_FRAMES = 1024  # rows of the original's tables

    def __init__(
        self, model: ModelConfig, stream: StreamConfig, wan: Mapping[str, Tensor], text: Tensor
    ) -> None:
        self.model, self.stream, self.wan, self.dtype = model, stream, wan, text.dtype
        self.cached: list[list[CachedFrame]] = [[] for _ in range(model.layers)]
        time, side = model.head_dim - 4 * (model.head_dim // 6), 2 * (model.head_dim // 6)
        self.tables = [self._rotations(channels) for channels in (time, side, side)]
        hidden = F.gelu(self._linear("text_embedding.0", text), approximate="tanh")
        self.context = self._linear("text_embedding.2", hidden)  # [text tokens, d]

    @torch.no_grad()
    def step(
        self,
        latents: Tensor,
        timestep: float,
        first_frame: int,
        *,
        commit: bool,
        leading_times: Sequence[float] = (),
    ) -> Tensor:
        """Return the velocity [C, F, h, w] of latents [C, F, h, w]; ``commit`` keeps this pass's K and V.

        ``leading_times`` are the times of the leading frames where they are not ``timestep``.
        """
        model, n = self.model, self.stream.frame_tokens
        frames = list(range(first_frame, first_frame + latents.shape[1]))
        patches = F.conv3d(
            latents[None],
            self.wan["patch_embedding.weight"],
            self.wan["patch_embedding.bias"],
            stride=(1, 2, 2),
        )[0]  # [d, F, rows, columns]
        rows, columns = patches.shape[2:]
        x = [patches[:, i].flatten(1).T for i in range(len(frames))]  # each [n, d]

        half = model.freq_dim // 2
        times = torch.tensor(
            [*leading_times, *[timestep] * (len(frames) - len(leading_times))], dtype=torch.float64
        )
        angle = times[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        time = self._linear("time_embedding.0", torch.cat((angle.cos(), angle.sin()), dim=-1).to(self.dtype))
        time = self._linear("time_embedding.2", F.silu(time)).repeat_interleave(n, dim=0)  # [T, d]
        per_layer = self._linear("time_projection.1", F.silu(time)).view(-1, 6, model.dim)

        x = torch.cat(x)  # [T, d]
        turns = torch.cat([self._grid(frame, rows, columns) for frame in frames])  # [T, D/2] complex
        for layer in range(model.layers):
            at = f"blocks.{layer}"
            e = (self.wan[f"{at}.modulation"] + per_layer).unbind(1)  # six of [T, d]
            y = _layer_norm(x, model.norm_eps) * (1 + e[1]) + e[0]
            q, k = (
                self._rms(f"{at}.self_attn.norm_{x}", self._linear(f"{at}.self_attn.{x}", y)) for x in "qk"
            )
            if self.keys_before_rope:
                k = self._heads(k)
            else:
                q, k = self._turn(q, turns), self._turn(k, turns)
            v = self._heads(self._linear(f"{at}.self_attn.v", y))
            new = [
                CachedFrame(frame, k[i * n : (i + 1) * n], v[i * n : (i + 1) * n])
                for i, frame in enumerate(frames)
            ]
            y = self.attended(layer, frames, q, new, (rows, columns), commit=commit)
            x = self.after_attention(layer, x + self._linear(f"{at}.self_attn.o", y) * e[2])

            y = _layer_norm(x, model.norm_eps) * self.wan[f"{at}.norm3.weight"] + self.wan[f"{at}.norm3.bias"]
            q = self._heads(self._rms(f"{at}.cross_attn.norm_q", self._linear(f"{at}.cross_attn.q", y)))
            text_k = self._rms(f"{at}.cross_attn.norm_k", self._linear(f"{at}.cross_attn.k", self.context))
            text_v = self._linear(f"{at}.cross_attn.v", self.context)
            y = _attend(q, self._heads(text_k), self._heads(text_v))
            x = x + self._linear(f"{at}.cross_attn.o", y)

            y = _layer_norm(x, model.norm_eps) * (1 + e[4]) + e[3]
            y = F.gelu(self._linear(f"{at}.ffn.0", y), approximate="tanh")
            x = self.tail(layer, x + self._linear(f"{at}.ffn.2", y) * e[5])

        e = (self.wan["head.modulation"] + time[:, None]).unbind(1)
        y = self._linear("head.head", _layer_norm(x, model.norm_eps) * (1 + e[1]) + e[0])
        y = y.view(len(frames), rows, columns, 2, 2, model.out_channels)
        return torch.einsum("fhwpqc->cfhpwq", y).reshape(
            model.out_channels, len(frames), rows * 2, columns * 2
        )

    @property
    def keys_before_rope(self) -> bool:
        """Whether cached keys are turned when they are read."""
        return self.stream.window_positions

    def attended(
        self,
        layer: int,
        frames: Sequence[int],
        q: Tensor,
        new: list[CachedFrame],
        grid: tuple[int, int],
        *,
        commit: bool,
    ) -> Tensor:
        """Return the attention [T, H*D] of a chunk's queries to the cached frames and its own."""
        seen = self._window(self.cached[layer] + new, layer)
        if commit:
            self.cached[layer] = seen
        keys = torch.cat([c.k for c in seen])
        if self.keys_before_rope:  # where a frame stands in the list is its position
            turns = [self._grid(place, *grid) for place in range(len(seen))]
            keys = self._turn(keys.flatten(1), torch.cat(turns))
            own = [place for place, c in enumerate(seen) if c.frame in frames]
            q = self._turn(q, torch.cat([turns[place] for place in own]))
        return _attend(q, keys, torch.cat([c.v for c in seen]))

    def after_attention(self, layer: int, x: Tensor) -> Tensor:
        """Return the hidden state [T, d] behind a layer's self-attention; a family may put something there."""
        del layer
        return x

    def tail(self, layer: int, x: Tensor) -> Tensor:
        """Return the hidden state [T, d] behind a layer's feed-forward; a family may put something there."""
        del layer
        return x

    def _window(self, cached: list[CachedFrame], layer: int) -> list[CachedFrame]:
        """Cut to the sink and the last frames of the layer's ring, in the order of time."""
        rings = self.stream.layer_rings or (self.stream.ring_frames,)
        sink = [c for c in cached if c.frame < self.stream.sink_frames]
        rest = [c for c in cached if c.frame >= self.stream.sink_frames]
        return sink + rest[-rings[layer % len(rings)] :]

    def _rotations(self, channels: int) -> Tensor:
        frequency = 1.0 / self.model.rope_theta ** (
            torch.arange(0, channels, 2, dtype=torch.float64) / channels
        )
        angle = torch.outer(torch.arange(self.ROPE_FRAMES, dtype=torch.float64), frequency)
        return torch.polar(torch.ones_like(angle), angle).to(self.dtype.to_complex())

    def _grid(self, frame: int, rows: int, columns: int) -> Tensor:
        time, height, width = self.tables
        place = frame + self.stream.reference_frames * (not self.stream.window_positions)  # tables have no -1
        return torch.stack(
            [torch.cat((time[place], height[i], width[j])) for i in range(rows) for j in range(columns)]
        )

    def _turn(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self._heads(x).unflatten(-1, (-1, 2)).contiguous())  # [T, H, D/2]
        return torch.view_as_real(pairs * turns[:, None, :]).flatten(-2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], self.model.heads, self.model.head_dim)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.wan[f"{name}.weight"].T + self.wan[f"{name}.bias"]

    def _rms(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.model.norm_eps).rsqrt()
        return x * scale * self.wan[f"{name}.weight"]


def _layer_norm(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [T, H*D] of q [T, H, D] over k, v [N, H, D]."""
    weight = torch.softmax(torch.einsum("thd,nhd->htn", q, k) / q.shape[-1] ** 0.5, dim=-1)
    return torch.einsum("htn,nhd->thd", weight, v).flatten(1)
