"""docs/evidence.md is what the marks of tests and the rows of benchmarks say, and README uses its words."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import evidence
from seko_export.families.registry import OWN

ROOT = Path(__file__).parents[1]


def test_the_page_is_what_the_marks_and_rows_say() -> None:
    assert evidence.PAGE.read_text(encoding="utf-8") == evidence.page(), "run python -m scripts.evidence"


def test_readmes_families_carry_their_word() -> None:
    shown = evidence.evidence()
    rows = [line.split("|") for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()]
    words = {
        cells[1].strip(" `"): cells[-2].strip() for cells in rows if cells[1:] and cells[1].startswith(" `")
    }
    assert {name: words.get(name) for name in OWN} == {name: shown[name].level for name in OWN}


@pytest.mark.parametrize(("feature", "level"), [("flight", evidence.TINY), ("wan", "real")])
def test_a_mark_of_no_feature_or_level_is_refused(
    feature: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "marks", lambda: {feature: {level: {"tests/test_x.py"}}})
    with pytest.raises(ValueError, match=r"flight|real"):
        evidence.evidence()


def test_a_feature_that_nothing_shows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**evidence.AREAS, "More": (evidence.Feature("flight", "it flies"),)}
    monkeypatch.setattr(evidence, "AREAS", more)
    with pytest.raises(ValueError, match="flight"):
        evidence.evidence()
