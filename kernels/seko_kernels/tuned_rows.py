"""Tile sizes of the kernels of linear layers on few rows, and the table of tile sizes that were measured on a GPU.

`scripts/bench/voxcpm2_kernels.py --admit` writes `tuned_rows.json`, which is never edited by hand. The table of tile
sizes has only sizes that passed `scripts/kernel_admission` on their GPU and were faster than the kernel that runs
without a row of the table. Builds read the table; opening an artifact does not read the table.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton

from seko_kernels.errors import TilesError
from seko_kernels.tuned import merge_rows, table_faults

TABLE = Path(__file__).with_name("tuned_rows.json")
NORM, GATED, ADDED = "norm", "gated", "added"
FORMS = (NORM, GATED, ADDED)
WEIGHTS = ("bf16", "e4m3")
LEAST_ROWS, MOST_ROWS = 8, 64  # of a class
_OF_PRODUCT = ("rows", "channels", "products", "form", "weights")
_PROGRAMS = 132  # multiprocessors of a large GPU
_CHANNELS, _PRODUCTS = 16, 256  # of a program, and of a turn


class RowTiles(NamedTuple):
    """Tile sizes of a launch on few rows.

    Parameters
    ----------
    rows, channels, products : int
        Numbers of rows of activations and of rows of the weight that a program handles, and number of products of each
        sum in a loop iteration. A program of `few_rows_kernel` handles `channels` rows of the gate and as many rows of
        up.
    splits : int
        Number of programs that share a sum.
    warps : int
        Number of warps of a program.
    stages : int
        Number of loop iterations whose loads run at the same time.
    warpgroup : bool
        Whether the kernel is `warpgroup_rows_kernel`, otherwise `few_rows_kernel`.
    """

    rows: int
    channels: int
    products: int
    splits: int
    warps: int = 4
    stages: int = 4
    warpgroup: bool = False

    @classmethod
    def of(cls, rows: int, outer: int, inner: int, *, gated: bool, shared: bool) -> RowTiles:
        """Return the usual tile sizes for `rows` rows, `outer` output channels and sums of `inner` products.

        If `shared` is true, several programs share a sum where the launch would otherwise have fewer programs than the
        GPU has multiprocessors. In launches with few programs each program loads more products at a time.
        `scripts/bench/voxcpm2_kernels.py` compares tile sizes.
        """
        block = max(16, triton.next_power_of_2(rows))
        programs, splits = triton.cdiv(outer, _CHANNELS), 1
        while shared and programs * splits * 2 <= _PROGRAMS and inner >= 2 * splits * _PRODUCTS:
            splits *= 2
        few = programs * splits <= _PROGRAMS and inner >= 2 * splits * 2 * _PRODUCTS
        products = min(_PRODUCTS * (1 + few), max(64, triton.next_power_of_2(inner)))
        return cls(block, _CHANNELS, products, splits, stages=3 if gated else 4)


class Product(NamedTuple):
    """Key of the table of tile sizes: a linear layer on few bfloat16 rows.

    Parameters
    ----------
    rows : int
        Class of the number of rows: the next power of two, at least 8.
    channels, products : int
        Numbers of output channels, and of products of a sum.
    form : str
        Kind of the linear layer. ``norm``: after a norm. ``gated``: after a norm, with gate and up. ``added``: before a
        residual sum.
    weights : str
        Dtype of the weight: ``bf16`` or ``e4m3``.
    """

    rows: int
    channels: int
    products: int
    form: str
    weights: str

    @classmethod
    def of(cls, rows: int, channels: int, products: int, form: str, *, fp8: bool) -> Product:
        """Return the table's key of a linear layer on `rows` rows."""
        rows = max(LEAST_ROWS, triton.next_power_of_2(rows))
        return cls(rows, channels, products, form, WEIGHTS[fp8])


def measured_tiles(arch: str, product: Product) -> RowTiles | None:
    """Return the admitted tile sizes of a linear layer on a GPU architecture (``"sm_90"``), or None."""
    return tuned_table().get((arch, product))


@cache
def tuned_table() -> dict[tuple[str, Product], RowTiles]:
    """Return the admitted tile sizes by architecture and linear layer; see `read_table`."""
    return read_table(TABLE)


def read_table(file: Path) -> dict[tuple[str, Product], RowTiles]:
    """Read a table of tile sizes that `write_table` wrote.

    Raises
    ------
    TilesError
        If the file is not a table of tile sizes, or an entry's error exceeds its bound, or an entry was not faster than
        the tile sizes that are used without the entry, or the tile sizes of an entry do not fit its linear layer.
    """
    table = {}
    with table_faults(file):
        for row in json.loads(file.read_text(encoding="utf-8")):
            product = Product(*(row[name] for name in _OF_PRODUCT))
            tiles = RowTiles(**row["tiles"])
            if not row["error"] <= row["bound"]:  # NaN too
                raise TilesError(f"{file.name}: error {row['error']} is above its bound {row['bound']}")
            if not row["us"] < row["usual_us"]:
                raise TilesError(f"{file.name}: {row['us']} us is no less than the usual {row['usual_us']}")
            if product.form not in FORMS or product.weights not in WEIGHTS:
                raise TilesError(f"{file.name}: no linear layer {product.form!r} of {product.weights!r}")
            if tiles.splits > 1 and product.form != ADDED:
                raise TilesError(f"{file.name}: {tiles.splits} programs share sums behind a norm")
            table[str(row["arch"]), product] = tiles
    return table


def write_table(file: Path, rows: list[dict[str, Any]]) -> None:
    """Add tile sizes (`rows`) to the JSON table; entries of the same architecture and linear layer are replaced."""
    merge_rows(file, rows, ("arch", *_OF_PRODUCT))
    read_table(file)
