"""The table of tiles of linear layers on few rows: what it takes, and what it and the check before it refuse."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.kernel_admission import rows as admission_rows
from scripts.kernel_admission.rows import admit_rows
from seko_kernels.errors import TilesError
from seko_kernels.few_rows import TICKETS
from seko_kernels.few_rows_reference import gated, linear, rms_norm
from seko_kernels.tuned_rows import TABLE, Product, RowTiles, measured_tiles, read_table, write_table

TILES = RowTiles(16, 64, 128, 1, warpgroup=True)
GATED = Product(8, 48, 64, "gated", "bf16")
ADDED = Product(8, 48, 64, "added", "e4m3")


def row(product: Product = GATED, **changes: Any) -> dict[str, Any]:
    figures = {"arch": "sm_90", "error": 0.001, "bound": 0.002, "us": 5.0, "usual_us": 9.0}
    return {**product._asdict(), **figures, "tiles": TILES._asdict(), **changes}


def test_a_written_table_is_read_and_a_new_row_replaces_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    write_table(file, [row(), row(ADDED)])
    smaller = TILES._replace(channels=32)
    write_table(file, [row(tiles=smaller._asdict())])
    assert read_table(file) == {("sm_90", GATED): smaller, ("sm_90", ADDED): TILES}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"error": float("nan")}, "above its bound"),
        ({"us": 9.0}, "no less than the usual"),
        ({"form": "plain"}, "no linear layer 'plain'"),
        ({"tiles": TILES._replace(splits=2)._asdict()}, "share sums behind a norm"),
        ({"tiles": {"rows": 16, "width": 2}}, "is no table of measured kernels"),
    ],
)
def test_rows_that_were_not_admitted_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TilesError, match=said):
        write_table(tmp_path / "table.json", [row(**changes)])


def test_the_shipped_table_is_read_and_knows_no_layer_of_another_gpu() -> None:
    assert read_table(TABLE) is not None
    assert measured_tiles("sm_91", GATED) is None


def test_rows_of_a_class_end_at_a_power_of_two() -> None:
    classes = {rows: Product.of(rows, 48, 64, "norm", fp8=False).rows for rows in (1, 8, 9, 22, 33, 64)}
    assert classes == {1: 8, 8: 8, 9: 16, 22: 32, 33: 64, 64: 64}


def launch_on_cpu(*arguments: Any) -> None:
    """Does in torch's ops, with float32 sums, what `launch_few_rows` launches."""
    _, x, norm, weight, scale, hidden, out, tickets, eps, branch_scale, is_gated, _, _ = arguments
    assert tickets.shape == (TICKETS,)
    wide = x.float()
    y: Tensor = linear(wide if norm is None else rms_norm(wide, norm.float(), eps), weight.float(), scale)
    y = gated(y) if is_gated else y
    out.copy_(y if hidden is None else hidden + branch_scale * y)


@pytest.mark.parametrize("product", [GATED, ADDED, Product(8, 48, 64, "norm", "e4m3")], ids=str)
def test_a_kernel_that_is_right_is_admitted(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_rows, "launch_few_rows", launch_on_cpu)
    admitted = admit_rows(TILES, product, 5, "cpu")
    assert admitted.refusal == ""
    assert 0 < admitted.error <= admitted.bound < 0.02


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda call: call.out[-1].zero_(), "is above"),
        (lambda call: call.out[0, 0].fill_(torch.nan), "error nan"),
        (lambda call: call.out[0, 0].add_(call.run), "two runs differ"),
        (lambda call: call.tickets[3].add_(1), "a counter is not zero"),
        (lambda call: call.out[99], "IndexError"),
    ],
)
def test_a_kernel_with_a_fault_is_refused(fault: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def launch(*arguments: Any) -> None:
        launch_on_cpu(*arguments)
        runs.append(SimpleNamespace(out=arguments[6], tickets=arguments[7], run=len(runs)))
        fault(runs[-1])

    monkeypatch.setattr(admission_rows, "launch_few_rows", launch)
    assert said in admit_rows(TILES, GATED, 5, "cpu").refusal
