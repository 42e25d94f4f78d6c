"""Benches that only a GPU runs whole: their builds, captures and configurations."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open

from scripts.bench.peers import child
from scripts.bench.rows import COMMIT
from seko_runtime.backends.torch_memory import CpuMemory


def test_engines_of_a_run_that_was_cut_off_are_compiled_anew_and_then_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script: ModuleType = importlib.import_module("scripts.bench.full_model")
    compiled = []

    @contextmanager
    def compiled_in_background(
        config: object, _backend: object, folder: Path, _progress: object
    ) -> Iterator[Callable[[], dict[str, float]]]:
        assert not list(folder.iterdir())
        (folder / "engine.pt2").touch()
        compiled.append(config)
        yield lambda: {"engine": 1.0}

    monkeypatch.setattr(script, "compiled_in_background", compiled_in_background)
    folder = tmp_path / "work" / "engines"
    monkeypatch.setattr(script.FullModelBench, "folder", lambda _, __: folder)
    folder.mkdir(parents=True)
    (folder / "half an engine").touch()
    options = argparse.Namespace(prepare=False, eager=False)
    monkeypatch.setenv(COMMIT, "abc+")  # of no commit: used in the same run alone
    bench = script.FullModelBench(options)
    bench.compile(["a build"])
    bench.compile(["a build"])
    assert compiled == ["a build"]
    assert {file.name for file in folder.iterdir()} == {"engine.pt2"}
    monkeypatch.setenv(COMMIT, "abc")
    for _ in range(2):  # two runs
        script.FullModelBench(options).compile(["a build"])
    assert compiled == ["a build"] * 2
    script.FullModelBench(options).compile(["another build"])
    assert compiled == [*["a build"] * 2, "another build"]

    def part(bench: Any) -> None:
        bench.compile(["a build"])
        pytest.fail("with --prepare nothing is measured")

    options = argparse.Namespace(eager=False, prepare=True, parts=("part",), work=tmp_path, seconds=60)
    assert script.measure(script.FullModelBench(options), {"part": part}) == 0


def test_a_peers_engines_have_run_before_a_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, lingbot = (
        importlib.import_module("scripts.bench.full_model"),
        importlib.import_module("scripts.bench.lingbot"),
    )
    ran: set[str] = set()
    unready: list[str] = []

    class CapturingMemory(CpuMemory):
        captures = True

        def capture(self, work: Callable[[], None]) -> Callable[[], None]:
            before = set(ran)
            work()
            unready.extend(ran - before)
            return work

    def noting(name: str, engine: Any) -> Any:
        def noted(inputs: list[Any]) -> Any:
            ran.add(name)
            return engine(inputs)

        return noted

    monkeypatch.setattr(script, "torch_memory", lambda _: CapturingMemory())
    options = argparse.Namespace(preset="lingbot-tiny", work=tmp_path, eager=False, prepare=False)
    bench = lingbot.Bench(options)
    config = bench.config(exact=True)
    with bench.opened(config, script.eager_engines(config), wrap=noting) as session:
        assert session.stats.captured_graphs > 0
    assert ran
    assert not unready


def test_every_model_of_the_pipeline_has_a_small_one_to_try_the_script() -> None:
    script: ModuleType = importlib.import_module("scripts.bench.pipeline")
    for name, model in script.FULL.items():
        assert model.trial.shape.endswith("to try the script"), name
        assert (model.trial.preset, model.trial.vae) == model.small
    rows = [model.shape for model in script.FULL.values() if model.fps_figure == "fps_5b_704p"]
    assert len(rows) == len(set(rows)) == 2


def test_a_tiny_decoder_is_written_for_the_comparison(tmp_path: Path) -> None:
    file = tmp_path / "tiny.safetensors"
    child.JOBS["vae_file"]({"tiny": True, "output": str(file)})
    with safe_open(file, "pt") as opened:
        assert opened.get_tensor("decoder.1.weight").shape == (256, 16, 3, 3)
        assert opened.get_tensor("decoder.1.weight").dtype is torch.bfloat16
