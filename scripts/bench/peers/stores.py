"""Five ways in which peers hold a cache, each as its system was described: shifted, ring, joined, int4, NVFP4.

A store says where a chunk goes (`place`, host arithmetic once a pass), writes and reads inside attention (`attend`, a
function of one layer's tensors, so that it can be compiled), and shows what it holds (`tokens`), for the check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from seko_export.config.build import BuildConfig
from seko_export.families.layers.block import attention
from seko_export.families.layers.ring_positions import token_index
from seko_kernels.formats import NVFP4_BLOCK
from seko_kernels.ops import nvfp4_expand, nvfp4_write
from seko_kernels.reference import nvfp4_global_scale
from seko_runtime.video.ring import Ring

INT4_GROUP = 64  # channels of one token that share a scale and an offset
INT4_TOP = 15  # largest code
# Largest magnitude that the NVFP4 scales are made for; the format holds eight times more. Normed keys and the
# values of random weights stay below it.
NVFP4_AMAX = 8.0


class Store(Protocol):
    """What a peer needs of a cache."""

    by_slot: bool  # whether a frame lies at its ring slot; else frames lie in the order of time
    layers: list[Any]

    def place(self, first_frame: int, *, context: bool) -> Any:
        """Return where the chunk goes in this pass."""

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, place: Any) -> Tensor:
        """Write k and v, return attention of q over what is held: [B, T, H*D] of [B, T, H, D]."""

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, [B, tokens, H, D], expanded."""

    @property
    def kv_bytes(self) -> int:
        """Bytes that keys and values take between chunks."""


class Span(NamedTuple):
    """Tokens of a shifted cache: the chunk's own, and how many behind the sink are dropped before it is written."""

    start: int
    stop: int
    evicted: int
    sink: int


class Kv(NamedTuple):
    """Keys and values of one layer, [B, N, H, D]."""

    k: Tensor
    v: Tensor


class CountedKv(NamedTuple):
    """The same with its two counters, [1] int64 on the device."""

    k: Tensor
    v: Tensor
    held: Tensor  # tokens in the cache
    seen: Tensor  # tokens of the stream


class ShiftedStore:
    """Window in the order of time; when full, all behind the sink is cloned and moved. Counters are Python ints."""

    by_slot = False

    def __init__(self, config: BuildConfig) -> None:
        self.config, s = config, config.stream
        self.size, self.chunk = s.cache_tokens, s.chunk_tokens
        self.sink = s.sink_frames * s.frame_tokens
        self.held = self.seen = 0
        self.layers: list[Any] = [Kv(*_empty(config)) for _ in range(config.model.layers)]

    def place(self, first_frame: int, *, context: bool) -> Span:  # noqa: ARG002 - the protocol's
        """Return the span, and count it."""
        stop = first_frame * self.config.stream.frame_tokens + self.chunk
        span = self.span(self.held, self.seen, stop)
        self.held, self.seen = span.stop, stop
        return span

    def span(self, held: int, seen: int, stop: int) -> Span:
        """Return where the tokens up to ``stop`` of the stream go."""
        evicted = max(0, held + stop - seen - self.size)
        end = held + stop - seen - evicted
        return Span(end - self.chunk, end, evicted, self.sink)

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, place: Span) -> Tensor:
        """See `Store`."""
        return shift_and_attend(layer.k, layer.v, q, k, v, place)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """See `Store`."""
        layer = self.layers[number]
        return layer.k[:, : self.held], layer.v[:, : self.held]

    @property
    def kv_bytes(self) -> int:
        """See `Store`."""
        return _bytes(self.layers)


class CountedStore(ShiftedStore):
    """The same with its counters on the device, read with ``.item()`` by every layer of every pass."""

    def __init__(self, config: BuildConfig) -> None:
        super().__init__(config)
        counter = (
            torch.zeros(1, dtype=torch.int64, device=config.device) for _ in range(2 * len(self.layers))
        )
        self.layers = [CountedKv(*layer, next(counter), next(counter)) for layer in self.layers]

    def place(self, first_frame: int, *, context: bool) -> int:  # noqa: ARG002
        """Return where the chunk ends in the stream; all else the layers look up themselves."""
        return first_frame * self.config.stream.frame_tokens + self.chunk

    def attend(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, place: int) -> Tensor:
        """See `Store`."""
        span = self.span(int(layer.held.item()), int(layer.seen.item()), place)
        y = shift_and_attend(layer.k, layer.v, q, k, v, span)
        layer.held.fill_(span.stop)
        layer.seen.fill_(place)
        return y

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """See `Store`."""
        layer = self.layers[number]
        held = int(layer.held.item())
        return layer.k[:, :held], layer.v[:, :held]


