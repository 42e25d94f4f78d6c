"""The simulation of a fleet: schedules computed by hand, laws of queues, failures, and what it takes as input."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from seko_serve.cli import main
from seko_serve.live.admission import SOONEST_S
from seko_serve.metrics import Metrics
from seko_serve.simulation.durations import BoxTimes, as_json, likely, metrics_fields, read_times
from seko_serve.simulation.figures import Figures
from seko_serve.simulation.scenario import Scenario, option

pytest.importorskip("simpy", reason="needs seko-serve[simulate]")
from seko_serve.simulation.run import simulate

QUICK = BoxTimes(rows=1, fps=16, chunk_frames=16, call_s={1: (0.25,)})
PAIR = BoxTimes(rows=2, fps=16, chunk_frames=16, call_s={1: (0.4,), 2: (0.6,)}, open_s=(0.1,))
SAVED = replace(
    PAIR, call_s={1: (0.2,), 2: (0.3,)}, capture_s=(0.01,), write_s=(0.1,), read_s=(0.1,), start_s=(5.0,)
)
AT_ONCE = Scenario(boxes=1, sessions=1, arrivals=0, seconds=3, lengths="fixed")


def test_one_viewer_is_served_as_computed_by_hand() -> None:
    # Chunks 0 and 1 are made by 0.5 s, chunk 2 when chunk 0 was shown (1.25 s), chunk 3 at 2.25 s. Chunk 2, the last
    # one that the viewer wants, was shown at 3.25 s.
    figures = simulate(AT_ONCE, QUICK)
    assert (figures.served, figures.cpr, figures.refused) == (1, 1.0, {})
    assert figures.ttfc_ms_p50 == pytest.approx(250)
    assert figures.span_s == pytest.approx(3.25)
    assert figures.gpu_use == pytest.approx(4 * 0.25 / 3.25)
    assert figures.mean_sessions == pytest.approx(1)


def test_all_parts_of_the_first_chunks_time_are_counted() -> None:
    times = replace(QUICK, open_s=(0.5,), connect_s=(0.125,), encode_s=(0.0625,))
    assert simulate(AT_ONCE, times).ttfc_ms_p50 == pytest.approx(1e3 * (0.25 + 0.5 + 0.125 + 0.0625))


def test_acknowledgements_take_their_time() -> None:
    # Chunk 2 is requested at 1.25 s + 0.125 s, and its own acknowledgement comes at 3.25 s + 0.125 s.
    figures = simulate(AT_ONCE, replace(QUICK, ack_s=(0.125,)))
    assert (figures.cpr, figures.span_s) == (1.0, pytest.approx(3.375))
    # Chunk 2 is due at 2.25 s. Its call takes 0.5 s, so it comes in time if it is requested by 1.75 s.
    slower = replace(QUICK, call_s={1: (0.5,)})
    assert simulate(AT_ONCE, replace(slower, ack_s=(0.4,))).cpr == 1.0
    assert simulate(AT_ONCE, replace(slower, ack_s=(0.6,))).cpr == pytest.approx(1 / 3)


def test_two_viewers_share_the_device_as_the_scheduler_says() -> None:
    # The second one is opened from 0.1 to 0.2 s. Then the first one's chunk is made (0.6), and the second one's chunk,
    # which is due at once, alone (1.0): a call of both would end at 1.2.
    figures = simulate(replace(AT_ONCE, sessions=2), PAIR)
    assert figures.ttfc_ms_p50 == pytest.approx(600)
    assert figures.ttfc_ms_p99 == pytest.approx(1000)
    assert figures.cpr == 1.0


def test_rows_of_two_launch_variants_share_no_call() -> None:
    # With this seed two viewers ask for a chunk at 0.1 s, one at 0.3 s. First chunks play for 0.5 s, and a call takes
    # 0.4 s. Chunks 0 of the two are made by 0.5 s; their chunks 1 are due at 1.0 s, while the third one waits for
    # chunk 0.
    calls: Mapping[int, tuple[float, ...]] = {1: (0.4,), 2: (0.4,)}
    times = replace(QUICK, rows=3, first_frames=8, call_s=calls, connect_s=(0.1, 0.3))
    scenario = replace(AT_ONCE, sessions=3, seconds=1, seed=4)
    # Chunk 1 of the first one is made by 0.9 s, with chunk 0 of the third one; chunk 1 of the second one by 1.3 s. All
    # later chunks are in time.
    assert simulate(scenario, times).cpr == pytest.approx((2 + 1 + 2) / 6)
    # The third one's chunk 0 is alone, so chunks 1 come at 1.3 s, 1.3 s and 1.7 s (due: 1.4 s). Of chunks 2, that of
    # the second one comes at 2.1 s (due: 2.0 s).
    apart = simulate(scenario, replace(times, variant_starts=(1,)))
    assert apart.cpr == pytest.approx((1 + 0 + 1) / 6)
    assert apart.ttfc_ms_p99 == pytest.approx(900)


def test_who_does_not_fit_is_refused_or_waits_for_a_row() -> None:
    two = replace(AT_ONCE, sessions=2)
    assert simulate(two, QUICK).refused == {"full": 1}
    waiting = simulate(replace(two, wait_s=60), QUICK)
    assert (waiting.served, waiting.refused) == (2, {})
    asks = math.ceil(3.25 / SOONEST_S)  # the row is free at 3.25 s
    assert waiting.ttfc_ms_p99 == pytest.approx(1e3 * (asks * SOONEST_S + 0.25))
    assert simulate(replace(two, wait_s=2), QUICK).refused == {"full": 1}


def test_admission_is_by_measured_time() -> None:
    slow = replace(PAIR, call_s={1: (0.4,), 2: (1.01,)})  # two calls of one are 0.8 s of 1 s
    assert simulate(replace(AT_ONCE, sessions=2), slow).served == 2
    slower = replace(PAIR, call_s={1: (0.6,), 2: (1.01,)})
    assert simulate(replace(AT_ONCE, sessions=2), slower).refused == {"full": 1}


def test_a_device_that_is_too_slow_is_late() -> None:
    # Chunks come every 1.25 s and are due every second after the first one.
    figures = simulate(AT_ONCE, replace(QUICK, call_s={1: (1.25,)}))
    assert figures.cpr == 0.0
    assert figures.gpu_use == pytest.approx(1.0)


def test_sessions_at_a_time_are_arrivals_times_their_stay() -> None:
    """Little's law: L = lambda W. With a box for each viewer a stay is the first chunk's time and the video's."""
    scenario = Scenario(boxes=60, sessions=1500, arrivals=2.0, seconds=8, lengths="fixed")
    figures = simulate(scenario, QUICK)
    assert figures.served == 1500
    assert figures.mean_sessions == pytest.approx(1500 / figures.span_s * (0.25 + 8), rel=0.02)


