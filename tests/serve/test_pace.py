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


def test_a_chunk_that_waited_for_its_viewer_is_late_only_by_what_the_server_took_too_long() -> None:
    """A chunk plays for a second, and the viewer says each time half a second too late that it has shown one."""
    pace = Pace(fps=10.0)
    pace.count_chunk(10, 1.0)
    pace.count_chunk(10, 1.2)
    assert pace.due(1.2) == 3.0
    pace.acknowledge(0, 2.5)  # so the next one is needed at 3.5
    assert pace.count_chunk(10, 3.25) == 0.0
    assert pace.due(3.25) == 4.25
    pace.acknowledge(1, 9.0)  # as when its tab was hidden
    assert pace.count_chunk(10, 9.75) == 0.0
    pace.acknowledge(1, 10.0)  # which says nothing new
    pace.acknowledge(2, 10.5)
    assert pace.count_chunk(10, 11.75) == 0.25
    assert (pace.due_chunks, pace.late) == (4, 1)


@given(st.integers(1, 4), st.lists(st.one_of(st.just("make"), st.integers(-3, 40)), max_size=80))
def test_nothing_runs_further_ahead_than_the_credit(buffer: int, steps: list[str | int]) -> None:
    pace = Pace(fps=16.0, buffer=buffer)
    for now, step in enumerate(steps):
        if step == "make":
            if pace.may_run():
                pace.count_chunk(12, float(now))
        else:
            pace.acknowledge(int(step), float(now))
        assert 0 <= pace.shown <= pace.chunks <= pace.shown + CREDIT + buffer - 1
