"""The kernel benchmark on a CPU: every call that it times runs, and its bookkeeping keeps what it should."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from seko_kernels import tuned, tuned_bf16
from seko_kernels.tuned import SAFE, read_table
from seko_kernels.tuned_bf16 import read_table as read_bf16_table


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`kernels`, whose calls take a millisecond."""
    kernels = importlib.import_module("scripts.bench.kernels")

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


def test_every_call_runs(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    at_work = bench.Bench(deadline=float("inf"))
    for make in (bench.expansion, bench.cudnn_attention, bench.torchs_attention):
        at_work.time(tiny(bench), make(tiny(bench), "cpu"))
    printed = lines(capsys)
    assert len(printed) == 3
    for line in printed:
        assert line["kind"] == "kernel", line  # none failed


def test_candidates_are_distinct_and_can_be_written_down(bench: ModuleType) -> None:
    candidates = bench.candidates()
    assert len(set(candidates)) == len(candidates)


def test_a_spent_budget_is_named(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    at_work = bench.Bench(deadline=0.0)
    at_work.summary(tmp_path / "rows.jsonl", [tiny(bench)])
    at_work.time(tiny(bench), bench.expansion(tiny(bench), "cpu"))
    assert at_work.left_out == ["S1 fp8_expand"]
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
    at_work.summary(tmp_path / "rows.jsonl", [shape])
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
    at_work.summary(tmp_path / "rows.jsonl", [])
    assert read_bf16_table(table) == {}  # each takes a millisecond here
    at_work.exact["few"]["torch_ms"] = 1.5
    at_work.summary(tmp_path / "rows.jsonl", [])
    assert read_bf16_table(table).keys() == {("sm_90", 128, "few")}
    assert [line["kind"] for line in lines(capsys)][:2] == ["kernel", "attention, 16 bits"]
    at_work.no_16_bits = "not compiled after 9 s"
    at_work.attention_bf16(shape)
    assert lines(capsys)[-1]["refusal"] == "not compiled after 9 s"
