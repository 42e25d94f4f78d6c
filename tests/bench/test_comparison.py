"""Shapes, figures, children and the command of the comparison; the peers themselves are in test_peers.py."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.bench import comparison
from scripts.bench.cases import CASES
from scripts.bench.peers import figures, running
from scripts.bench.peers.shapes import SHAPES
from scripts.bench.rows import COMMIT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
QUERIES_AND_KEYS = {
    "S1": (4680, 32760),
    "S3": (2160, 8640),
    "S5": (4680, 32760),
    "S6": (7040, 28160),
}


def test_shapes_have_the_queries_and_keys_that_they_are_named_for():
    for name, sizes in QUERIES_AND_KEYS.items():
        stream = SHAPES[name].stream
        assert (stream.chunk_tokens, stream.cache_tokens) == sizes, name
    assert SHAPES["S6"].stream.sink_frames == 8


def measured(step, chunk=None, ok=True, **more):
    spread = {"median": step, "p90": step + 1}
    return {"step_ms": spread, "chunk_ms": {"median": chunk or 5 * step}, "verdict": {"ok": ok}, "kv_bytes": 8,
            "what": "it"} | more  # fmt: skip


def by_name(results, shapes=("S1", "S3"), engines=("exact", "fp4_fp8", "fp4")):
    all_figures = figures.figures(results, shapes, engines)
    return {(f.name, f.shape.rpartition(", ")[2]): f for f in all_figures}


def test_figures_are_ratios_of_what_was_measured():
    s1 = {
        "B3": measured(70.0),
        "exact": measured(63.0),
        "fp4": measured(49.0, 250.0),
        "batch4": {"chunk_ms": {"median": 900.0}, "first_frames": [9, 6, 3, 0]},
        "end to end": {"serial_ms": 300.0, "overlapped_ms": 240.0},
        "eager VAE": {"decode_ms": 250.0, "what": "diffusers"},
        figures.TINY: {"serial_ms": 200.0, "overlapped_ms": 180.0},
        figures.VAE_FP8: {"serial_ms": 270.0, "overlapped_ms": 210.0},
    }
    ratios = by_name({"S1": s1, "S3": {"B0": measured(20.0), "exact": measured(6.0)}})
    assert ratios["s1_exact_vs_b3", "exact"].value == pytest.approx(0.9)
    assert ratios["s1_fp4_vs_b3", "fp4"].value == pytest.approx(0.7)
    assert ratios["s3_vs_eager", "exact"].value == pytest.approx(0.3)
    assert ratios["batch4_s1", "fp4"].value == pytest.approx(0.9)
    assert ratios["e2e_s1_vs_b3", "fp4"].value == pytest.approx(0.5)
    assert ratios["e2e_s1_vs_b3", "fp4"].more["overlapped_ratio"] == pytest.approx(0.4)
    assert ratios["e2e_s1_tiny_vs_b3", "fp4"].value == pytest.approx(200 / 600)
    assert ratios["e2e_s1_vae_fp8_vs_b3", "fp4"].value == pytest.approx(270 / 600)
    assert ratios["s3_vs_eager", "fp4"].missing == ("fp4",)
    assert ratios["s1_fp4_fp8_vs_b3", "fp4_fp8"].missing == ("fp4_fp8",)
    assert set(figures.BARS) >= {name for name, _ in ratios}


def test_a_resident_windows_step_is_a_row_where_it_is_asked_for():
    s1 = {"B3": measured(80.0), "fp4_fp8_resident": measured(52.0)}
    ratios = by_name({"S1": s1}, ("S1",), ("fp4_fp8_resident",))
    assert ratios["s1_fp4_fp8_vs_b3", "fp4_fp8_resident"].value == pytest.approx(0.65)
    assert ("s1_fp4_fp8_vs_b3", "fp4_fp8_resident") not in by_name({"S1": s1}, ("S1",), ("exact",))


def test_a_stream_that_fails_its_check_gives_no_ratio():
    ratios = by_name({"S1": {"B3": measured(70.0, ok=False), "exact": measured(63.0)}})
    assert ratios["s1_exact_vs_b3", "exact"].missing == ("B3 (failed its check)",)


def runner(seconds=60.0):
    seen = {}
    return running.Runner(time.monotonic() + seconds, seen.__setitem__), seen


def test_children_that_fail_are_named_with_what_they_said():
    children, seen = runner()
    assert children.script("good", "-c", "print('noise'); print('{\"a\": 1}')") == {"a": 1}
    assert children.script("bad", "-c", "raise SystemExit('the disk is full')") is None
    assert children.script("mute", "-c", "pass") is None
    assert "the disk is full" in children.failed["bad"]
    assert "no JSON" in children.failed["mute"]
    assert list(seen) == ["good"]
    assert children.skipped == []


def test_the_time_ends_children_and_begins_no_more(tmp_path):
    children, _ = runner(seconds=1.0)
    woken = tmp_path / "woken"
    inner = f"import pathlib, time; time.sleep(60); pathlib.Path({str(woken)!r}).touch()"
    assert (
        children.script(
            "slow", "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
        )
        is None
    )
    assert not woken.exists()  # its pipes are the grandchild's too, and end with that
    assert children.script("late", "-c", "print('{}')") is None
    assert children.skipped == ["slow", "late"]
    assert children.failed == {}


def test_a_signal_ends_the_children_too(tmp_path):
    """Else a comparison that was stopped would leave its last measurement on the GPU."""
    goal = tmp_path / "pid"
    sleeper = (
        f"import os, pathlib, time; pathlib.Path({str(goal)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    lines = (
        "import signal",
        "from scripts.bench.peers import running",
        "signal.signal(signal.SIGTERM, running.end_with_children)",
        f"running.run_child(('-c', {sleeper!r}), 60.0)",
    )
    parent = subprocess.Popen([sys.executable, "-c", "\n".join(lines)], cwd=ROOT)
    until = time.monotonic() + 120
    while not goal.exists() or not goal.read_text():
        assert time.monotonic() < until
        assert parent.poll() is None
        time.sleep(0.1)
    parent.terminate()
    assert parent.wait(timeout=30) == 128 + signal.SIGTERM
    while Path("/proc", goal.read_text()).exists():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.fixture
def canned(monkeypatch):
    """Return a function that runs the comparison with children that answer at once, and what they were called."""
    called = []

    def compare(tmp_path, answers, *, prepare=False, **given):
        def answer(_self, name, arguments):  # noqa: ARG001 - the runner's own
            called.append(name)
            if " build " in name:
                (tmp_path / "work" / name.replace(" build ", "-")).mkdir()
            if name.endswith(" weights"):
                (tmp_path / "work" / f"{name.removesuffix(' weights')}.safetensors").touch()
            return json.loads(json.dumps(answers(name)))

        monkeypatch.setattr(running.Runner, "_run", answer)
        rows = tmp_path / "rows.jsonl"
        (tmp_path / "work").mkdir(exist_ok=True)
        own = {**CASES["peers"].options, **given, "work": tmp_path / "work", "rows": rows, "seconds": 460.0}
        code = comparison.run(argparse.Namespace(**own, prepare=prepare))
        lines = rows.read_text().splitlines() if rows.exists() else []
        return code, [json.loads(line) for line in lines]

    monkeypatch.setattr(comparison.signal, "signal", lambda *_: None)
    return compare, called


def quick(name):
    """A report that serves every job: peers take 70 ms a step, engines 49."""
    step = 70.0 if " B" in name else 49.0
    more = {"first_frames": [9, 6, 3, 0], "serial_ms": 300.0}
    more |= {"overlapped_ms": 250.0, "decode_ms": 250.0}
    return measured(step, **more)


def test_rows_of_two_shapes_and_the_order_of_work(tmp_path, canned, capsys):
    """Each row comes once; the reference comes before the peers."""
    compare, called = canned
    code, rows = compare(tmp_path, quick, shapes=("S1", "S3"), engines=("exact", "fp4"))
    assert code == 0
    by_figure = {(row["figure"], row["shape"].rpartition(", ")[2]): row for row in rows}
    assert set(by_figure) == {
        ("s1_exact_vs_b3", "exact"), ("s1_fp4_vs_b3", "fp4"), ("s3_vs_eager", "exact"), ("s3_vs_eager", "fp4"),
        ("batch4_s1", "fp4"), ("batch4_s3", "fp4"), ("e2e_s1_vs_b3", "fp4"),
    }  # fmt: skip
    assert len(rows) == len(by_figure)
    assert by_figure["s1_fp4_vs_b3", "fp4"]["value"] == pytest.approx(0.7)
    assert by_figure["s1_fp4_vs_b3", "fp4"]["bar"] == figures.BARS["s1_fp4_vs_b3"]
    order = {name: place for place, name in enumerate(called)}
    assert len(order) == len(called)
    assert order["S1 reference"] < order["S1 B3"] < order["S1 B0"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["no_row"] == {}


def test_an_fp8_decoder_is_built_and_measured_where_it_is_asked_for(tmp_path, canned, monkeypatch):
    compare, called = canned
    build, built = running.Runner.build, {}

    def noted(runner, name, arguments):
        built[name] = arguments
        return build(runner, name, arguments)

    monkeypatch.setattr(running.Runner, "build", noted)
    asked = {"shapes": ("S1",), "engines": ("fp4",), "peers": ("B3",), "extras": ("e2e", "e2e_fp8")}
    code, rows = compare(tmp_path, quick, **asked)
    assert code == 0
    values = {row["figure"]: (row["value"], row["bar"]) for row in rows if row["figure"].startswith("e2e")}
    assert values == {"e2e_s1_vs_b3": (0.5, 0.475), "e2e_s1_vae_fp8_vs_b3": (0.5, 0.45)}
    assert [name for name in built if "--vae-fp8" in built[name]] == ["S1 build fp4-e2e_fp8"]
    assert {name for name in built if "--vae" in built[name]} == {"S1 build fp4-e2e", "S1 build fp4-e2e_fp8"}
    assert called.count("S1 eager VAE") == 1


def test_what_was_prepared_is_not_built_again(tmp_path, canned, monkeypatch):
    compare, called = canned
    asked = {"shapes": ("S1",), "engines": ("exact", "fp4"), "peers": ("B3",), "extras": ("e2e",)}
    monkeypatch.setenv(COMMIT, "abc")
    code, rows = compare(tmp_path, quick, **asked, prepare=True)
    builds = {name for name in called if " build " in name}
    assert builds == {"S1 build exact", "S1 build fp4", "S1 build fp4-e2e"}
    assert (code, rows) == (0, [])
    assert "S1 B3" not in called
    called.clear()
    code, rows = compare(tmp_path, quick, **asked)
    assert code == 0
    assert {"s1_fp4_vs_b3", "e2e_s1_vs_b3"} <= {row["figure"] for row in rows}
    assert not any(" build " in name for name in called)


def test_a_wrong_peer_fails_the_comparison_and_gives_no_row(tmp_path, canned, capsys):
    compare, _ = canned
    code, rows = compare(
        tmp_path,
        lambda name: quick(name) | {"verdict": {"ok": name != "S1 B3"}},
        shapes=("S1",), engines=("exact",), extras=(), peers=("B3",),
    )  # fmt: skip
    assert code == 1
    assert rows == []
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "is not the exact model" in report["failed"]["S1 B3"]


def test_large_models_are_built_one_at_a_time_and_removed(tmp_path, canned):
    compare, called = canned
    code, _ = compare(tmp_path, quick, shapes=("S5",), engines=("exact", "fp4"), peers=("B3",), extras=())
    assert code == 0
    assert set(called[:2]) == {"S5 reference", "checkpoint wan-14b"}  # side by side
    assert called[2:] == ["S5 B3", "S5 build exact", "S5 exact", "S5 build fp4", "S5 fp4"]
    assert not list((tmp_path / "work").glob("S5-*"))


def test_the_command_ends_in_one_json_line(tmp_path):
    """At the tiny shape, on whatever is here: reference and one peer, each in its own process; no engine asked for."""
    command = [sys.executable, "-m", "scripts.bench", "peers", "--trial", "--seconds", "600", "--work", str(tmp_path),
               "--rows", str(tmp_path / "rows.jsonl")]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["failed"] == {}
    assert report["skipped"] == []
    assert report["rows"] == []
    assert not (tmp_path / "rows.jsonl").exists()
    assert report["shapes"]["S0"]["measured"]["B0"]["verdict"]["ok"]
