"""Tiles of the fp8 attention: what they may be, which are safe, and the table of those that were measured.

`tuned_attention.json` is written by `scripts/bench/kernels.py --admit`, never by hand, and holds only tiles that
passed `admission.admit` on the GPU that they are for. It is read while an engine is built; opening an artifact
reads nothing, since the tiles are in the engine.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from seko_kernels.errors import TilesError

TABLE = Path(__file__).with_name("tuned_attention.json")
SPECIALISED_WARPS = 4  # with any other number Triton 3.6 ignores warp specialisation in silence
# Upper ends of the classes: tiles of 128 queries over all heads and rows. An H200 runs 132 at a time, so `few` is
# up to two waves (where splitting the keys may pay), `some` up to eight, `many` the rest.
CLASS_ENDS = {"few": 264, "some": 1056}
LAST_CLASS = "many"


@dataclass(frozen=True)
class AttentionTiles:
    """How the fp8 attention is cut into tiles.

    Parameters
    ----------
    block_m, block_n : int
        Queries and keys of a tile; powers of two.
    stages : int
        Tiles of keys in flight.
    warps : int
        Warps of a program; under warp specialisation Triton adds those of the loader.
    warp_specialize : bool
        Loads and matmuls in warps of their own (Hopper); needs 4 warps.
    splits : int
        Parts into which the keys are cut, combined by a second kernel: fills a GPU that has too few query tiles.
    tail_n : int
        0: every tile is masked. Otherwise the loop takes whole tiles without a mask, and the rest in masked tiles
        of this many keys behind it; needs splits = 1.
    whole : bool
        Loop over the whole cache and mask what lies behind the valid tokens, instead of stopping there; needs
        tail_n = 0. For GPUs on which the bound that is read from memory does not pass admission.
    peel : bool
        Take the rest as one masked tile of block_n keys before the loop, which then has no mask; needs splits = 1 and
        neither tail_n nor whole. Under warp specialisation a loop behind the loop gives NaN (docs/LOG.md).
    fma_exps : int
        How many of each four exponentials are polynomials, so that the exponential unit is no bottleneck: 0, 1 or 2.

    Raises
    ------
    TilesError
        If two of them contradict each other.
    """

    block_m: int
    block_n: int
    stages: int
    warps: int
    warp_specialize: bool = False
    splits: int = 1
    tail_n: int = 0
    whole: bool = False
    peel: bool = False
    fma_exps: int = 0

    def __post_init__(self) -> None:
        for name, least in (("block_m", 16), ("block_n", 32), ("warps", 1), ("tail_n", 32)):
            value = getattr(self, name)
            if (value or name != "tail_n") and (value < least or value & (value - 1)):
                raise TilesError(f"{name} must be a power of two of at least {least}, got {value}")
        if self.stages < 1 or self.splits < 1:
            raise TilesError(f"stages {self.stages} and splits {self.splits} must be at least 1")
        if self.fma_exps not in (0, 1, 2):
            raise TilesError(f"fma_exps must be 0, 1 or 2 of each four, got {self.fma_exps}")
        if self.warp_specialize and self.warps != SPECIALISED_WARPS:
            raise TilesError(f"warp specialisation takes {SPECIALISED_WARPS} warps, got {self.warps}")
        if self.tail_n and (self.splits > 1 or self.whole):
            raise TilesError(
                f"tail_n {self.tail_n} needs splits = 1 and whole = False, got {self.splits} and {self.whole}: "
                "the tail is behind one loop that stops at the last whole tile"
            )
        if self.peel and (self.tail_n or self.splits > 1 or self.whole):
            raise TilesError(
                "peel needs tail_n = 0, splits = 1 and whole = False, "
                f"got {self.tail_n}, {self.splits} and {self.whole}"
            )
        if self.tail_n > self.block_n:
            raise TilesError(f"tail_n {self.tail_n} is larger than block_n {self.block_n}")


# Compile without spills on their architectures (tests/kernels/test_attention_fp8.py) and use nothing of facts that
# Triton gets wrong: no warp specialisation, a mask in every tile.
SAFE_HOPPER = AttentionTiles(128, 128, stages=3, warps=8)
SAFE = AttentionTiles(128, 64, stages=2, warps=8)


def safe_tiles(arch: str) -> AttentionTiles:
    """Return tiles for a GPU (``"sm_90"``) that has no measured ones."""
    return SAFE_HOPPER if arch == "sm_90" else SAFE


def tiles_for(arch: str, head_dim: int, shape: str) -> AttentionTiles:
    """Return the fastest admitted tiles of this architecture, head_dim and shape class, or the safe ones."""
    return tuned_table().get((arch, head_dim, shape)) or safe_tiles(arch)


def shape_class(batch: int, heads: int, query_tokens: int) -> str:
    """Return the class of an attention by how far its query tiles fill a GPU."""
    tiles = batch * heads * -(-query_tokens // 128)
    return next((name for name, end in CLASS_ENDS.items() if tiles <= end), LAST_CLASS)


@cache
def tuned_table() -> dict[tuple[str, int, str], AttentionTiles]:
    """Return the admitted tiles by architecture, head_dim and shape class; see `read_table`."""
    return read_table(TABLE)


def read_table(file: Path) -> dict[tuple[str, int, str], AttentionTiles]:
    """Read a table that `write_table` wrote.

    Raises
    ------
    TilesError
        If it is no such table, or an entry has no error within its bound: it was not admitted.
    """
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        table = {}
        for row in rows:
            if not row["error"] <= row["bound"]:  # NaN too
                raise TilesError(f"{file.name}: error {row['error']} is above its bound {row['bound']}")
            if row["shape_class"] not in (*CLASS_ENDS, LAST_CLASS):
                raise TilesError(f"{file.name}: no shape class {row['shape_class']!r}")
            table[row["arch"], int(row["head_dim"]), row["shape_class"]] = AttentionTiles(**row["tiles"])
    except (KeyError, TypeError, ValueError) as fault:
        if isinstance(fault, TilesError):
            raise
        raise TilesError(f"{file.name} is no table of attention tiles: {fault!r}") from fault
    return table


def table_row(
    arch: str, head_dim: int, shape: str, tiles: AttentionTiles, error: float, bound: float, **more: object
) -> dict[str, Any]:
    """Return one row of the table; `more` says where it was measured and what it took."""
    return {
        "arch": arch,
        "head_dim": head_dim,
        "shape_class": shape,
        "tiles": asdict(tiles),
        "error": error,
        "bound": bound,
        **more,
    }


def write_table(file: Path, rows: list[dict[str, Any]]) -> None:
    """Put `rows` into the table in the place of rows with the same architecture, head_dim and shape class."""

    def key(row: dict[str, Any]) -> tuple[str, int, str]:
        return row["arch"], row["head_dim"], row["shape_class"]

    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    merged = {key(row): row for row in [*old, *rows]}
    lines = ",\n".join(json.dumps(merged[place], sort_keys=True) for place in sorted(merged))
    file.write_text(f"[\n{lines}\n]\n" if lines else "[]\n", encoding="utf-8")
    read_table(file)
