"""Shapes and inputs of attention of few tokens. No assertions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from seko_kernels.few_rows import TICKETS
from seko_kernels.few_tokens import QuantisedCache, decode_attention
from seko_kernels.formats import NumberFormat


@dataclass(frozen=True)
class Local:
    """Rows of tokens that see each other."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.tokens}, {self.heads} over {self.kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True)
class Decode:
    """Rows of a cache: how many positions each holds, in the order in which they lie in it; None: no row."""

    positions: tuple[int | None, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotated: bool = True

    def __str__(self) -> str:
        rope = "" if self.rotated else ", no rotation"
        return f"{self.positions}, {self.heads} over {self.kv_heads} heads of {self.head_dim}{rope}"

    @property
    def starts(self) -> list[int]:
        """First place of each row: one unused place before the first row, two behind each."""
        starts, place = [], 1
        for position in self.positions:
            starts.append(place if position is not None else self.places - 1)
            place += 0 if position is None else position + 3
        return starts

    @property
    def places(self) -> int:
        """Of the cache, with one for what belongs to no row."""
        return 2 + sum(position + 3 for position in self.positions if position is not None)

    @property
    def own_places(self) -> list[int]:
        """Where the tokens of rows are written."""
        return [
            start + position
            for start, position in zip(self.starts, self.positions, strict=True)
            if position is not None
        ]


LOCALS = [Local(2, 11, 4, 2, 32), Local(3, 5, 3, 1, 16), Local(1, 17, 2, 2, 6)]
DECODES = [
    Decode((0, 40, 1, 33), 4, 2, 32),
    Decode((None, 64, 100, None), 4, 1, 16, rotated=False),
    Decode((17,), 3, 3, 6),
]


class DecodeInputs(NamedTuple):
    """Arguments of the op, but for tickets."""

    qkv: Tensor
    cos: Tensor | None
    sin: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    starts: Tensor
    positions: Tensor
    write_index: Tensor

    def on(self, device: str, dtype: torch.dtype) -> DecodeInputs:
        """Return copies on a device; activations and caches of a dtype."""
        floats = {
            name: getattr(self, name).to(device, dtype, copy=True) for name in ("qkv", "k_cache", "v_cache")
        }
        rest = {name: None if x is None else x.to(device) for name, x in self._asdict().items()}
        return DecodeInputs(**{**rest, **floats})


def local_inputs(shape: Local) -> tuple[Tensor, Tensor, Tensor]:
    """Projections [B, T, ...] and tables of positions 0, 1, ..."""
    torch.manual_seed(shape.tokens)
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return torch.randn(shape.batch, shape.tokens, width), *tables(torch.arange(shape.tokens), shape.head_dim)


def decode_inputs(shape: Decode) -> DecodeInputs:
    """A cache that is NaN wherever no row has a position."""
    torch.manual_seed(shape.places)
    batch = len(shape.positions)
    counts = torch.tensor([0 if count is None else count for count in shape.positions])
    starts = torch.tensor(shape.starts)
    caches = torch.full((2, shape.places, shape.kv_heads, shape.head_dim), torch.nan)
    for start, count in zip(shape.starts, counts.tolist(), strict=True):
        caches[:, start : start + count] = torch.randn(2, count, shape.kv_heads, shape.head_dim)
    qkv = torch.randn(batch, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    cos, sin = tables(counts, shape.head_dim) if shape.rotated else (None, None)
    return DecodeInputs(qkv, cos, sin, caches[0], caches[1], starts, counts, starts + counts)


def quantised(form: NumberFormat, inputs: DecodeInputs) -> tuple[QuantisedCache, QuantisedCache]:
    """The caches of `decode_inputs` in a number format, the tokens' own keys and values in them; else any bytes."""
    places, kv_heads, head_dim = inputs.k_cache.shape
    decode_attention(*inputs, torch.zeros(TICKETS, dtype=torch.int32))  # which writes them
    generator = torch.Generator().manual_seed(places)
    caches = []
    for exact in (inputs.k_cache, inputs.v_cache):
        shapes = form.codes_shape(kv_heads, head_dim), form.scales_shape(kv_heads, head_dim)
        codes, scales = (torch.randint(0, 120, (places, *s), generator=generator) for s in shapes)
        caches.append(QuantisedCache(form, codes.to(form.code_dtype), scales.to(torch.uint8)))
        there = (~exact.isnan()).all((1, 2)).nonzero()[:, 0]
        caches[-1].write(exact[there], there)
    return caches[0], caches[1]


def tables(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D], the same for both halves."""
    angles = positions[:, None] * 100.0 ** -torch.linspace(0, 1, head_dim // 2)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()
