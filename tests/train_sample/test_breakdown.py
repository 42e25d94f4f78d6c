"""What is said of verdicts: streams that stay alive, and where prompts fail."""

from __future__ import annotations

import json

import pytest
import torch

from scripts.train_sample.breakdown import Judged, report_of
from scripts.train_sample.captions import Description, Figure, describe
from scripts.train_sample.evaluate import append_figures
from scripts.train_sample.judge import ATTRIBUTES, Verdict, judge
from scripts.train_sample.shapes import draw_scenes, render

pytestmark = pytest.mark.slow

RED = Figure("red", "disc", "orbit", "small")
BLUE = Figure("blue", "square", "spin", "small")


def verdict(seen: tuple[Figure, ...], *wrong: str) -> Verdict:
    """Return a verdict in which these attributes are wrong."""
    return Verdict({name: name not in wrong for name in ATTRIBUTES}, Description(seen, "dark"))


def test_a_stream_is_alive_if_it_still_shows_what_it_showed():
    wanted, good, still = Description((RED,), "dark"), verdict((RED,)), verdict((RED,), "motion")
    rows = [
        Judged(wanted, good, good),
        Judged(wanted, still, still),  # never right, but no worse either
        Judged(wanted, still, verdict((RED,), "size")),
        Judged(wanted, good, still),
    ]
    alive = report_of(rows)["alive"]
    assert (alive["streams"], alive["of"]) == (2, 4)
    assert (alive["largest_fall"], alive["of_attribute"], alive["within_10_points"]) == (0.25, "size", False)
    empty = Judged(wanted, verdict((), "count", "colour"), verdict((), "count", "colour"))
    assert [report_of([*rows, empty])["alive"][name] for name in ("streams", "of")] == [2, 4]
    rows = 19 * [rows[0]] + [rows[3]]
    assert report_of(rows)["alive"]["within_10_points"]
    rows = 17 * [rows[0]] + 2 * [rows[-1]]
    assert not report_of(rows)["alive"]["within_10_points"]  # 2 of 19 are more than 10 points


def test_failures_are_told_by_number_of_shapes_and_by_motion():
    single, double = Description((RED,), "dark"), Description((RED, BLUE), "dark")
    bounced = Figure("red", "ring", "bounce", "small")
    rows = [
        Judged(single, verdict((RED,)), verdict((RED,), "motion")),
        Judged(double, verdict((RED,), "count", "colour"), verdict((RED, BLUE))),
        Judged(double, verdict((bounced, BLUE), "shape", "motion"), verdict((RED, BLUE))),
    ]
    report = report_of(rows)
    assert report["by_count"] == {
        "1": {"clips": 1, "followed": 1.0, "followed_end": 0.0, "failed": {}},
        "2": {
            "clips": 2,
            "followed": 0.0,
            "followed_end": 1.0,
            "failed": {"count": 1, "colour": 1, "shape": 1, "motion": 1},
        },
    }
    assert report["by_motion"]["start"] == {
        "orbit": {"figures": 3, "right": 0.6667, "shape": 0.6667, "seen_as": {"bounce": 1}},
        "spin": {"figures": 2, "right": 0.5, "shape": 0.5, "seen_as": {"missing": 1}},
    }
    assert report["by_motion"]["end"]["spin"]["right"] == 1.0


def test_true_scenes_fail_nowhere():
    scenes = draw_scenes(6, 4, held_out=True)
    rows = []
    for index, wanted in enumerate(describe(scenes)):
        judged = judge(render(scenes[slice(index, index + 1)], torch.arange(57))[0], wanted)
        rows.append(Judged(wanted, judged, judged))
    report = report_of(rows)
    assert all(part["failed"] == {} for part in report["by_count"].values())
    assert all(part["right"] == 1 and part["shape"] == 1 for part in report["by_motion"]["start"].values())
    assert sum(part["clips"] for part in report["by_count"].values()) == 6


def test_the_figures_with_a_bar_are_rows(tmp_path):
    wanted, good = Description((RED,), "dark"), verdict((RED,))
    report = report_of([Judged(wanted, good, good), Judged(wanted, good, verdict((RED,), "motion"))])
    append_figures(tmp_path / "rows.jsonl", report | {"video_seconds": 59.8})
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(row["figure"], row["value"], row["bar"]) for row in rows] == [
        ("prompts_followed", 1.0, 0.85),
        ("largest_fall", 0.5, 0.1),
    ]
    assert rows[0]["end"] == 0.5