def test_refusals_are_those_of_erlangs_formula() -> None:
    """With c rows, Poisson arrivals and no queue, a share B(c, a) is refused, whatever the lengths' distribution."""
    times = replace(QUICK, rows=4, call_s={1: (0.001,), 4: (0.001,)})
    figures = simulate(Scenario(boxes=1, sessions=6000, arrivals=0.4, seconds=8), times)
    refused = figures.refused["full"] / figures.sessions
    offered = figures.mean_sessions / (1 - refused)  # what was carried, of all
    terms = [offered**rows / math.factorial(rows) for rows in range(5)]
    assert offered == pytest.approx(3.4, abs=0.2)  # 0.4 a second, and 8 s with half a chunk more
    assert refused == pytest.approx(terms[-1] / sum(terms), abs=0.015)


def test_equal_seeds_give_equal_figures() -> None:
    times = replace(SAVED, call_s={1: (0.2, 0.25, 0.4), 2: (0.3, 0.5)})
    scenario = Scenario(boxes=4, sessions=60, arrivals=0.5, seconds=20, box_failure_h=0.02, gateways=2)
    figures = simulate(scenario, times)
    assert figures == simulate(scenario, times)
    assert figures != simulate(replace(scenario, seed=1), times)
    another = simulate(scenario, times, draw=1)
    assert another != figures
    assert another.span_s == figures.span_s  # the viewers arrive at the same times
    assert simulate(replace(scenario, seed=1), times).span_s != figures.span_s


FAILING = Scenario(boxes=6, sessions=150, arrivals=0.3, seconds=30, snapshot_every=4)


def test_killed_boxes_are_counted_and_their_sessions_continue() -> None:
    calm, failing = simulate(FAILING, SAVED), simulate(replace(FAILING, box_failure_h=0.05), SAVED)
    assert (calm.ended_boxes, calm.resumes, calm.lost, calm.cpr) == (0, 0, 0, 1.0)
    assert failing.ended_boxes > 5
    assert failing.resumes > 5
    assert failing.cpr is not None
    assert failing.cpr < 1
    assert failing.resume_s_p50 is not None
    assert failing.resume_s_p50 >= 0.1 + 0.2  # reading the snapshot, and a call
    # Every fourth chunk begins a snapshot, which is written within a chunk; one chunk is ahead of it.
    assert 0 < failing.repeated_chunks <= 4 + 2


