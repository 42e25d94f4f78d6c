"""The picture of a pool's figures is drawn of rows, and refused where one is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.loaded import load_script

ROOT = Path(__file__).parents[2]


def test_the_picture_is_of_the_rows(tmp_path):
    pytest.importorskip("matplotlib")
    plot = load_script(ROOT / "scripts" / "bench" / "pool_plot.py")
    rows = [json.loads(line) for line in plot.ROWS.read_text(encoding="utf-8").splitlines()]
    plot.draw(tmp_path / "pool.png", rows)
    assert (tmp_path / "pool.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="no row of sessions_fit_14b_fp4"):
        plot.draw(tmp_path / "none.png", [row for row in rows if row["figure"] != "sessions_fit_14b_fp4"])
    with pytest.raises(ValueError, match="batch_scaling"):
        plot.draw(tmp_path / "none.png", [row for row in rows if row["figure"] != "batch_scaling"])
