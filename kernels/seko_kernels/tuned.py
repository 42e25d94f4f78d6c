"""Tile sizes of the 8-bit attention: checks of tile sizes, safe defaults, and the table of measured tile sizes.

`python -m scripts.bench kernels` writes `tuned_attention.json`, which is never edited by hand, with sizes that
`scripts/kernel_admission` admitted on their GPU. Builds read the table. Opening an artifact does not, since tile sizes
are compiled into the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from seko_kernels import hopper_attention as hopper
from seko_kernels.errors import TilesError
from seko_kernels.formats import KEY_TILE
from seko_kernels.measured_table import MeasuredTable

TABLE = Path(__file__).with_name("tuned_attention.json")
# Upper bounds of the shape classes, in tiles of 128 queries over all heads and rows. An H200 runs 132 tiles at a
# time, so `few` is up to two waves (where splitting the keys may be faster), `some` up to eight, `many` more.
CLASS_ENDS = {"few": 264, "some": 1056}
LAST_CLASS = "many"
MOST_KEYS = KEY_TILE  # most keys of a tile, since a tile has one key scale
# Sizes of the kernel in `hopper_attention`, in the order of `AttentionTiles`.
HOPPER_SIZES = (hopper.QUERIES, KEY_TILE, hopper.OWN_KEYS, hopper.STAGES, hopper.WARPS, 1)


@dataclass(frozen=True)
class AttentionTiles:
    """Tile sizes of the 8-bit attention.

    Parameters
    ----------
    block_m, block_n : int
        Numbers of queries and of cached keys in a tile; powers of two, except with `specialised`. `block_n` is at most
        128.
    own_n : int
        Number of the chunk's own keys in a tile, a power of two. Own keys and values have 16 bits, and take twice the
        memory of cached keys and values.
    stages : int
        Number of tiles of cached keys that are loaded ahead.
    warps : int
        Number of warps of a program.
    resident : int
        Number of programs that run on a multiprocessor at a time.
    specialised : bool
        Whether the kernel of `hopper_attention` runs, whose warpgroups have separate jobs; only `SPECIALISED` sets this
        flag.

    Raises
    ------
    TilesError
        If the tile sizes contradict each other.
    """

    block_m: int
    block_n: int
    own_n: int
    stages: int
    warps: int
    resident: int = 1
    specialised: bool = False

    def __post_init__(self) -> None:
        if self.specialised:
            sizes = self.block_m, self.block_n, self.own_n, self.stages, self.warps, self.resident
            if sizes != HOPPER_SIZES:
                raise TilesError(f"a specialised kernel has tiles of {HOPPER_SIZES}, got {sizes}")
            return
        for name, least in (("block_m", 16), ("block_n", 32), ("own_n", 16), ("warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise TilesError(f"{name} must be a power of two of at least {least}, got {value}")
        if self.block_n > MOST_KEYS:
            raise TilesError(f"block_n must be at most {MOST_KEYS}, got {self.block_n}")
        if self.stages < 1 or self.resident < 1:
            raise TilesError(f"stages {self.stages} and resident {self.resident} must be at least 1")


SPECIALISED = AttentionTiles(*HOPPER_SIZES, specialised=True)
# Compile without spills on their architectures (tests/kernels/test_attention_fp8.py).
SAFE_HOPPER = AttentionTiles(64, 128, own_n=64, stages=3, warps=4, resident=2)
SAFE = AttentionTiles(64, 64, own_n=32, stages=2, warps=4)


def safe_tiles(arch: str) -> AttentionTiles:
    """Return safe tile sizes for a GPU architecture (such as ``"sm_90"``) for which no tile sizes were measured."""
    return SAFE_HOPPER if arch == "sm_90" else SAFE


def measured_tiles(arch: str, head_dim: int, shape: str, past_tokens: int) -> AttentionTiles | None:
    """Return the fastest admitted tile sizes for an architecture, head_dim and shape class, or None.

    Parameters
    ----------
    arch : str
        Compute capability of the GPU, such as ``"sm_90"``.
    head_dim : int
        Number of channels of a head, D.
    shape : str
        Size class of the attention, from `shape_class`.
    past_tokens : int
        Number of cached tokens of a row in the scratch buffer; `hopper_attention` needs a multiple of its key group.
    """
    tiles = tuned_table().get((arch, head_dim, shape))
    if tiles is not None and tiles.specialised and not hopper.takes(head_dim, past_tokens):
        return None
    return tiles


def tiles_for(arch: str, head_dim: int, shape: str, past_tokens: int) -> AttentionTiles:
    """Return the tile sizes of `measured_tiles`; if no tile sizes were measured, those of `safe_tiles`."""
    return measured_tiles(arch, head_dim, shape, past_tokens) or safe_tiles(arch)


def shape_class(batch: int, heads: int, query_tokens: int) -> str:
    """Return the shape class of an attention, by its number of query tiles, which determines the waves on a GPU."""
    tiles = batch * heads * -(-query_tokens // 128)
    return next((name for name, end in CLASS_ENDS.items() if tiles <= end), LAST_CLASS)


@cache
def tuned_table() -> dict[tuple[str, int, str], AttentionTiles]:
    """Return the admitted tile sizes by architecture, head_dim and shape class."""
    return read_table(TABLE)


def class_of(row: Mapping[str, Any]) -> str:
    """Return the shape class of a table's row; TilesError if there is no such class."""
    if row["shape_class"] not in (*CLASS_ENDS, LAST_CLASS):
        raise TilesError(f"no shape class {row['shape_class']!r}")
    return str(row["shape_class"])


def attention_key(row: Mapping[str, Any]) -> tuple[str, int, str]:
    """Return the architecture, head_dim and shape class of a table's row."""
    return str(row["arch"]), int(row["head_dim"]), class_of(row)


_FORM = MeasuredTable(lambda row: (attention_key(row), AttentionTiles(**row["tiles"])))
read_table, write_table = _FORM.read, _FORM.write
