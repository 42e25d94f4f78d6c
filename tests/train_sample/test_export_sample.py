"""The shipped folder: bfloat16 by checkpoint names, limits that hold; students that are averaged."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from scripts.train_sample import distil, export_sample, train_dit, train_vae
from scripts.train_sample.distillation import Distillation
from scripts.train_sample.export_sample import average
from scripts.train_sample.progress import read_ema
from scripts.train_sample.train_dit import load_teacher
from seko_export.config.schedule import Schedule
from seko_export.families.wan_layout.keys import wan_shapes
from tests.train_sample.test_training import MICRO, MICRO_VAE, averaging_encoder, options

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three runs of one step each."""
    folder = tmp_path_factory.mktemp("runs")
    runs = {name: folder / name for name in ("vae", "teacher", "student")}
    vae = train_vae.train(MICRO_VAE, runs["vae"], 1, options())
    vae.facts |= {"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16, "psnr": 30.0, "psnr_worst": 29.0}
    vae.save()
    train_dit.train(MICRO, runs["teacher"], averaging_encoder, 1, options())
    taught, teaching = load_teacher(runs["teacher"], "cpu")
    config = Distillation("ode", batch=2, pool=4, teacher_passes=2)
    distil.train(config, runs["student"], taught, teaching, averaging_encoder, 1, options())
    return runs


def test_the_folder_holds_what_the_builder_needs(runs, tmp_path):
    output_path = tmp_path / "sample"
    total = export_sample.export(**runs, output_path=output_path)["bytes"]
    names = {
        "dit.safetensors",
        "vae.safetensors",
        "text.safetensors",
        "tokenizer.json",
        "config.json",
    }
    assert {file.name for file in output_path.iterdir()} == names
    dit = load_file(output_path / "dit.safetensors")
    assert {name: tuple(t.shape) for name, t in dit.items()} == wan_shapes(MICRO.model)
    assert {t.dtype for t in dit.values()} == {torch.bfloat16}
    for name, value in read_ema(runs["student"])[0].items():
        assert torch.equal(dit[name], value.bfloat16())
    config = json.loads((output_path / "config.json").read_text())
    assert tuple(config["schedule"]["timesteps"]) == Schedule.warped().timesteps
    assert Tokenizer.from_file(str(output_path / "tokenizer.json")).encode("a red disc").ids[-1] == 1
    assert total == sum((output_path / name).stat().st_size for name in names)


def test_too_much_is_refused(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(export_sample, "LARGEST", 1000)
    with pytest.raises(ValueError, match="at most 1000 ship"):
        export_sample.export(**runs, output_path=tmp_path / "sample")


def test_students_that_began_alike_are_averaged(runs, tmp_path):
    taught, teaching = load_teacher(runs["teacher"], "cpu")
    config = Distillation("dmd", batch=2, pool=4, start_chunks=4, fake_steps=1)
    begin = read_ema(runs["student"])
    configs = {"adamw": config, "muon": dataclasses.replace(config, optimizer="muon")}
    for name, way in configs.items():
        distil.train(way, tmp_path / name, taught, teaching, averaging_encoder, 2, options(), begin)
    students = [read_ema(tmp_path / name) for name in configs]
    assert students[0][1]["began_from"] == begin[1]
    average([tmp_path / name for name in configs], tmp_path / "mean")
    for name, tensor in read_ema(tmp_path / "mean")[0].items():
        assert torch.equal(tensor, (students[0][0][name] + students[1][0][name]) / 2)
    export_sample.export(runs["vae"], runs["teacher"], tmp_path / "mean", tmp_path / "sample")
    assert "dit.safetensors" in {file.name for file in (tmp_path / "sample").iterdir()}
