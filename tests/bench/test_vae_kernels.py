"""The benchmark of the VAE's convolutions: its cases, its candidates, and what it writes to the table."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from seko_export.media.wan_vae.config import VAE_PRESETS
from seko_export.media.wan_vae.modules import VaeDecode, decoder_cache_shapes
from seko_kernels import conv_reference
from seko_kernels.causal_conv import DOUBLED_TAPS
from seko_kernels.tuned_conv import SHARED_BYTES, Convolution, read_table
from tests.support.tiers import first_is_fast

ROOT = Path(__file__).parents[2]
TOY = {"vae": "lightvae", "height": 8, "width": 8, "latents": 1, "calls": ("steady",), "fp8": True}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`vae_kernels` on a CPU, with the kernel's reference; a call takes a millisecond."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in ("vae_kernels", "vae_layers"):
        monkeypatch.delitem(sys.modules, f"scripts.bench.{name}", raising=False)
    vae_kernels = importlib.import_module("scripts.bench.vae_kernels")

    monkeypatch.setattr(vae_kernels, "milliseconds", lambda call: (call(), 1.0)[1])
    monkeypatch.setattr(vae_kernels, "run_kernel", reference)
    return vae_kernels


def reference(case: Any, _: Any, given: Any) -> Tensor:
    if case.doubled:
        return conv_reference.doubled_conv(given.x, given.weight, given.bias)
    return conv_reference.causal_conv(
        given.x, given.earlier, given.weight, given.scale, given.bias, given.residual
    )


def in_this_process(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, groups: Any) -> list[dict[str, Any]]:
    """Children are calls; returns the list to which every printed line is added."""
    printed: list[dict[str, Any]] = []
    monkeypatch.setattr(bench, "emit", lambda **line: printed.append(json.loads(json.dumps(line))))

    def children(tasks: list[dict[str, Any]], _: float) -> list[dict[str, Any]]:
        start = len(printed)
        for task in tasks:
            bench.child(task, groups, 2)
        return printed[start:]

    monkeypatch.setattr(bench, "children", children)
    return printed


def test_the_cases_are_the_decoders_work(bench: ModuleType) -> None:
    """All but the matrix products, which are half a hundredth at most."""
    config = VAE_PRESETS["wan-2.1"]
    options = Namespace(vae="wan-2.1", height=480, width=832, latents=3, calls=("steady",), fp8=False)
    groups = bench.grouped(options)
    doubled = {key for key in groups if key.taps == DOUBLED_TAPS}
    assert {key._replace(taps=(1, 3, 3)) for key in doubled} == {
        key for key in groups if key.taps == (1, 3, 3)
    }
    half = VaeDecode(config, first=False, frames=3).to("meta")
    shapes = ((1, 16, 3, 60, 104), *decoder_cache_shapes(config, 1, 60, 104))
    with FlopCounterMode(display=False) as counter:
        half(*(torch.empty(shape, device="meta") for shape in shapes))
    whole = 1e-12 * counter.get_flop_counts()["Global"][torch.ops.aten.convolution]
    work = {
        key: sum(case.operations * count for case, count in cases.items()) for key, cases in groups.items()
    }
    assert 0.995 * whole < sum(work[key] for key in groups.keys() - doubled) < whole
    assert list(work.values()) == sorted(work.values(), reverse=True)
    wide = next(cases for key, cases in groups.items() if key[:2] == (96, 96))
    assert sorted((case.normed, case.added, count) for case, count in wide.items()) == [
        (True, False, 3),
        (True, True, 3),
    ]
    with_fp8 = bench.grouped(Namespace(**{**vars(options), "fp8": True}))
    assert groups.items() <= with_fp8.items()
    e4m3 = {key: cases for key, cases in with_fp8.items() if key not in groups}
    assert sum(cases.total() for cases in e4m3.values()) == 2 * 14
    assert 0.9 * whole < sum(c.operations * n for cases in e4m3.values() for c, n in cases.items())
    both = bench.grouped(Namespace(**{**vars(options), "calls": ("steady", "first")}))
    assert groups.items() <= both.items()
    assert all(case.first for key, cases in both.items() if key not in groups for case in cases)


@pytest.mark.usefixtures("bench")
@pytest.mark.parametrize(
    ("channels", "filters"),
    [(96, 96), (192, 192), (384, 384), (384, 768), (16, 384), (96, 3), (24, 24), (48, 48), (1024, 1024)],
)
def test_candidates_fit_a_multiprocessor(channels: int, filters: int) -> None:
    layers, key = sys.modules["scripts.bench.vae_layers"], Convolution(channels, filters, (3, 3, 3), "many")
    with_margin = list(layers.margin_candidates(key))
    assert bool(with_margin) == any(filters % part == 0 for part in (96, 128))
    boxes = list(layers.candidates(key))  # no interpreter runs a kernel in Gluon
    assert not any(tiles.margin for tiles in boxes)
    tried = with_margin + boxes
    assert len(tried) == len(set(tried))
    assert len(boxes) >= 6
    for tiles in tried:
        assert tiles.loaded_bytes * tiles.resident < SHARED_BYTES
        assert tiles.filters + tiles.more_filters <= 256
        assert filters >= 128 or tiles.filters + tiles.more_filters >= filters


@pytest.mark.parametrize(
    ("first_ms", "second_ms", "rows"),
    first_is_fast([(1.0, 1.0, {False}), (1.0, 0.5, {False, True}), (2.0, 2.0, set())]),
)
def test_the_table_gets_what_was_right_and_faster(
    first_ms: float,
    second_ms: float,
    rows: set[bool],
    bench: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faster than torch's convolution, which takes 2 ms; e4m3, and a convolution together with the doubling before it,
    also faster than the kernel without."""
    groups = bench.grouped(Namespace(**TOY))
    printed = in_this_process(bench, monkeypatch, groups)
    runs = set(bench.kernels_of(groups, 2))
    timed = bench.time_candidates(groups, runs, 2, float("inf"))
    assert {len(order) for order in timed.values()} == {2}
    admitted, refused = bench.admit_fastest(groups, timed, 1.0)
    assert (set(admitted), refused) == (set(groups), [])
    measured, file = bench.layer_milliseconds, tmp_path / "table.json"

    def milliseconds(case: Any, tiles: Any) -> float:
        assert measured(case, tiles) == 1.0
        return 2.0 if tiles is None else second_ms if case.fp8 or case.doubled else first_ms

    monkeypatch.setattr(bench, "layer_milliseconds", milliseconds)
    bench.compare_layers(groups, admitted, file, float("inf"))
    assert not [line for line in printed if line["kind"] == "failed"]
    assert printed[-1]["kind"] == "summary"
    table = read_table(file) if file.exists() else {}
    assert set(table) == {
        ("interpreter", key) for key in groups if (key.fp8 or key.taps == DOUBLED_TAPS) in rows
    }
    assert all(tiles == timed[key][0] for (_, key), tiles in table.items())
    monkeypatch.setattr(bench, "layer_milliseconds", lambda _, tiles: 2.0 if tiles is None else 3.0)
    bench.compare_layers(groups, admitted, file, float("inf"))
    assert read_table(file) == {}  # what is slower today leaves the table


