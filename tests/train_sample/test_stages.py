"""The stages of a training one after another, in tiny sizes, as the command runs them; what ended is not run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from scripts.train_sample import __main__ as command
from scripts.train_sample import train_vae, train_world
from scripts.train_sample.progress import REHEARSED_STEPS, Options, read_ema
from seko_export.families.wan_layout.keys import wan_shapes
from seko_export.options.sample import read_sample
from tests.train_sample.test_training import MICRO_VAE, options

pytestmark = pytest.mark.slow


def ended(runs: Path) -> set[str]:
    """Return the stages that have a report."""
    return {path.stem for path in runs.glob("*.json")}


def test_all_stages_of_the_sample_make_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part of the switches behind the first begins from the part before it: a fourth would show nothing new."""
    assert command.SWITCH_PARTS > 3
    monkeypatch.setattr(command, "SWITCH_PARTS", 3)
    arguments = ["sample", str(tmp_path), "--rehearse", "--device", "cpu"]
    assert command.main(arguments) == 0
    ran = [json.loads(line)["stage"] for line in capsys.readouterr().out.splitlines()]
    switches = [f"switch{part}" for part in range(1, command.SWITCH_PARTS + 1)]
    assert ran == ["vae", "dit", "ode", "adamw", "muon", "mean", "export", *switches, "judge_switches"]
    assert ended(tmp_path) == set(ran)
    sample = read_sample(tmp_path / "sample")
    switched = load_file(tmp_path / switches[-1] / "dit.safetensors")
    assert {name: tuple(t.shape) for name, t in switched.items()} == wan_shapes(sample.model)
    facts = read_ema(tmp_path / switches[-1])[1]
    for _ in switches[1:]:
        facts = facts["began_from"]
    assert facts["step"] == REHEARSED_STEPS
    judged = json.loads((tmp_path / switches[-1] / "judged.json").read_text())
    assert set(judged) == {"before", "after", "video_seconds"}
    (tmp_path / "export.json").unlink()
    assert command.main(arguments) == 0
    assert [json.loads(line)["stage"] for line in capsys.readouterr().out.splitlines()] == ["export"]


def test_the_world_is_trained_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small VAE: the shipped sample's would take most of the time."""
    vae = train_vae.train(MICRO_VAE, tmp_path / "vae", 1, options())
    vae.facts |= {"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}
    vae.save()
    small = train_vae.FrozenVae(tmp_path / "vae", "cpu")
    monkeypatch.setattr(train_world, "FrozenVae", lambda *_: small)
    assert command.main(["world", str(tmp_path), "--rehearse", "--device", "cpu"]) == 0
    assert ended(tmp_path) == {"world"}
    names = {path.name for path in (tmp_path / "world").iterdir()}
    assert {"dit.safetensors", "config.json", "judged.json", "walks.png"} <= names


def test_a_stage_that_fails_ends_the_training_and_has_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def fails() -> dict[str, object]:
        raise ValueError("too few")

    stages = {"first": lambda: {"step": 1}, "second": fails, "third": lambda: ran.append("third") or {}}
    monkeypatch.setattr(command, "stages", lambda *_: stages)
    with pytest.raises(ValueError, match="too few"):
        command.main(["sample", str(tmp_path)])
    assert ended(tmp_path) == {"first"}
    assert not ran


def test_only_trainings_on_a_gpu_are_compiled() -> None:
    assert [Options(*given).compiles for given in (("cuda", False), ("cuda", True), ("cpu", False))] == [
        True,
        False,
        False,
    ]
