"""The viewer's clock: never more than two chunks ahead, due when the frames before it were shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seko_serve.live.pace import CREDIT, Pace


def test_chunks_are_due_when_the_ones_before_were_shown() -> None:
    pace = Pace(fps=16.0)
    assert pace.due(100.0) == 100.0
    assert pace.count_chunk(9, 101.0) == 0.0
    assert pace.due(101.1) == 101.0 + 9 / 16
    assert pace.count_chunk(12, 101.5) == 0.0
    assert pace.due(101.6) == 101.0 + 21 / 16
    assert pace.count_chunk(12, 102.5) == 102.5 - (101.0 + 21 / 16)
    assert pace.late == 1
    assert pace.due(102.5) == 102.5 + 12 / 16  # the viewer stood still until then


def test_a_viewer_with_a_buffer_begins_later() -> None:
    pace = Pace(fps=10.0, buffer=2)
    pace.count_chunk(10, 1.0)
    assert pace.begun is None
    pace.count_chunk(10, 2.0)
    assert pace.due(2.0) == 2.0 + 20 / 10


def test_a_pause_counts_as_no_stall() -> None:
    pace = Pace(fps=10.0)
    pace.count_chunk(10, 1.0)
    pace.stop()
    assert pace.count_chunk(10, 50.5) == 0.0
    assert pace.due(50.6) == 51.5
    assert pace.late == 0


@given(st.integers(1, 4), st.lists(st.one_of(st.just("make"), st.integers(-3, 40)), max_size=80))
def test_nothing_runs_further_ahead_than_the_credit(buffer: int, steps: list[str | int]) -> None:
    pace = Pace(fps=16.0, buffer=buffer)
    for now, step in enumerate(steps):
        if step == "make":
            if pace.may_run():
                pace.count_chunk(12, float(now))
        else:
            pace.acknowledge(int(step))
        assert 0 <= pace.shown <= pace.chunks <= pace.shown + CREDIT + buffer - 1