def test_wrong_kernels_and_an_ended_budget_leave_the_table_as_it_is(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = bench.grouped(Namespace(**TOY))
    printed = in_this_process(bench, monkeypatch, groups)
    runs = set(bench.kernels_of(groups, 2))
    monkeypatch.setattr(bench, "run_kernel", lambda *given: reference(*given) * 1.02)
    assert not any(bench.time_candidates(groups, runs, 2, float("inf")).values())
    assert {line["kind"] for line in printed} == {"failed", "alone"}
    assert bench.time_candidates(groups, runs, 2, 0.0) == {}
    assert printed[-1]["kind"] == "left out"
    assert bench.admit_fastest(groups, {key: [] for key in groups}, 1.0) == ({}, [])


def test_convolutions_are_refused_if_every_checked_candidate_is(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = bench.grouped(Namespace(**TOY))
    in_this_process(bench, monkeypatch, groups)
    orders = {key: list(sys.modules["scripts.bench.vae_layers"].tried(key, 2)) for key in groups}
    first, *_ = groups
    right = bench.admit_conv

    def admit(tiles: Any, channels: int, filters: int, taps: Any, *where: Any, fp8: bool) -> Any:
        verdict = right(tiles, channels, filters, taps, *where, fp8=fp8)
        place = (first.channels, first.filters, first.taps, first.fp8)
        wrong = (channels, filters, taps, fp8) == place
        return replace(verdict, refusal="it is wrong") if wrong or tiles == orders[first][0] else verdict

    monkeypatch.setattr(bench, "admit_conv", admit)
    admitted, refused = bench.admit_fastest(groups, orders, 1.0)
    assert set(refused) == {key for key in groups if (*key[:3], key.fp8) == (*first[:3], first.fp8)}
    assert set(admitted) == groups.keys() - set(refused)


def test_convolutions_that_a_lost_process_did_not_check_are_checked_again_alone(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = bench.grouped(Namespace(**TOY))
    orders = {key: list(sys.modules["scripts.bench.vae_layers"].tried(key, 2)) for key in groups}
    asked: list[tuple[list[int], float]] = []

    def children(tasks: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
        numbers = sorted(number for task in tasks for number, _ in task["admit"])
        asked.append((numbers, seconds))
        if len(asked) == 1:  # the process of 1 ended behind its first candidate
            return [
                {"kind": "refused" if number == 1 else "admitted", "number": number} for number in numbers[1:]
            ]
        return [{"kind": "refused", "number": number} for number in numbers for _ in range(2 * number)]

    monkeypatch.setattr(bench, "children", children)
    admitted, refused = bench.admit_fastest(groups, orders, 60.0)
    alone = 60.0 / len(groups)
    assert asked == [([*range(len(groups))], 60.0), ([0], alone), ([1], alone)]
    assert (set(admitted), refused) == ({*[*groups][2:]}, [[*groups][1]])


@pytest.mark.slow
def test_the_script_runs_in_the_interpreter(tmp_path: Path) -> None:
    """Every convolution is timed by the kernel itself, and admitted."""
    command = [sys.executable, "-m", "scripts.bench", "vae_kernels", "--trial", "--work", str(tmp_path)]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    printed = [json.loads(line) for line in ran.stdout.splitlines()]
    kinds = [line["kind"] for line in printed]
    assert not {"failed", "not ended", "not admitted", "left out"} & set(kinds)
    assert kinds.count("alone") == kinds.count("admitted") == kinds.count("layers") == 11
