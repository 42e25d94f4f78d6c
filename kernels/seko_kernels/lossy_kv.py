"""Quantised KV caches: keys and values each have a number format, and the sink may be exact.

Keys in quantised caches are stored before RoPE, minus a calibrated mean. Before RoPE, a large part of a key is equal
for all tokens of a head; without this constant part the same number of bits stores the rest more precisely
(docs/adr/0005).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from seko_kernels import reference
from seko_kernels.errors import KernelsError, KvSchemeError
from seko_kernels.formats import FP4, CacheTensor, NumberFormat, ScaleTensor
from seko_kernels.kv_formats import ChannelStatistics, check_sizes, check_statistics
from seko_kernels.kv_ops import kv_expand, kv_write
from seko_kernels.kv_tables import KeyTables, SinkApart


@dataclass(frozen=True)
class RowLayout:
    """Numbers of tokens in one row's cache: tokens of the sink, tokens of the ring after the sink, and tokens of a
    chunk, which are written together.

    Parameters
    ----------
    sink_tokens, ring_tokens, chunk_tokens : int
        Numbers of tokens of sink, ring and chunk, each a whole number of latent frames; a chunk is no larger than the
        ring.
    """

    sink_tokens: int
    ring_tokens: int
    chunk_tokens: int

    @property
    def cache_tokens(self) -> int:
        """Number of tokens in the cache of a row: sink and ring together."""
        return self.sink_tokens + self.ring_tokens


@dataclass(frozen=True)
class LossyKv:
    """A KV cache format in which keys, values or both are quantised.

    Parameters
    ----------
    heads, head_dim : int
        Number of attention heads, and number of channels of a head.
    keys, values : NumberFormat or None
        Number formats of keys and of values; None for exact keys or values. Exact keys are stored after RoPE, unless
        ``before_rope``.
    dtype : torch.dtype or None
        The model's dtype; needed if keys, values or the sink are exact.
    exact_sink : RowLayout or None
        If set, the sink is stored separately and exact, with the sink's keys before RoPE, and codes are stored for the
        ring alone.
    before_rope : bool
        Whether exact keys, too, are stored before RoPE.

    Raises
    ------
    KernelsError
        If a size is not positive, or the number of channels of a head is no multiple of a format's unit.
    KvSchemeError
        If neither keys nor values are quantised, ``dtype`` is missing, or an exact sink is requested and the layout
        has no sink.
    """

    heads: int
    head_dim: int
    keys: NumberFormat | None = FP4
    values: NumberFormat | None = FP4
    dtype: torch.dtype | None = None
    exact_sink: RowLayout | None = None
    before_rope: bool = False

    def __post_init__(self) -> None:
        check_sizes(self.heads, self.head_dim)
        for form in (self.keys, self.values):
            if form is not None and self.head_dim % form.unit:
                raise KernelsError(
                    f"head_dim {self.head_dim} is no multiple of {form.unit}, what {form.name} takes together"
                )
        if self.keys is None and self.values is None:
            raise KvSchemeError("neither keys nor values are quantised; take the exact format")
        if self.dtype is None and (self.exact_sink is not None or None in (self.keys, self.values)):
            raise KvSchemeError("a part of the cache is stored as it is: name the model's dtype")
        if self.exact_sink is not None and self.exact_sink.sink_tokens < 1:
            raise KvSchemeError(
                "the sink is to be stored as it is, but the cache has none; give it sink frames"
            )

    @property
    def name(self) -> str:
        """The format's name in the manifest. In the manifest the plain name ``fp4`` is an older format: keys after
        RoPE, no mean, and scales for the top value 6 only.
        """
        keys = (self.keys.name if self.keys else "exact") + "-before-rope" * self.keys_before_rope
        values = self.values.name if self.values else "exact"
        both = keys if self.keys == self.values else f"{keys}.{values}"
        return both + (".exact-sink" if self.exact_sink else "")

    @property
    def keys_before_rope(self) -> bool:
        """Whether keys are stored before RoPE: true if keys are quantised, otherwise the constructor's
        `before_rope`."""
        return self.keys is not None or self.before_rope

    @property
    def exact(self) -> tuple[bool, bool]:
        """Pair of flags: whether keys, and whether values, are read exactly as they were written."""
        return not self.keys_before_rope, self.values is None

    @property
    def read_in_8_bits(self) -> bool:
        """Whether 8-bit attention can read the cache: true if all keys and values are NVFP4, also the keys and values
        of the sink."""
        return self.exact_sink is None and all(form is not None and form.e2m1 for form in self._forms)

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """Tensors of the cache: codes and scales of keys and values, and keys and values of the sink if the sink is
        exact."""
        tensors, part = [], "ring" if self.exact_sink else "cache"
        for side, form in self._sides:
            whole = (self.heads, self.head_dim)
            if form is None:
                tensors.append(CacheTensor(side, whole, self._dtype))
                continue
            tensors.append(CacheTensor(f"{side}_codes", form.codes_shape(*whole), form.code_dtype, part))
            if form.group:
                shape = form.scales_shape(*whole)
                tensors.append(CacheTensor(f"{side}_scales", shape, torch.uint8, part))
            if self.exact_sink is not None:
                tensors.append(CacheTensor(f"{side}_sink", whole, self._dtype, "sink"))
        return tuple(tensors)

    @property
    def scale_tensors(self) -> tuple[ScaleTensor, ...]:
        """Calibrated constants: a power of two for each head of keys and of values, and the mean of each key
        channel."""
        tensors = []
        for side, form in self._sides:
            if form is not None:
                tensors.append(ScaleTensor(f"{side}_global_scale", (self.heads,), torch.float32))
                if side == "k":
                    tensors.append(ScaleTensor("k_mean", (self.heads, self.head_dim), torch.float32))
        return tuple(tensors)

    @property
    def sink_tensors(self) -> tuple[str, str] | None:
        """Names of the tensors with the sink's keys and values; None without an exact sink."""
        if self.exact_sink is None:
            return None
        k, v = (side if form is None else f"{side}_sink" for side, form in self._sides)
        return k, v

    @property
    def bits_per_number(self) -> float:
        """Stored bits of a cached number, averaged over keys and values, sink and ring."""
        whole = 0 if self.dtype is None else self.dtype.itemsize * 8
        share = 0.0
        if self.exact_sink is not None:
            share = self.exact_sink.sink_tokens / self.exact_sink.cache_tokens
        bits = [whole if form is None else share * whole + (1 - share) * form.bits for form in self._forms]
        return sum(bits) / 2

    def write(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        token_index: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> None:
        """Quantise keys and values and store them in the cache, in place; see `KvFormat.write`."""
        codes_index = token_index
        if self.exact_sink is not None:
            codes_index = _ring_index(self.exact_sink, token_index)
        for (side, form), x in zip(self._sides, (k, v), strict=True):
            if form is None:
                caches[side].index_copy_(0, token_index, x.to(self._dtype))
                continue
            if self.exact_sink is not None:
                _write_sink(self.exact_sink, caches[f"{side}_sink"], token_index, x.to(self._dtype))
            codes, groups = caches[f"{side}_codes"], caches.get(f"{side}_scales")
            g, mean = scales[f"{side}_global_scale"], scales.get(f"{side}_mean")
            kv_write(form, x, codes_index, codes, groups, g, mean)

    def expand(
        self,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        key_rotary: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Expand and rotate keys, expand values; see `KvFormat.expand`. A token that was never written gives
        the rotated mean as key and 0 as value.
        """
        k, v = (self._read(side, form, caches, scales, key_rotary, dtype) for side, form in self._sides)
        return k, v

    def calibrate(self, k: ChannelStatistics, v: ChannelStatistics) -> dict[str, Tensor]:
        """Choose the global scales of keys and values, and take the mean of the keys.

        Parameters
        ----------
        k, v : ChannelStatistics
            Statistics of the keys (before RoPE if `keys_before_rope` is true) and of the values.

        Returns
        -------
        dict of str to Tensor
            The calibrated tensors, by the names in `scale_tensors`.

        Raises
        ------
        KernelsError
            If the statistics have another number of heads or channels than the format.
        """
        check_statistics(k, v, self.heads, self.head_dim)
        constants = {}
        for (side, form), statistics in zip(self._sides, (k, v), strict=True):
            if form is not None:
                centre = statistics.mean if side == "k" else 0.0
                constants[f"{side}_global_scale"] = reference.global_scale(statistics.amax(centre), form.top)
                if side == "k":
                    constants["k_mean"] = statistics.mean
        return constants

    @property
    def _forms(self) -> tuple[NumberFormat | None, NumberFormat | None]:
        return self.keys, self.values

    @property
    def _sides(self) -> tuple[tuple[str, NumberFormat | None], ...]:
        return ("k", self.keys), ("v", self.values)

    @property
    def _dtype(self) -> torch.dtype:
        if self.dtype is None:  # unreachable: __post_init__ raises an error
            raise KvSchemeError("a part of the cache is stored as it is: name the model's dtype")
        return self.dtype

    def _read(
        self,
        side: str,
        form: NumberFormat | None,
        caches: Mapping[str, Tensor],
        scales: Mapping[str, Tensor],
        key_rotary: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        if form is None:
            if dtype != self.dtype:
                raise KvSchemeError(f"the exact part of a KV cache cannot serve {dtype} without a copy")
            if side == "v" or not self.before_rope:
                return caches[side]
            return reference.rotate_keys(
                caches[side].float(), key_rotary["slot_rotary"], key_rotary["patch_rotary"], dtype
            )
        layout, turning = self.exact_sink, None
        apart = None if layout is None else SinkApart(layout.ring_tokens, layout.sink_tokens)
        codes, groups = caches[f"{side}_codes"], caches.get(f"{side}_scales")
        g = scales[f"{side}_global_scale"]
        if side == "k":
            slots, patches = key_rotary["slot_rotary"], key_rotary["patch_rotary"]
            if layout is not None:
                slots = _slots_of(layout, slots, len(patches), sink=False)
            turning = KeyTables(scales["k_mean"], slots, patches)
        window = kv_expand(form, codes, groups, g, dtype, turning, apart)
        if layout is None:
            return window
        sink = caches[f"{side}_sink"]
        if side == "k":
            slots = _slots_of(layout, key_rotary["slot_rotary"], len(key_rotary["patch_rotary"]), sink=True)
            sink = reference.rotate_keys(sink.float(), slots, key_rotary["patch_rotary"], dtype)
        rows = torch.arange(len(sink) // layout.sink_tokens, device=sink.device) * layout.cache_tokens
        index = rows[:, None] + torch.arange(layout.sink_tokens, device=sink.device)
        return window.index_copy(0, index.flatten(), sink)


def _slots_of(layout: RowLayout, table: Tensor, frame_tokens: int, *, sink: bool) -> Tensor:
    """Return the entries of a table [B * cache slots, ...] for the slots of the sinks, or for the slots of the
    rings."""
    first = layout.sink_tokens // frame_tokens
    by_row: Tensor = table.unflatten(0, (-1, layout.cache_tokens // frame_tokens))
    part = by_row.narrow(1, 0, first) if sink else by_row.narrow(1, first, by_row.shape[1] - first)
    return part.flatten(0, 1).contiguous()


def _ring_index(layout: RowLayout, token_index: Tensor) -> Tensor:
    """Return the token indices in a cache that holds only the rings, without the sinks.

    Tokens of the sink are written to the last slots of the ring, where nothing reads them: while the sink fills, the
    ring is empty, and every slot is written before it is read.
    """
    row, place = token_index // layout.cache_tokens, token_index % layout.cache_tokens
    return row * layout.ring_tokens + (place - layout.sink_tokens) % layout.ring_tokens


def _write_sink(layout: RowLayout, sink: Tensor, token_index: Tensor, x: Tensor) -> None:
    """Store the tokens that belong to the sink in the sink's own tensors, in place.

    With static shapes no index can be skipped, so each token that is not in the sink writes its row's first sink
    token again, with the same bytes.
    """
    tokens = layout.chunk_tokens
    row, place = (
        part.unflatten(0, (-1, tokens))
        for part in (token_index // layout.cache_tokens, token_index % layout.cache_tokens)
    )  # each [B, T]
    first = row[:, 0] * layout.sink_tokens  # [B]
    is_first = (place == 0).to(torch.int64)
    turn = is_first.argmax(1) + torch.arange(len(row), device=x.device) * tokens
    has_first = is_first.sum(1).to(torch.bool)[:, None, None]
    first_token = torch.where(has_first, x.index_select(0, turn), sink.index_select(0, first))  # [B, H, D]
    inside = place < layout.sink_tokens
    index = torch.where(inside, row * layout.sink_tokens + place, first[:, None])
    values = torch.where(inside[..., None, None], x.unflatten(0, (-1, tokens)), first_token[:, None])
    sink.index_copy_(0, index.flatten(), values.flatten(0, 1))
