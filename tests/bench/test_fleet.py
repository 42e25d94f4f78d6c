"""The fleet's bench: what is subtracted from metrics, and that parts make rows from which the picture is drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from seko_serve.metrics import Metrics
from seko_serve.simulation.durations import metrics_fields
from tests.loaded import load_script

pytest.importorskip("simpy", reason="needs seko-serve[simulate]")
BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def test_metrics_are_counted_from_an_earlier_time_on() -> None:
    bench, metrics = load_script(BENCH / "fleet_simulation.py"), Metrics()
    metrics.call.labels(1).observe(5.0)
    earlier = metrics.text().decode()
    metrics.call.labels(1).observe(0.25)
    metrics.opening.observe(0.03)
    fields = metrics_fields([bench._text_difference(metrics.text().decode(), earlier)])
    assert fields["call_s"][1] == pytest.approx([0.25] * 100)
    assert fields["open_s"] == pytest.approx([0.03] * 100)


@pytest.mark.slow
def test_simulated_sizes_are_rows_and_a_picture(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        str(BENCH / "fleet_simulation.py"),
        "--rows",
        str(rows),
        "--parts",
        "sizes,large",
    ]
    subprocess.run([*command, "--gpus", "3", "--sessions", "100"], check=True, capture_output=True)
    results = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["figure"] for row in results] == ["fleet_size"] * 12 + ["fleet_simulate_s"]
    assert {row["buffer"] for row in results[:12]} == {1, 2}
    assert all(0 <= row["value"] <= 1 for row in results[:12])
    picture = tmp_path / "picture.svg"
    load_script(BENCH / "fleet_plot.py").draw(picture, results)
    assert "chunks in time" in picture.read_text()


def test_a_picture_of_no_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row of fleet_size"):
        load_script(BENCH / "fleet_plot.py").draw(tmp_path / "picture.svg", [])