def shift_and_attend(k_cache: Tensor, v_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
    """Make room, write by slices, read by slices."""
    start, stop, evicted, sink = span
    for cache, new in ((k_cache, k), (v_cache, v)):
        if evicted:
            cache[:, sink:start] = cache[:, sink + evicted : start + evicted].clone()
        cache[:, start:stop] = new
    return attention(q, k_cache[:, :stop], v_cache[:, :stop], None)


class JoinedStore:
    """Past and chunk are joined by clone and cat on every forward; the context pass keeps what it joined."""

    by_slot = False

    def __init__(self, config: BuildConfig) -> None:
        s = config.stream
        self.sink, self.ring = s.sink_frames * s.frame_tokens, s.ring_frames * s.frame_tokens
        k, v = _empty(config)
        self.layers = [[k[:, :0], v[:, :0]] for _ in range(config.model.layers)]

    def place(self, first_frame: int, *, context: bool) -> bool:  # noqa: ARG002 - the protocol's
        """Return whether this pass is kept."""
        return context

    def attend(self, layer: list[Tensor], q: Tensor, k: Tensor, v: Tensor, place: bool) -> Tensor:
        """See `Store`."""
        joined = [self._window(old.clone(), new) for old, new in zip(layer, (k, v), strict=True)]
        if place:
            layer[:] = joined
        return attention(q, *joined, None)

    def _window(self, old: Tensor, new: Tensor) -> Tensor:
        over = max(0, old.shape[1] + new.shape[1] - self.sink - self.ring)
        parts = (old[:, : self.sink], old[:, self.sink + over :], new) if over else (old, new)
        return torch.cat(parts, dim=1)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """See `Store`."""
        k, v = self.layers[number]
        return k, v

    @property
    def kv_bytes(self) -> int:
        """See `Store`."""
        return _bytes(self.layers)


class Slots(NamedTuple):
    """Where a chunk goes in a ring of fixed size, and how much of it is filled."""

    index: Tensor  # [B*T] int64: row of the flat cache [B*N, ...]
    valid: int  # tokens of a row that hold something, this chunk included


class _RingStore:
    """What stores with a fixed place for every frame share."""

    by_slot = True

    def __init__(self, config: BuildConfig) -> None:
        self.config, s = config, config.stream
        self.ring = Ring(s.sink_frames, s.ring_frames, s.chunk_frames)
        self.layers: list[Any] = []

    def place(self, first_frame: int, *, context: bool) -> Slots:  # noqa: ARG002 - the protocol's
        """Return the rows of the flat cache, and how far it is filled."""
        s = self.config.stream
        slots = torch.tensor([self.ring.write_slots(first_frame)] * s.batch)
        index = token_index(slots, s)
        if self.config.device == "cuda":
            index = index.pin_memory().to("cuda", non_blocking=True)
        return Slots(index, self.ring.valid_frames(first_frame) * s.frame_tokens)

    def _filled(self, x: Tensor, valid: int) -> Tensor:
        """Return the filled tokens [B, valid, H, D] of a flat window [B*N, H, D]."""
        return x.unflatten(0, (self.config.stream.batch, -1))[:, :valid]

    @property
    def kv_bytes(self) -> int:
        """See `Store`."""
        return _bytes(self.layers)


class RingStore(_RingStore):
    """A fixed cache of sink and window, written by index: nothing is ever moved. For static steps.

    `attend` takes the index and a bias, tensors both, or no bias once the cache is full.
    """

    def __init__(self, config: BuildConfig) -> None:
        super().__init__(config)
        self.layers = [Kv(*(t.flatten(0, 1) for t in _empty(config))) for _ in range(config.model.layers)]

    def attend(
        self, layer: Kv, q: Tensor, k: Tensor, v: Tensor, place: tuple[Tensor, Tensor | None]
    ) -> Tensor:
        """See `Store`."""
        index, bias = place
        layer.k.index_copy_(0, index, k.flatten(0, 1))
        layer.v.index_copy_(0, index, v.flatten(0, 1))
        rows = (q.shape[0], -1)
        return attention(q, layer.k.unflatten(0, rows), layer.v.unflatten(0, rows), bias)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """See `Store`."""
        layer, s = self.layers[number], self.config.stream
        return self._filled(layer.k, s.cache_tokens), self._filled(layer.v, s.cache_tokens)


class Int4Kv(NamedTuple):
    """Keys or values of one layer in int4, [B*N, ...]."""

    codes: Tensor  # [B*N, H, D/2] uint8
    scale: Tensor  # [B*N, H, D/64], compute dtype
    low: Tensor  # the same


class Nvfp4Part(NamedTuple):
    """Keys or values of a layer: two codes a byte, and a scale byte for each block."""

    codes: Tensor
    scales: Tensor


class Int4Store(_RingStore):
    """Groups of 64 in int4 with scale and offset; the whole window is expanded, then attended to.

    Groups lie along the channels of a token: groups along tokens do not divide a latent frame and would re-quantise
    their neighbours on every write.
    """

    def __init__(
        self, config: BuildConfig, compiled: Callable[[Any], Any] = lambda function: function
    ) -> None:
        super().__init__(config)
        m, rows = config.model, config.stream.batch * config.stream.cache_tokens
        if m.head_dim % INT4_GROUP:
            raise ValueError(f"head_dim {m.head_dim} is no multiple of {INT4_GROUP}, the int4 group")
        self._encode, self._decode = compiled(int4_encode), compiled(int4_decode)

        def empty() -> Int4Kv:
            groups = torch.zeros(
                rows, m.heads, m.head_dim // INT4_GROUP, dtype=config.dtype, device=config.device
            )
            codes = torch.zeros(rows, m.heads, m.head_dim // 2, dtype=torch.uint8, device=config.device)
            return Int4Kv(codes, groups, groups.clone())

        self.layers = [(empty(), empty()) for _ in range(m.layers)]

    def attend(self, layer: tuple[Int4Kv, Int4Kv], q: Tensor, k: Tensor, v: Tensor, place: Slots) -> Tensor:
        """See `Store`."""
        for held, new in zip(layer, (k, v), strict=True):
            for cache, part in zip(held, self._encode(new.flatten(0, 1)), strict=True):
                cache.index_copy_(0, place.index, part)
        window = [self._filled(self._decode(*held), place.valid) for held in layer]
        return attention(q, *window, None)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """See `Store`."""
        k, v = (
            self._filled(int4_decode(*held), self.config.stream.cache_tokens) for held in self.layers[number]
        )
        return k, v


def int4_encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scale and offset of x [T, H, D]: round((x - low) / scale), scale = (high - low) / 15."""
    groups = x.float().unflatten(-1, (-1, INT4_GROUP))
    low = groups.amin(-1).to(x.dtype)
    scale = ((groups.amax(-1) - low.float()) / INT4_TOP).to(x.dtype)
    step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]  # a constant group: 0 / tiny
    codes = ((groups - low.float()[..., None]) / step).round().clamp(0, INT4_TOP).to(torch.uint8).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale, low


def int4_decode(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """Return [N, H, D] in the dtype of the scales."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).unflatten(-1, (-1, INT4_GROUP))
    return (pairs.float() * scale.float()[..., None] + low.float()[..., None]).flatten(-2).to(scale.dtype)


class Nvfp4Store(_RingStore):
    """NVFP4 after RoPE by this package's own kernels; the whole window is expanded, then attended to."""

    def __init__(self, config: BuildConfig) -> None:
        super().__init__(config)
        m, rows = config.model, config.stream.batch * config.stream.cache_tokens
        self._scale = nvfp4_global_scale(torch.full((m.heads,), NVFP4_AMAX)).to(config.device)

        def empty() -> Nvfp4Part:
            parts = (m.head_dim // 2, m.head_dim // NVFP4_BLOCK)
            codes, scales = (
                torch.zeros(rows, m.heads, part, dtype=torch.uint8, device=config.device) for part in parts
            )
            return Nvfp4Part(codes, scales)

        self.layers = [(empty(), empty()) for _ in range(m.layers)]

    def attend(
        self, layer: tuple[Nvfp4Part, Nvfp4Part], q: Tensor, k: Tensor, v: Tensor, place: Slots
    ) -> Tensor:
        """See `Store`."""
        for held, new in zip(layer, (k, v), strict=True):
            nvfp4_write(new.flatten(0, 1), place.index, *held, self._scale)
        window = [nvfp4_expand(*held, self._scale, q.dtype) for held in layer]
        return attention(q, *(self._filled(x, place.valid) for x in window), None)

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """See `Store`."""
        k, v = (
            self._filled(nvfp4_expand(*held, self._scale, self.config.dtype), self.config.stream.cache_tokens)
            for held in self.layers[number]
        )
        return k, v


def _empty(config: BuildConfig) -> tuple[Tensor, Tensor]:
    m, s = config.model, config.stream
    shape = (s.batch, s.cache_tokens, m.heads, m.head_dim)
    k, v = (torch.zeros(shape, dtype=config.dtype, device=config.device) for _ in range(2))
    return k, v


def _bytes(held: Any) -> int:
    """Return the bytes of all tensors in lists, tuples and dictionaries."""
    if isinstance(held, Tensor):
        return held.numel() * held.element_size()
    return sum(map(_bytes, held.values() if isinstance(held, dict) else held))
