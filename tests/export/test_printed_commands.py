"""What `inspect` prints as a checkpoint's command: it parses, and builds the model that was inspected."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import seko_export
from scripts import random_checkpoint as random_weights
from scripts.random_checkpoint import write_random_checkpoint
from seko_export.cli import main
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.families.registry import families, graph_of, presets
from seko_export.options.checks import SAMPLE_FOLDER
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_export.video.inspection import CHOICE


class StopError(RuntimeError):
    """Raised where a build would begin."""


@pytest.fixture
def headers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have files of weights hold their header and a hole: those of 14 billion numbers take no room."""

    def write(path: Path, content: Mapping[str, Any]) -> None:
        header, end = {}, 0
        for key, tensor in content.items():
            begin, end = end, end + tensor.nbytes
            header[key] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end]}
        encoded = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.truncate(8 + len(encoded) + end)

    monkeypatch.setattr(random_weights, "_write_safetensors", write)
    monkeypatch.setattr(random_weights, "check_space", lambda *_: None)


def built_by(command: str, monkeypatch: pytest.MonkeyPatch, *more: str) -> VideoBuild:
    """Return what a printed command builds; its options are those of the command line."""
    asked: list[BuildOptions] = []

    def stop(options: BuildOptions, *_: object, **__: object) -> None:
        asked.append(options)
        raise StopError

    with monkeypatch.context() as patch:
        patch.setattr(seko_export, "build", stop)
        program, *words = shlex.split(command)
        assert program == "seko-export"
        result = CliRunner().invoke(main, [*words, *more])
    assert asked, result.output
    config = resolve_build(replace(asked[0], target="cpu")).config
    graph_of(config)  # a family refuses layouts of its own here
    return config


def stated(report: Mapping[str, Any], part: str, kind: type) -> dict[str, Any]:
    """Return the fields of a report's ``model`` or ``stream`` that a config of this kind has."""
    names = {field.name for field in fields(kind)}
    return {name: option["value"] for name, option in report[part].items() if name in names}


# Of each family a model that no preset has; heads of 128 channels, as the family assumes without a config.json.
def odd(family: str) -> ModelConfig:
    small = next(
        preset.model
        for preset in presets().values()
        if preset.model.family == family and preset.model.dim < 512
    )
    text = {"text_tokens": 512} if small.text_tokens else {}
    audio = {"audio_width": 128, "audio_heads": 2} if family == "seko_talk" else {}
    return replace(small, name="odd", layers=3, dim=256, heads=2, **text, **audio)


ODD: dict[str, ModelConfig] = {name: odd(name) for name in families()}
# Of presets with the same sizes, the first.
SIZES = {
    replace(preset.model, name="any"): name
    for name, preset in reversed(presets().items())
    if not preset.missing
}
MODELS = {name: presets()[name].model for name in SIZES.values()} | {
    f"{family} of no preset": model for family, model in ODD.items()
}
FORMS = [
    (name, form, config_file)
    for name, model in MODELS.items()
    for form, how in random_weights.FORMS[model.family].items()
    # One file of a large model is mapped whole, for which not every machine has the memory; shards are smaller.
    for config_file in (True, False)
    if config_file <= (how.config is not None)
    if how.container == "sharded" or (how.container == "safetensors" and model.dim < 1024)
]


@pytest.mark.usefixtures("headers_alone")
@pytest.mark.parametrize(("name", "form", "config_file"), FORMS)
def test_the_printed_command_builds_what_was_inspected(
    name: str, form: str, config_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every preset's sizes and of others, in every form, with and without a config.json."""
    model, path = MODELS[name], tmp_path / "model"
    write_random_checkpoint(path, model, seed=0, format=form)
    files = sorted(path.glob("**/config.json"))
    assert files or not config_file
    for file in files if not config_file else ():
        file.unlink()
    report = seko_export.inspect(path)
    chosen = [report["preset"] if word == CHOICE else word for word in shlex.split(report["command"])]
    config = built_by(shlex.join(chosen), monkeypatch)
    inspected = stated(report, "model", type(config.model))
    assert {field: getattr(config.model, field) for field in inspected} == inspected
    stream = stated(report, "stream", StreamConfig)
    assert {field: getattr(config.workload.stream, field) for field in stream} == stream
    if report["preset"] is not None:
        known = presets()[report["preset"]]
        assert config.model == replace(known.model, name=config.model.name)
        assert config.workload.stream == known.stream
    if config_file:
        assert config.model == replace(model, name=config.model.name)


@pytest.mark.parametrize("checkpoint", [SAMPLE_FOLDER / "dit.safetensors", SAMPLE_FOLDER])
def test_the_printed_command_of_the_sample_builds_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checkpoint.exists():
        pytest.skip("the sample is not here")
    report = seko_export.inspect(checkpoint)
    sample = resolve_build(BuildOptions(preset="sample", target="cpu")).config
    assert built_by(report["command"], monkeypatch) == sample
    assert resolve_build(BuildOptions(model_folder=SAMPLE_FOLDER, target="cpu")).config == sample


@pytest.mark.usefixtures("headers_alone")
@pytest.mark.parametrize("subfolder", ["transformers", "lingbot_world_fast"])
def test_a_folder_that_build_takes_is_inspected(
    subfolder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lingbot's transformer lies in a folder of its model's folder, and nothing else need be there."""
    write_random_checkpoint(tmp_path / "base" / subfolder, ODD["lingbot"], seed=0)
    report = seko_export.inspect(tmp_path / "base")
    assert (report["family"], report["checkpoint"]) == ("lingbot", "base")
    config = built_by(report["command"], monkeypatch)
    assert config.workload.stream.chunk_frames == (4 if subfolder == "transformers" else 3)
    assert config.model == replace(ODD["lingbot"], name=config.model.name)


def test_an_artifact_without_its_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    from seko_runtime.errors import ArtifactError

    for folder in ("engines", "weights"):
        (tmp_path / "artifact" / folder).mkdir(parents=True)
    (tmp_path / "artifact" / "weights" / "0.safetensors").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        seko_export.inspect(tmp_path / "artifact")
