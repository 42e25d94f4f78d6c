"""Tile sizes of the causal convolution, and the table of sizes for which Seko's convolution is faster than torch's
convolution. The table is the file `tuned_conv.json`, which measurements write and nobody edits by hand. A row of the
table stands for a convolution for which tile sizes passed `scripts/kernel_admission` on their GPU and took less time
than torch's convolution. If the table has no row for a convolution, a build uses torch's convolution. Builds read the
table of convolutions; opening an artifact does not read the table.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from seko_kernels import hopper_conv
from seko_kernels.errors import TilesError
from seko_kernels.measured_table import MeasuredTable, Rival
from seko_kernels.outlines import gluon_fault
from seko_kernels.tuned import class_of, shape_class

TABLE = Path(__file__).with_name("tuned_conv.json")
# Shared memory of a Hopper multiprocessor that a program can use, in bytes.
SHARED_BYTES = 227 * 1024
MARGIN_TILE = hopper_conv.ROWS, hopper_conv.COLUMNS  # rows and columns of a tile with a margin


@dataclass(frozen=True)
class ConvTiles:
    """Tile sizes of the causal convolution.

    Parameters
    ----------
    rows, columns : int
        Numbers of pixel rows and columns of a tile, powers of two whose product is at least 64. With `margin` a tile
        has 6 x 64 pixels.
    filters, more_filters : int
        Numbers of filters in the two parts of a tile, powers of two of at least 16; 0: there is no second part.
    channels : int
        Number of input channels that a step of the loop multiplies, a power of two of at least 16.
    stages : int
        Number of steps that are loaded ahead.
    warps : int
        Number of warps of a program, 4 or 8. With `margin`, the number of warps of the warpgroup that loads, 4.
    resident : int
        Number of programs that run on a multiprocessor at a time.
    margin : bool
        Whether the kernel is `gluon.causal_conv`, for three taps in height and width: a tile, with one more pixel row
        above and one below, stays in shared memory for the three vertical taps.
    filters_first : bool
        Whether filters are the rows of the matrix product; not allowed with `margin`. If set, each part of the filters
        has at least 64 filters.

    Raises
    ------
    TilesError
        If a size is no power of two, or is smaller than the matrix instructions need.
    """

    rows: int
    columns: int
    filters: int
    more_filters: int
    channels: int
    stages: int
    warps: int
    resident: int = 1
    margin: bool = False
    filters_first: bool = False

    def __post_init__(self) -> None:
        if self.margin and self.filters_first:
            raise TilesError("a tile with a margin has no filters first")
        fewest = 64 if self.filters_first else 16  # rows of a matrix instruction, or its columns
        sides = () if self.margin else (("rows", 1), ("columns", 1))
        for name, least in (*sides, ("filters", fewest), ("channels", 16)):
            _expect_power(name, getattr(self, name), least)
        if self.margin and (self.rows, self.columns) != MARGIN_TILE:
            rows, columns = MARGIN_TILE
            raise TilesError(
                f"a tile with a margin has {rows} x {columns} pixels, got {self.rows} x {self.columns}"
            )
        if self.warps not in ((hopper_conv.WARPS,) if self.margin else (4, 8)):
            raise TilesError(f"{self.warps} warps, expected 4 or 8, and {hopper_conv.WARPS} with a margin")
        if self.more_filters:
            _expect_power("more_filters", self.more_filters, fewest)
        if self.rows * self.columns < 64:
            raise TilesError(f"a tile must have 64 pixels, got {self.rows} x {self.columns}")
        if self.stages < 1 or self.resident < 1:
            raise TilesError(f"stages {self.stages} and resident {self.resident} must be at least 1")

    @property
    def numbers(self) -> list[int]:
        """The tile sizes as a sequence of numbers, as a torch op takes them. `of_numbers` is the inverse."""
        return [int(size) for size in astuple(self)]

    @classmethod
    def of_numbers(cls, numbers: list[int]) -> ConvTiles:
        """Return the `ConvTiles` whose property `numbers` equals `numbers`."""
        sizes: dict[str, Any] = dict(zip((size.name for size in fields(cls)), numbers, strict=True))
        return cls(**{**sizes, **{name: bool(sizes[name]) for name in ("margin", "filters_first")}})

    @property
    def loaded_bytes(self) -> int:
        """Bytes of 16-bit numbers that all stages of a program take in shared memory."""
        pixels, filters = self.rows * self.columns, self.filters + self.more_filters
        if self.margin:
            pixels, filters = pixels + 2 * self.columns, 3 * filters
        return 2 * self.channels * (pixels + filters) * self.stages


class Convolution(NamedTuple):
    """Key of the table of convolutions: numbers of channels, filters and taps, dtype, and the size class of the pixels
    of a call.

    Parameters
    ----------
    channels, filters : int
        Numbers of channels of input and output.
    taps : tuple of int
        Numbers of taps in time, height and width.
    shape_class : str
        Size class of the pixels of a call, from `size_class`.
    fp8 : bool
        Whether frames and weight are e4m3.
    """

    channels: int
    filters: int
    taps: tuple[int, int, int]
    shape_class: str
    fp8: bool = False


def size_class(frames: int, height: int, width: int) -> str:
    """Return the size class of a call of the convolution, from the number of frames of all batch rows and the number of
    pixels of a frame; see `tuned.shape_class`."""
    return shape_class(frames, 1, height * width)


def has_fp8_convolutions(arch: str, channels: Collection[int]) -> bool:
    """Return whether the table has e4m3 convolutions for an architecture, between these numbers of channels."""
    return any(
        convolution.fp8 and convolution.channels in channels and convolution.filters in channels
        for known, convolution in faster_table()
        if known == arch
    )


def measured_tiles(arch: str, convolution: Convolution) -> ConvTiles | None:
    """Return the table's tile sizes of a convolution on a GPU architecture (``"sm_90"``): sizes that were admitted and
    faster than torch's convolution. The result is None if the table has no row for the convolution. The result is also
    None if the kernel needs Gluon and the installed triton has no Gluon that works like that of triton 3.6."""
    tiles = faster_table().get((arch, convolution))
    return None if tiles is not None and tiles.margin and gluon_fault() is not None else tiles


@cache
def faster_table() -> dict[tuple[str, Convolution], ConvTiles]:
    """Return the tile sizes by architecture and convolution."""
    return read_table(TABLE)


def _entry(row: dict[str, Any]) -> tuple[tuple[str, Convolution], ConvTiles]:
    taps = tuple(map(int, row["taps"]))
    if len(taps) != 3:
        raise ValueError(f"taps {taps}")
    sides = int(row["channels"]), int(row["filters"])
    convolution = Convolution(*sides, (taps[0], taps[1], taps[2]), class_of(row), bool(row["fp8"]))
    return (str(row["arch"]), convolution), ConvTiles(**row["tiles"])


_FORM = MeasuredTable(_entry, Rival("ms", "torch_ms", "torch's"))
read_table, write_table = _FORM.read, _FORM.write


def _expect_power(name: str, value: int, least: int) -> None:
    if value < least or value & (value - 1):
        raise TilesError(f"{name} must be a power of two of at least {least}, got {value}")
