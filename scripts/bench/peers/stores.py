"""How the two peers hold a cache: shifted, with counters on the device (B0), and a ring at fixed addresses (B3).

A store writes and reads inside attention (`attend`, a function of one layer's tensors, so that it can be compiled) and
shows what it holds (`tokens`), for the check. Queries, keys and values are [B, T, H, D].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from seko_export.config.video import VideoBuild
from seko_export.families.layers.block import attention
from seko_runtime.video.ring import Ring


class Kv(NamedTuple):
    """Keys and values of one layer, [B, N, H, D]."""

    k: Tensor
    v: Tensor


class CountedKv(NamedTuple):
    """The same with its two counters, [1] int64 on the device."""

    k: Tensor
    v: Tensor
    filled: Tensor  # tokens in the cache
    seen: Tensor  # tokens of the stream


class ShiftedStore:
    """Window in the order of time; when full, all behind the sink is cloned and moved.

    Its counters are on the device, read with ``.item()`` by every layer of every pass.
    """

    by_slot = False  # frames lie in the order of time

    def __init__(self, config: VideoBuild) -> None:
        self.config, s = config, config.workload.stream
        self.size, self.chunk = s.cache_tokens, s.chunk_tokens
        self.sink = s.sink_frames * s.frame_tokens
        self.layers: list[Any] = [self._empty_layer() for _ in range(config.model.layers)]

    def place(self, first_frame: int) -> int:
        """Return where the chunk ends in the stream; all else the layers look up themselves."""
        return first_frame * self.config.workload.stream.frame_tokens + self.chunk

    def attend(self, layer: CountedKv, q: Tensor, k: Tensor, v: Tensor, place: int) -> Tensor:
        """Make room, write k and v by slices, and return attention of q over what is held: [B, T, H*D]."""
        filled, seen = int(layer.filled.item()), int(layer.seen.item())
        evicted = max(0, filled + place - seen - self.size)
        stop = filled + place - seen - evicted
        start = stop - self.chunk
        for cache, new in ((layer.k, k), (layer.v, v)):
            if evicted:
                cache[:, self.sink : start] = cache[:, self.sink + evicted : start + evicted].clone()
            cache[:, start:stop] = new
        y = attention(q, layer.k[:, :stop], layer.v[:, :stop], None)
        layer.filled.fill_(stop)
        layer.seen.fill_(place)
        return y

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer in the order of time, [B, tokens, H, D]."""
        layer = self.layers[number]
        filled = int(layer.filled.item())
        return layer.k[:, :filled], layer.v[:, :filled]

    @property
    def kv_bytes(self) -> int:
        """Bytes that keys and values take between chunks."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)

    def _empty_layer(self) -> CountedKv:
        filled, seen = (torch.zeros(1, dtype=torch.int64, device=self.config.target.device) for _ in range(2))
        return CountedKv(*_empty(self.config), filled, seen)


class RingStore:
    """A fixed cache of sink and window, written by index: nothing is ever moved. For static steps.

    `attend` takes the index and a bias, tensors both, or no bias once the cache is full.
    """

    by_slot = True  # a frame lies at its ring slot

    def __init__(self, config: VideoBuild) -> None:
        self.config, s = config, config.workload.stream
        self.ring = Ring(s.sink_frames, s.ring_frames, s.chunk_frames)
        self.layers: list[Any] = [
            Kv(*(t.flatten(0, 1) for t in _empty(config))) for _ in range(config.model.layers)
        ]

    def attend(
        self, layer: Kv, q: Tensor, k: Tensor, v: Tensor, place: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        """Write k and v, and return attention of q over what is held: [B, T, H*D]."""
        index, bias = place
        layer.k.index_copy_(0, index, k.flatten(0, 1))
        layer.v.index_copy_(0, index, v.flatten(0, 1))
        rows = (q.shape[0], -1)
        return attention(q, layer.k.unflatten(0, rows), layer.v.unflatten(0, rows), bias)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer in the order of slots, [B, tokens, H, D]."""
        layer, rows = self.layers[number], (self.config.workload.stream.batch, -1)
        return layer.k.unflatten(0, rows), layer.v.unflatten(0, rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes that keys and values take between chunks."""
        return sum(layer.k.nbytes + layer.v.nbytes for layer in self.layers)


def _empty(config: VideoBuild) -> tuple[Tensor, Tensor]:
    m, s = config.model, config.workload.stream
    shape = (s.batch, s.cache_tokens, m.heads, m.head_dim)
    k, v = (torch.zeros(shape, dtype=config.target.dtype, device=config.target.device) for _ in range(2))
    return k, v
