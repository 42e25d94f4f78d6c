"""The server's benches at a tiny model's size, uncompiled: the parts make their rows."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.bench.trials import tried

pytestmark = pytest.mark.slow


def test_parts_make_their_rows(tmp_path: Path) -> None:
    trial = tried(tmp_path, "serve")
    assert (trial.code, trial.summary["failed"]) == (0, {})
    assert [row["figure"] for row in trial.rows] == ["serve_misses_s3", "serve_encode_cores"]
    late, cores = trial.rows
    assert late["chunks"] >= 4 - 2  # but for the one that each viewer collects
    assert cores["value"] > 0


@pytest.mark.parametrize(
    ("admitted", "chunks_each"),
    [
        ([8, 8], [1, 375]),
        ([4, 4], [1, 750]),  # not 375 of four viewers, who would watch 1,500 chunks
        ([4, 3, 3], [1, 750, 1000]),  # one fewer than in the short load: anew, for longer
        ([4, 6], [1, 750]),
    ],
)
def test_viewers_watch_so_many_chunks_by_how_many_are_admitted(
    admitted: list[int], chunks_each: list[int]
) -> None:
    pytest.importorskip("av")
    serve = importlib.import_module("scripts.bench.serve")
    seconds: list[float] = []

    def load(*options: Any) -> dict[str, Any]:
        values = dict(zip(options[::2], options[1::2], strict=True))
        assert values["--sessions"] == 8
        served = admitted[len(seconds)]
        seconds.append(values["--seconds"])
        return {"served": served, "chunks": round(served * values["--seconds"] * values["--fps"] / 12)}

    report = serve.watched(load, 8, 16.0, 12, 3_000)
    assert [each * 16 / 12 for each in seconds] == chunks_each
    assert len(seconds) == len(admitted)
    assert report["chunks"] >= 3_000
