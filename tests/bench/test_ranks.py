"""The bench of several GPUs: its processes, its comparison, and on a CPU at a tiny size the whole script."""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.bench.trials import tried


@pytest.fixture
def processes() -> ModuleType:
    """The module that starts ranks."""
    return importlib.import_module("scripts.bench.rank_processes")


def options_of(work: Path) -> argparse.Namespace:
    return argparse.Namespace(work=work, steady=2)


def test_reports_are_in_the_order_of_ranks(
    processes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import json, sys, time\n"
        "spec = json.loads(sys.argv[1])\n"
        "time.sleep(0.5 * (spec['rank'] == 0))\n"
        "print('noise')\n"
        "print(json.dumps({'rank': spec['rank'], 'chunks': spec['chunks'], 'own': spec['own']}))\n"
    )
    monkeypatch.setattr(processes, "CHILD", (str(child),))
    reports = processes.run_ranks(options_of(tmp_path), "several", 2, {"own": "x"})
    assert reports == [{"rank": rank, "chunks": 2, "own": "x"} for rank in range(2)]


def test_a_rank_that_fails_is_named_with_its_words_and_ends_the_others(
    processes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import json, os, pathlib, sys, time\n"
        "if json.loads(sys.argv[1])['rank']:\n"
        f"    while not pathlib.Path({str(tmp_path / 'pid')!r}).exists():\n"
        "        time.sleep(0.01)\n"
        "    raise SystemExit('no memory')\n"
        f"file = pathlib.Path({str(tmp_path / 'writing')!r})\n"
        "file.write_text(str(os.getpid()))\n"
        f"file.rename({str(tmp_path / 'pid')!r})\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(processes, "CHILD", (str(child),))
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: exit 1, late False: no memory"):
        processes.run_ranks(options_of(tmp_path), "several", 2, {})
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_rank_that_does_not_end_in_time_fails(
    processes: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = tmp_path / "child.py"
    child.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(processes, "CHILD", (str(child),))
    monkeypatch.setattr(processes, "CHILD_S", 0.0)
    with pytest.raises(RuntimeError, match="rank 0: exit None, late True"):
        processes.run_ranks(options_of(tmp_path), "one", 1, {})


def test_kernels_are_compared_with_a_ranks_share(processes: ModuleType) -> None:
    del processes  # its fixture has the bench's folder on the path
    comparison = importlib.import_module("scripts.bench.rank_comparison")

    def report(ms: float, kernel_ms: float) -> dict[str, object]:
        buckets = {"matmul": {"time_ns": kernel_ms * 1e6}, "copy": {"time_ns": 0}}
        profile = {
            "buckets": buckets,
            "idle_ns": 2e6,
            "top": [{"name": "k" * 99, "calls": 3, "time_ns": 4e6}],
        }
        times = {"to_host": [ms, ms, 9 * ms]}
        return {"passes": 4, "ms": times, "peak_bytes": 7, "ready_s": 1.5, "profile": profile}

    row = comparison.compared([report(80, 40)], [report(50, 24), report(51, 24)], 2)
    assert row["ms"] == {"one": {"to_host": 20.0}, "several": {"to_host": 12.5}}
    assert row["ratios"] == {"to_host": 1.6}
    assert row["peak_bytes"] == [7, 7, 7]
    assert row["kernels_ms"] == {"one, rank 0, more than its share": {"matmul": [10.0, 6.0, 1.0]}}
    assert row["idle_ms"] == {"one": 0.5, "several": 0.5}
    assert row["top_ms"]["one"] == [["k" * 80, 3, 1.0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "figures"),
    [
        ("ranks_drawn", ["sp2_s5", "sp2_s5_rank_skew_ms", "sp_equal"]),
        ("ranks_decode", ["sp2_vae"]),
        ("ranks_lingbot", ["lingbot_fps_2gpu"]),
        ("ranks_talk", ["talk_realtime_2gpu"]),
    ],
)
def test_two_ranks_on_a_cpu_make_the_rows(case: str, figures: list[str], tmp_path: Path) -> None:
    trial = tried(tmp_path, case)
    assert (trial.code, trial.summary) == (0, {"failed": []})
    assert [row["figure"] for row in trial.rows] == figures
    if "sp_equal" in figures:
        first, *later = trial.rows[-1]["by_chunk"]
        assert first < 1e-6  # it reads no past
        assert max(later) < 1e-4  # the past is FP4, of which another sum may flip a code on some processors
    if case == "ranks_decode":
        assert trial.rows[-1]["levels_apart"] <= 1
