"""The row of a streamed cache: what it counts, and what it refuses to write down."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.wan.presets import PRESETS
from tests.loaded import load_script

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
LAYERS = 4


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script with builds and clocks taken out: 10 ms streamed, 5 resident; a bus of 1 GB/s in, 0.5 out."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = load_script(BENCH / "layer_streaming.py")
    monkeypatch.setattr(module, "build_artifact", lambda *_, **__: None)
    monkeypatch.setattr(module, "resident_copy", lambda *_: None)
    monkeypatch.setattr(module, "copy_rates", lambda: {"in": 1e9, "out": 5e8})

    def timed(folder: Path, _chunks: int) -> dict[str, Any]:
        milliseconds = 10.0 if folder.name.startswith("streamed") else 5.0
        return {"chunk_ms": milliseconds, "latents": torch.ones(2)}

    monkeypatch.setattr(module, "timed", timed)
    return module


def config() -> VideoBuild:
    tiny = PRESETS["tiny"]
    model, stream = replace(tiny.model, layers=LAYERS), replace(tiny.stream, offload_cache=True)
    return VideoBuild(model, VideoConfig(stream, Schedule.warped(2), "fp32"), TargetConfig("cpu"))


def test_the_row_says_ratio_bytes_and_share_of_the_bus(script: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    script.measure(
        config(), tmp_path / "none", "fp32", Namespace(work=tmp_path, rows=rows, chunks=1, layers=LAYERS)
    )
    (row,) = map(json.loads, rows.read_text().splitlines())
    pool = 2 * LAYERS * config().workload.stream.cache_tokens * config().model.dim * 4  # K and V
    assert (row["figure"], row["value"], row["pool_bytes"]) == ("layer_streaming", 2.0, pool)
    assert row["moved_bytes"] == (3 + 1) * pool  # two denoise passes and the context pass fetch, one stores
    assert row["plain_copies_ms"] == pytest.approx(1e3 * (3 * pool / 1e9 + pool / 5e8))
    assert row["bandwidth_share"] == pytest.approx(row["plain_copies_ms"] / 10)


def test_other_bytes_are_no_row(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    latents = iter([torch.ones(2), torch.zeros(2)])
    monkeypatch.setattr(script, "timed", lambda *_: {"chunk_ms": 1.0, "latents": next(latents)})
    options = Namespace(work=tmp_path, rows=tmp_path / "rows.jsonl", chunks=1, layers=LAYERS)
    with pytest.raises(SystemExit, match="gives other bytes"):
        script.measure(config(), tmp_path / "none", "fp32", options)
    assert not options.rows.exists()