def test_without_snapshots_a_killed_box_takes_its_sessions_with_it() -> None:
    figures = simulate(replace(FAILING, box_failure_h=0.05, snapshot_every=0), SAVED)
    assert figures.lost > 5
    assert figures.resumes == 0


def test_a_lost_machine_is_noticed_when_its_rows_have_ended() -> None:
    scenario = replace(FAILING, boxes_per_machine=2)
    killed = simulate(replace(scenario, box_failure_h=0.05), SAVED)
    lost = simulate(replace(scenario, machine_failure_h=0.05), SAVED)
    assert killed.resume_s_p50 is not None
    assert lost.resume_s_p50 is not None
    assert killed.resume_s_p50 < 2 < 4 < lost.resume_s_p50  # rows end 4 to 6 s after the machine


def test_replaced_boxes_lose_and_repeat_nothing() -> None:
    figures = simulate(replace(FAILING, drain_at_s=100, drained=6), SAVED)
    assert figures.ended_boxes == 6
    assert figures.resumes > 0
    assert (figures.lost, figures.repeated_chunks) == (0, 0)


def test_several_gateways_do_not_send_all_to_the_same_boxes() -> None:
    """With rows for twice as many viewers nobody is refused, though gateways do not see each other's requests."""
    times = replace(SAVED, call_s={1: (0.45,), 2: (0.9,)})
    figures = simulate(Scenario(boxes=60, sessions=600, arrivals=6.0, seconds=10, gateways=6), times)
    assert figures.refused == {}
    assert figures.box_rps < 1.2 * figures.gateway_rps


def test_the_number_of_boxes_follows_the_load_and_cuts_no_session() -> None:
    times = replace(SAVED, call_s={1: (0.2,), 2: (0.3,)})
    # 20 viewers at a time, who fill 10 boxes of two rows.
    steady = Scenario(boxes=1, sessions=800, arrivals=1.0, seconds=20, wait_s=60, warm_up_s=200, gateways=2)
    figures = simulate(replace(steady, max_boxes=40, shrink_after_s=30), times)
    assert (figures.refused, figures.lost, figures.resumes, figures.ended_boxes) == ({}, 0, 0, 0)
    assert figures.mean_sessions / (2 * 0.8) < figures.mean_boxes < figures.mean_sessions / (2 * 0.5) + 3
    assert simulate(replace(steady, max_boxes=1), times).mean_boxes == 1
    assert simulate(steady, times).refused["full"] > 400


def test_a_queue_is_served_by_the_boxes_that_it_adds() -> None:
    rush = Scenario(boxes=1, sessions=40, arrivals=0, seconds=20, lengths="fixed", wait_s=300, queue=40)
    scaled = simulate(replace(rush, max_boxes=8), SAVED)
    assert scaled.refused == {}
    assert scaled.mean_boxes > 6
    fixed = simulate(rush, SAVED)
    assert fixed.span_s > 3 * scaled.span_s
    assert scaled.resumes == 0


def test_a_warm_up_is_left_out() -> None:
    whole = simulate(FAILING, SAVED)
    later = simulate(replace(FAILING, warm_up_s=whole.span_s / 2), SAVED)
    assert 0 < later.sessions < whole.sessions
    assert later.span_s == pytest.approx(whole.span_s / 2)


# -- durations --------------------------------------------------------------------------------------------------------


def test_durations_go_through_json() -> None:
    times = replace(PAIR, start_s=(1.0, 2.0), variant_starts=(1, 7))
    assert read_times(as_json(times)) == times
    assert read_times(as_json(times), {"rows": 7}).rows == 7


