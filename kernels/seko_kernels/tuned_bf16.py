"""Table of sizes for which Seko's 16-bit attention is faster than torch's.

`scripts/bench/kernels.py --admit` writes `tuned_attention_bf16.json`, which is never edited by hand, with a row for
each size class in which `scripts/kernel_admission` admitted the kernel on its GPU and it was faster than the engine's
default. Builds read the table; opening an artifact does not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from seko_kernels.errors import TilesError
from seko_kernels.outlines import gluon_fault
from seko_kernels.tuned import admitted_rows, merge_rows, table_faults

TABLE = Path(__file__).with_name("tuned_attention_bf16.json")


def is_faster(arch: str, head_dim: int, shape: str) -> bool:
    """Return whether Seko's 16-bit attention is available and was faster than torch's, for a GPU architecture
    (``"sm_90"``), head_dim and `tuned.shape_class`.
    """
    return gluon_fault() is None and (arch, head_dim, shape) in faster_table()


@cache
def faster_table() -> frozenset[tuple[str, int, str]]:
    """Return the architecture, head_dim and shape class of each row; see `read_table`."""
    return read_table(TABLE)


def read_table(file: Path) -> frozenset[tuple[str, int, str]]:
    """Read a table that `write_table` wrote.

    Raises
    ------
    TilesError
        If the file is not a table of sizes, or an entry was not admitted or was not faster than torch's attention.
    """
    rows = set()
    with table_faults(file):
        for row in admitted_rows(file):
            if not row["ms"] < row["torch_ms"]:
                raise TilesError(f"{file.name}: {row['ms']} ms is no less than torch's {row['torch_ms']}")
            rows.add((str(row["arch"]), int(row["head_dim"]), str(row["shape_class"])))
    return frozenset(rows)


def write_table(file: Path, rows: list[dict[str, Any]]) -> None:
    """Add sizes (`rows`) to the JSON table; entries of the same architecture, head_dim and shape class are
    replaced."""
    merge_rows(file, rows)
    read_table(file)
