"""The kernel benchmark on a CPU: every call that it times runs, and its bookkeeping keeps what it should."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from seko_kernels import tuned, tuned_bf16
from seko_kernels.formats import NUMBER_FORMATS
from seko_kernels.tuned import SAFE, read_table
from seko_kernels.tuned_bf16 import read_table as read_bf16_table

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/bench/kernels.py, whose calls take a millisecond."""
    monkeypatch.syspath_prepend(str(BENCH))
    for name in ("kernels", "kernel_shapes", "rows"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import kernels

    monkeypatch.setattr(kernels, "milliseconds", lambda run: (run(), 1.0)[1])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return kernels


def tiny(bench: ModuleType) -> object:
    """A shape that a CPU runs at once."""
    return bench.Shape("S1", heads=2, ffn=96, frame_tokens=5, cache_frames=4)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_every_call_runs_and_agrees_with_itself(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    at_work = bench.Bench(deadline=float("inf"))
    for make in (bench.cache_calls, bench.scheme_calls, bench.row_calls, bench.matmul_calls):
        for timed in make(tiny(bench), "cpu"):
            at_work.time(tiny(bench), timed)
    for make in (bench.cudnn_attention, bench.torchs_attention):
        at_work.time(tiny(bench), make(tiny(bench), "cpu"), compare=False)
    printed = lines(capsys)
    assert len(printed) == 5 + 2 * len(NUMBER_FORMATS) + 9 + 8 + 2
    for line in printed:
        assert line["kind"] == "kernel", line  # none failed
        assert line.get("difference", 0.0) == 0.0
        assert line.get("bytes_that_differ", 0.0) == 0.0


def test_candidates_are_distinct_and_can_be_written_down(bench: ModuleType) -> None:
    candidates = bench.candidates()
    assert len(set(candidates)) == len(candidates)


def test_the_expansion_is_timed_before_all_that_no_figure_needs(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cache_calls", "scheme_calls", "row_calls", "matmul_calls"):
        make = getattr(bench, name)
        monkeypatch.setattr(bench, name, lambda shape, _, make=make: make(shape, "cpu"))
    monkeypatch.setattr(bench, "EXPAND_VARIANTS", ())
    at_work = bench.Bench(deadline=float("inf"))
    at_work.expansion(tiny(bench))
    at_work.others(tiny(bench))
    names = [line["name"] for line in lines(capsys)]
    assert names[0] == "fp8_expand"
    assert names.count("fp8_expand") == 1
    assert len(names) > 10


def test_a_spent_budget_is_named(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    at_work = bench.Bench(deadline=0.0)
    at_work.summary(Namespace(admit=False, rows=None), [tiny(bench)])
    at_work.time(tiny(bench), bench.row_calls(tiny(bench), "cpu")[0])
    assert at_work.left_out == ["S1 gated_residual_norm_modulate bf16"]
    assert lines(capsys)[-1]["kind"] == "summary"


def test_the_fastest_admitted_tiles_enter_the_table(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.json"
    monkeypatch.setattr(bench, "TABLE", table)
    at_work = bench.Bench(deadline=float("inf"))
    shape = bench.SHAPES["S1"]
    slow, fast = {"key": tuned.SAFE_HOPPER, "ms": 2.0}, {"key": SAFE, "ms": 1.0}
    at_work.admitted["S1"] = [row | {"error": 0.01, "bound": 0.02} for row in (slow, fast)]
    at_work.times = {("S1", "sdpa_cudnn_bf16"): 2.0, ("S1", "fp8_expand"): 0.1}
    at_work.summary(Namespace(admit=True, rows=tmp_path / "rows.jsonl"), [shape])
    assert read_table(table) == {("sm_90", 128, "some"): SAFE}
    best = lines(capsys)[-1]["best"]
    assert isinstance(best, dict)
    assert best["S1"]["ratio_with_expand"] == 0.55
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert row["figure"] == "attn_h12_vs_cudnn"
    assert row["value"] == 0.55


def test_16_bit_attention_enters_its_table_where_it_is_faster(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table.json"
    monkeypatch.setattr(tuned_bf16, "TABLE", table)
    for name in ("torchs_attention", "exact_window"):
        make = getattr(bench, name)
        monkeypatch.setattr(bench, name, lambda shape, _, make=make: make(shape, "cpu"))
    admit = bench.admit_bf16
    monkeypatch.setattr(bench, "admit_bf16", lambda _, full: admit("cpu", full))
    at_work = bench.Bench(deadline=float("inf"))
    shape = bench.Shape("S1", heads=2, ffn=96, frame_tokens=5, cache_frames=4, head_dim=128)
    at_work.attention_bf16(shape)
    at_work.summary(Namespace(admit=True, rows=None), [])
    assert read_bf16_table(table) == {}  # each takes a millisecond here
    at_work.exact["few"]["torch_ms"] = 1.5
    at_work.summary(Namespace(admit=True, rows=None), [])
    assert read_bf16_table(table).keys() == {("sm_90", 128, "few")}
    assert [line["kind"] for line in lines(capsys)][:2] == ["kernel", "attention, 16 bits"]
    at_work.no_16_bits = "not compiled after 9 s"
    at_work.attention_bf16(shape)
    assert lines(capsys)[-1]["refusal"] == "not compiled after 9 s"
