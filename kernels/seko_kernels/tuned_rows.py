"""Tile sizes of the kernels of linear layers on few rows, and the table of tile sizes that were measured on a GPU.

`python -m scripts.bench voxcpm2_kernels` writes `tuned_rows.json`, which is never edited by hand. The table of tile
sizes has only sizes that passed `scripts/kernel_admission` on their GPU and were faster than the kernel that runs
without a row of the table. Builds read the table; opening an artifact does not read the table.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton

from seko_kernels.errors import TilesError
from seko_kernels.measured_table import MeasuredTable, Rival

TABLE = Path(__file__).with_name("tuned_rows.json")
NORM, GATED, ADDED = "norm", "gated", "added"
FORMS = (NORM, GATED, ADDED)
WEIGHTS = ("bf16", "e4m3")
LEAST_ROWS, MOST_ROWS = 8, 64  # of a class
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
        `python -m scripts.bench voxcpm2_kernels` compares tile sizes.
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
    """Return the admitted tile sizes by architecture and linear layer."""
    return read_table(TABLE)


def _entry(row: dict[str, Any]) -> tuple[tuple[str, Product], RowTiles]:
    product, tiles = Product(*(row[name] for name in Product.__annotations__)), RowTiles(**row["tiles"])
    if product.form not in FORMS or product.weights not in WEIGHTS:
        raise TilesError(f"no linear layer {product.form!r} of {product.weights!r}")
    if tiles.splits > 1 and product.form != ADDED:
        raise TilesError(f"{tiles.splits} programs share sums behind a norm")
    return (str(row["arch"]), product), tiles


_FORM = MeasuredTable(_entry, Rival("us", "usual_us", "the usual"))
read_table, write_table = _FORM.read, _FORM.write