LEAST = {"rows": 1, "fps": 16, "chunk_frames": 12, "call_s": {"1": 0.5}}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "no JSON"),
        (json.dumps({**LEAST, "calls": 1}), "'calls' is no field"),
        (json.dumps({**LEAST, "fps": "16"}), "fps is '16', expected a number"),
        (json.dumps({**LEAST, "fps": 0}), "fps is 0"),
        (json.dumps({**LEAST, "rows": 1.5}), "rows is 1.5"),
        (json.dumps({**LEAST, "open_s": [0.1, -1]}), "open_s has no value, or one below 0"),
        (json.dumps({**LEAST, "open_s": [True]}), r"open_s is \[True\]"),
        (json.dumps({**LEAST, "variant_starts": 2}), "variant_starts is 2, expected a list"),
        (json.dumps({**LEAST, "variant_starts": [True]}), r"variant_starts is \[True\], expected a list"),
        (json.dumps({**LEAST, "variant_starts": [2, 1]}), "variant_starts are no ascending numbers"),
        (json.dumps({**LEAST, "variant_starts": [0]}), "variant_starts are no ascending numbers"),
        (json.dumps({**LEAST, "call_s": {}}), "call_s is empty"),
        (json.dumps({**LEAST, "call_s": {"a": 1}}), "call_s is no table"),
        (json.dumps({name: value for name, value in LEAST.items() if name != "fps"}), "'fps' is missing"),
        ("# no metrics\n", "has no measured call"),
    ],
)
def test_wrong_durations_are_refused_by_the_fields_name(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_times(text)


def test_the_metrics_of_boxes_are_durations() -> None:
    texts = []
    for factor in (1.0, 3.0):
        metrics = Metrics()
        for seconds in (0.21, 0.22, 0.23):
            metrics.call.labels(2).observe(factor * seconds)
        metrics.opening.observe(factor * 0.03)
        metrics.snapshot.labels("write").observe(factor * 0.3)
        texts.append(metrics.text().decode())
    times = metrics_fields(texts)
    assert set(times) == {"call_s", "open_s", "write_s"}
    assert sum(times["call_s"][2]) / len(times["call_s"][2]) == pytest.approx(2 * 0.22)
    text = texts[0] + 'seko_serve_variant_start{variant="1"} 1.0\nseko_serve_variant_start{variant="2"} 7.0\n'
    assert metrics_fields([text, text])["variant_starts"] == (1, 7)
    assert read_times(texts[0], {"rows": 4, "fps": 16, "chunk_frames": 12}).rows == 4


@given(st.lists(st.floats(0.001, 9.0), min_size=1, max_size=60))
def test_values_that_stand_for_a_histogram_lie_where_it_says(values: list[float]) -> None:
    registry = CollectorRegistry()
    bounds = (0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
    histogram = Histogram("seko_serve_call_seconds", "-", ["bucket"], registry=registry, buckets=bounds)
    for value in values:
        histogram.labels(1).observe(value)
    stand_ins = metrics_fields([generate_latest(registry).decode()])["call_s"][1]
    for bound in bounds:
        share = sum(value <= bound for value in values) / len(values)
        assert sum(value <= bound for value in stand_ins) / len(stand_ins) == pytest.approx(share, abs=0.02)


def test_a_histogram_of_one_interval_keeps_its_mean() -> None:
    counts: Mapping[float, float] = {0.3: 0, 0.4: 50, math.inf: 50}
    assert likely(counts, 50 * 0.36) == pytest.approx([0.36] * 100)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "times.json"
    path.write_text(as_json(PAIR))
    return path


def test_the_command_prints_the_figures(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["simulate", str(file), "--sessions", "5", "--seconds", "2", "--boxes", "2", "--rows", "1"]
    assert main([*options, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    expected = simulate(Scenario(sessions=5, seconds=2, boxes=2), replace(PAIR, rows=1))
    assert figures == asdict(expected)
    assert set(figures) == {field.name for field in fields(Figures)}
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert printed == expected.text() + "\n"
    assert "GPU use" in printed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--boxes", "0"], "--boxes is 0"),
        (["--boxes", "1000000000"], "--boxes is 1000000000, expected 1 or more, and less than 1e9"),
        (["--box-failure", "-1"], "--box-failure is -1.0"),
        *(
            ([name, "1e-9"], f"{name} is 1e-09, expected 0.001 hours (3.6 s) or more, or 0 for never")
            for name in ("--box-failure", "--machine-failure")
        ),
        (["--buffer", "9"], "--buffer is 9"),
        (["--drained", "7"], "--drained is 7"),
        (["--max-boxes", "2"], "--max-boxes is 2, expected 3 or more"),
        (["--max-boxes", "9", "--drained", "1"], "--drained needs"),
        (["--seconds", "nan"], "--seconds is nan"),
        (["--fps", "0"], "fps is 0.0"),
    ],
)
def test_impossible_options_are_refused(
    options: list[str], named: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(file), *options]) == 3
    printed = capsys.readouterr().err
    assert named in printed
    assert printed.count("\n") == 1


def test_a_reader_who_has_gone_is_told_in_one_line(file: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "seko_serve", "simulate", str(file), "--json"]
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert done.returncode == 1
    assert done.stderr == "seko-serve: whoever read the output stopped reading\n"


def test_options_have_the_names_of_fields() -> None:
    assert [option(name) for name in ("wait_s", "box_failure_h", "drain_at_s", "seconds")] == [
        "--wait",
        "--box-failure",
        "--drain-at",
        "--seconds",
    ]
