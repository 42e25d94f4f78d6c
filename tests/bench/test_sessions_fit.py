"""The search for how many sessions fit: a pool of one tells the first guess, one fewer follows a refusal."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.loaded import load_script

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return load_script(BENCH / "sessions_fit.py")


@pytest.mark.parametrize(
    ("most", "room", "sessions", "refusals"), [(100, 7, 7, 1), (100, 8, 8, 0), (3, 8, 3, 0), (100, 2, 1, 3)]
)
def test_the_largest_pool_that_holds_is_found(
    script: Any, monkeypatch: pytest.MonkeyPatch, most: int, room: int, sessions: int, refusals: int
) -> None:
    """Seven rows are free beside the first; ``room`` is what truly fits."""

    def tried(_options: Namespace, _checkpoint: Path, _scheme: str, asked: int) -> dict[str, Any]:
        if asked > room:
            return {"sessions": 0, "free_before": 0, "refused": f"{asked} are too many"}
        return {"sessions": asked, "row_bytes": 100, "free_after": 750}

    monkeypatch.setattr(script, "tried", tried)
    found = script.fitting(Namespace(most=most), Path("none"), "fp4")
    assert (found["sessions"], len(found["refused_above"])) == (sessions, refusals)


def test_a_model_of_which_not_one_fits_is_told(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "tried", lambda *_: {"sessions": 0, "refused": "a pool of 1 takes too much"})
    assert script.fitting(Namespace(most=9), Path("none"), "fp4")["sessions"] == 0
