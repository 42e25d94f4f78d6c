"""Table of sizes for which Seko's 16-bit attention is faster than torch's.

`python -m scripts.bench kernels` writes `tuned_attention_bf16.json`, which is never edited by hand, with a row for
each size class in which `scripts/kernel_admission` admitted the kernel on its GPU and it was faster than the engine's
default. Builds read the table; opening an artifact does not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from seko_kernels.measured_table import MeasuredTable, Rival
from seko_kernels.outlines import gluon_fault
from seko_kernels.tuned import attention_key

TABLE = Path(__file__).with_name("tuned_attention_bf16.json")


def is_faster(arch: str, head_dim: int, shape: str) -> bool:
    """Return whether Seko's 16-bit attention is available and was faster than torch's, for a GPU architecture
    (``"sm_90"``), head_dim and `tuned.shape_class`.
    """
    return gluon_fault() is None and (arch, head_dim, shape) in faster_table()


@cache
def faster_table() -> frozenset[tuple[str, int, str]]:
    """Return the architecture, head_dim and shape class of each row."""
    return frozenset(read_table(TABLE))


_FORM = MeasuredTable(lambda row: (attention_key(row), None), Rival("ms", "torch_ms", "torch's"))
read_table, write_table = _FORM.read, _FORM.write
