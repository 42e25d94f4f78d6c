"""The search for how many sessions fit: a pool of one tells the first guess, one fewer follows a refusal."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import sessions_fit

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("most", "room", "sessions", "refusals"), [(100, 7, 7, 1), (100, 8, 8, 0), (3, 8, 3, 0), (100, 2, 1, 3)]
)
def test_the_largest_pool_that_holds_is_found(
    monkeypatch: pytest.MonkeyPatch, most: int, room: int, sessions: int, refusals: int
) -> None:
    """Seven rows are free beside the first; ``room`` is what truly fits."""

    def tried(_options: Namespace, _checkpoint: Path, _scheme: str, asked: int) -> dict[str, Any]:
        if asked > room:
            return {"sessions": 0, "free_before": 0, "refused": f"{asked} are too many"}
        return {"sessions": asked, "row_bytes": 100, "free_after": 750}

    monkeypatch.setattr(sessions_fit, "tried", tried)
    result = sessions_fit.fitting(Namespace(most=most), Path("none"), "fp4")
    assert (result["sessions"], len(result["refused_above"])) == (sessions, refusals)


@pytest.mark.parametrize("place", ["at the build", "when it was opened"])
def test_a_model_of_which_not_one_fits_is_a_row_of_none_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    """A build that ends in an error says nothing but that; a pool that cannot be opened also how much was free."""

    def last_json(*arguments: str) -> dict[str, Any]:
        if "build" not in arguments:
            return {"sessions": 0, "free_before": 7, "refused": "too little when it was opened"}
        if place == "at the build":
            raise SystemExit("too little at the build")
        return {}

    rows = tmp_path / "rows.jsonl"
    (tmp_path / "self-forcing-1.3b.pt").touch()
    monkeypatch.setattr(sessions_fit, "last_json", last_json)
    sessions_fit.run(
        Namespace(preset="self-forcing-1.3b", kv=("fp4", "bf16"), most=1000, work=tmp_path, rows=rows)
    )
    results = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(row["figure"], row["value"]) for row in results] == [
        ("sessions_fit_1p3b_fp4", 0),
        ("sessions_fit_1p3b_bf16", 0),
    ]
    for row in results:
        assert [f"too little {place}" in reason for reason in row["refused_above"]] == [True]


def test_why_a_build_was_refused_reaches_the_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A build whose checkpoint is not there: its own words, which it says on stderr."""
    options = Namespace(work=tmp_path, preset="tiny")
    refusal = sessions_fit.tried(options, tmp_path / "none.pt", "fp4", 1)["refused"]
    assert refusal.startswith("1 sessions at the build: ")
    assert str(tmp_path / "none.pt") in refusal.splitlines()[-1]
    assert refusal.splitlines()[-1] in capfd.readouterr().err
