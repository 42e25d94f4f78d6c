"""The stages of a training one after another, in tiny sizes, as the command runs them; what ended is not run again."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from scripts.train_sample import __main__ as command
from seko_export.families.wan_layout.keys import wan_shapes
from seko_export.options.sample import read_sample

pytestmark = pytest.mark.slow


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stages run in this process: importing torch for each would take minutes. Returns the names of those that ran."""
    ran: list[str] = []

    def run(stage: command.Stage, options: argparse.Namespace, report: Path) -> None:
        ran.append(stage.name)
        _, module, *arguments = stage.command(options)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert importlib.import_module(module).main(arguments) == 0
        report.write_text(output.getvalue())

    monkeypatch.setattr(command, "run", run)
    return ran


def test_all_stages_of_the_sample_make_a_sample(
    here: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of the switches behind the first begins from the part before it: a fourth would show nothing new."""
    assert command.SWITCH_PARTS > 3
    monkeypatch.setattr(command, "SWITCH_PARTS", 3)
    arguments = ["sample", str(tmp_path), "--rehearse", "--device", "cpu"]
    assert command.main(arguments) == 0
    switches = [f"switch{part}" for part in range(1, command.SWITCH_PARTS + 1)]
    assert here == [
        "vae",
        "dit",
        "ode",
        "adamw",
        "muon",
        "mean",
        "export",
        *switches,
        "judge_switches",
    ]
    sample = read_sample(tmp_path / "sample")
    switched = load_file(tmp_path / switches[-1] / "dit.safetensors")
    assert {name: tuple(t.shape) for name, t in switched.items()} == wan_shapes(sample.model)
    facts = json.loads((tmp_path / switches[-1] / "state" / "state.json").read_text())["facts"]
    for _ in switches[1:]:
        facts = facts["began_from"]
    assert facts["steps"] == command.REHEARSED_STEPS
    judged = json.loads((tmp_path / switches[-1] / "judged.json").read_text())
    assert set(judged) == {"before", "after", "video_seconds"}
    ran = len(here)
    (tmp_path / "judge_switches.json").unlink()
    assert command.main(arguments) == 0
    assert here[ran:] == ["judge_switches"]


def test_the_world_is_trained_and_judged(here: list[str], tmp_path: Path) -> None:
    assert command.main(["world", str(tmp_path), "--rehearse", "--device", "cpu"]) == 0
    assert here == ["world"]
    names = {path.name for path in (tmp_path / "world").iterdir()}
    assert {"dit.safetensors", "config.json", "judged.json", "walks.png"} <= names


def test_a_stage_that_fails_ends_the_training_and_has_no_report(tmp_path: Path) -> None:
    stage = command.Stage("mean", "average", (str(tmp_path), "--folder", str(tmp_path / "mean")), "files")
    with pytest.raises(SystemExit, match="stage mean ended with 1"):
        command.run(stage, argparse.Namespace(device="cpu", rehearse=True), tmp_path / "mean.json")
    assert not (tmp_path / "mean.json").exists()


def test_only_trainings_on_a_gpu_are_compiled() -> None:
    for device, rehearse, compiled in (("cuda", False, True), ("cuda", True, False), ("cpu", False, False)):
        options = argparse.Namespace(device=device, rehearse=rehearse)
        for stage in command.stages("sample", Path("runs")):
            assert ("--compile" in stage.command(options)) == (compiled and stage.kind == "train"), stage.name
