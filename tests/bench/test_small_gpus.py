"""The bench of small GPUs: each card's artifact makes video in its memory, where those of larger cards must refuse."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import small_gpus


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fits: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the rows where artifacts of up to ``fits`` gigabytes run in the memory of their card."""
    held: list[int] = []

    def stream(_flag: str, _code: str, artifact: str, _chunks: str) -> dict[str, Any]:
        needed = int(Path(artifact).name.split("gb")[0])
        if needed > fits or needed * 10**9 > held[-1]:
            return {"refused": f"{needed} GB are needed", "chunks": 0}
        return {"chunk_ms": 500.0, "frames": 12, "held_bytes": 7, "kv": "fp4", "host_weight_bytes": 0}

    class Held:
        def __init__(self, left: int) -> None:
            held.append(left)

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(small_gpus, "_built", lambda work, name, _card: work / name)
    monkeypatch.setattr(small_gpus, "last_json", stream)
    monkeypatch.setattr(small_gpus, "_held_but", Held)
    rows = tmp_path / "rows.jsonl"
    options = Namespace(
        trial=False, prepare=False, parts=("8gb_1p3b", "24gb_14b"), chunks=3, work=tmp_path, rows=rows
    )
    code = small_gpus.run(options)
    return code, [json.loads(line) for line in rows.read_text().splitlines()]


def test_each_card_is_a_row_with_what_larger_ones_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, (small, large) = measured(monkeypatch, tmp_path, fits=24)
    assert code == 0
    assert (small["figure"], small["value"]) == ("fits_8gb_1p3b", 24.0)
    assert small["larger_refused"] == {"24gb_14b": "24 GB are needed"}
    assert (large["figure"], large["larger_refused"]) == ("fits_24gb_14b", {})


def test_a_card_into_which_its_artifact_does_not_fit_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = measured(monkeypatch, tmp_path, fits=12)
    assert (code, [row["figure"] for row in rows]) == (1, ["fits_8gb_1p3b"])
    assert "24 GB are needed" in capsys.readouterr().out
