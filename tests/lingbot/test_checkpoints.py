"""Checkpoints of lingbot-world: strict keys, recognised by shapes, config.json and folder."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.lingbot.keys import lingbot_shapes
from seko_export.families.lingbot.model import LingbotModel
from seko_export.families.lingbot.presets import PRESETS, TINY, V1, V2
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.families.recognition import Source
from seko_export.families.registry import graph_of
from seko_export.families.wan.presets import PRESETS as WAN_PRESETS
from seko_export.options.declaration import BuildOptions
from seko_export.options.model import read_model
from tests.support.asked import resolved

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_checkpoint.py"
# Sixteen times as wide, so that 128 channels a head, which no file states, give two heads.
MODEL = replace(PRESETS[TINY].model, name="small", dim=256, heads=2)


def written(path: Path, form: str = "lingbot-sharded", **config: object) -> Path:
    write_random_checkpoint(path, MODEL, seed=0, format=form)
    if config:
        file = path / "config.json"
        fields = json.loads(file.read_text(encoding="utf-8")) | config
        file.write_text(json.dumps(fields), encoding="utf-8")
    return path


def test_numbers_of_the_published_model() -> None:
    """The camera's part is what the facts count: 326 tensors, 4,255,431,680 numbers; 18.5 billion in all."""
    shapes = lingbot_shapes(PRESETS[V2].model)
    camera = {name: shape for name, shape in shapes.items() if "cam" in name or "c2ws" in name}
    assert (len(camera), sum(map(prod, camera.values()))) == (326, 4_255_431_680)
    assert sum(prod(shape) for name, shape in shapes.items() if name.startswith("head.head")) == 327_744
    assert round(sum(map(prod, shapes.values())) / 1e9, 1) == 18.5
    assert shapes["patch_embedding.weight"] == (5120, 36, 1, 2, 2)
    assert shapes["patch_embedding_wancamctrl.weight"] == (5120, 1536)


def test_times_of_a_config_json_are_not_used_and_told(tmp_path: Path) -> None:
    """Those of its version are, as no config.json of the authors has any; the window is used, and is not told."""
    plain = resolved(checkpoint=written(tmp_path / "plain", local_attn_size=9, sink_size=1))
    assert not any("not used" in note for note in plain.notes)
    build = resolved(checkpoint=written(tmp_path / "small", shift=3.0))
    assert build.config.workload.schedule == plain.config.workload.schedule
    assert any("not used of the config.json" in note and "shift 3.0" in note for note in build.notes)


@pytest.mark.parametrize("form", ["lingbot", "lingbot-sharded"])
def test_what_was_written_is_recognised_and_loaded(form: str, tmp_path: Path) -> None:
    recognised = recognise_checkpoint(written(tmp_path / "small", form)).recognised
    assert (recognised.family, recognised.lacking, recognised.foreign) == ("lingbot", (), ())
    model = recognised.model_named("small")
    assert model == (MODEL if form == "lingbot-sharded" else replace(MODEL, text_tokens=512))
    assert isinstance(model, LingbotModel)
    load_checkpoint(tmp_path / "small", model)


@pytest.mark.parametrize(
    ("folder", "version"), [("lingbot_world_fast", V1), ("transformers", V2), ("other", V2)]
)
def test_the_authors_folders_tell_the_version(folder: str, version: str, tmp_path: Path) -> None:
    """The base folder holds no safetensors itself; what lies in it else is not read."""
    written(tmp_path / folder)
    (tmp_path / "Wan2.1_VAE.pth").write_bytes(b"not read")
    for path in [tmp_path / folder] + [tmp_path] * (folder != "other"):
        config = resolved(checkpoint=path).config
        assert config.workload.schedule == PRESETS[version].schedule
        assert config.workload.stream == PRESETS[version].stream
        assert (config.model.in_channels, config.model.out_channels) == (36, 16)


@pytest.mark.parametrize(
    ("folder", "window", "version"),
    [
        ("other", {}, V2),
        ("other", {"local_attn_size": -1, "sink_size": 0}, V2),
        ("other", {"local_attn_size": 21, "sink_size": 3}, V2),
        ("lingbot_world_fast", {"local_attn_size": 18, "sink_size": 6}, V1),
    ],
)
def test_chunk_and_passes_are_of_one_version(
    folder: str, window: dict[str, int], version: str, tmp_path: Path
) -> None:
    """Both have the same sizes: of the presets with these, the one that the passes are of names the build."""
    path = written(tmp_path / folder, **window)
    presets = {name: replace(PRESETS[name], model=replace(MODEL, name=name)) for name in (V1, V2)}
    read = read_model(BuildOptions(path), path, presets)
    assert (read.model.name, read.schedule) == (version, PRESETS[version].schedule)
    assert read.stream.chunk_frames == PRESETS[version].stream.chunk_frames


def test_the_command_writes_a_folder_that_is_opened(tmp_path: Path) -> None:
    """Shard by shard, with one tensor in memory; full size differs in the preset's name alone."""
    command = [sys.executable, str(SCRIPT), "--preset", TINY, "-o", str(tmp_path / "transformers")]
    summary = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert (summary["format"], summary["keys"]) == (
        "lingbot-sharded",
        len(lingbot_shapes(PRESETS[TINY].model)),
    )
    names = {file.name for file in (tmp_path / "transformers").iterdir()}
    assert {"config.json", "diffusion_pytorch_model.safetensors.index.json"} < names
    assert len(names) == 4
    load_checkpoint(tmp_path, PRESETS[TINY].model)


@pytest.mark.parametrize("how", ["chunk", "pass", "none"])
def test_the_way_of_the_camera_is_an_option(how: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "tiny", PRESETS[TINY].model, seed=0)
    for asked in (resolved(TINY, camera=how), resolved(TINY, checkpoint=tmp_path / "tiny", camera=how)):
        assert asked.config.model == replace(PRESETS[TINY].model, camera=how)
        assert ("injection" in str(sorted(graph_of(asked.config).pieces))) == (how == "chunk")
    with pytest.raises(UsageError, match="--camera chunk: 'tiny' has no camera"):
        resolved("tiny", camera="chunk")
    with pytest.raises(UsageError, match="camera is 'sometimes', expected one of chunk, pass, none"):
        resolved(TINY, camera="sometimes")
    seen = resolved(TINY, camera=how, layout={"reference_frames": 1}).config
    if how == "none":
        assert graph_of(seen)
        return
    with pytest.raises(UsageError, match="--reference-frames 1: 'lingbot-tiny' sees each frame by a camera"):
        graph_of(seen)


def test_a_config_with_a_window_is_followed(tmp_path: Path) -> None:
    path = written(tmp_path / "small", local_attn_size=21, sink_size=3)
    stream = resolved(checkpoint=path).config.workload.stream
    assert (stream.chunk_frames, stream.sink_frames, stream.ring_frames) == (4, 3, 18)


def test_a_preset_that_is_named_gives_its_passes(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "tiny", PRESETS[TINY].model, seed=0)
    config = resolved(TINY, checkpoint=tmp_path / "tiny").config
    assert (config.model, config.workload.stream, config.workload.schedule) == (
        PRESETS[TINY].model,
        PRESETS[TINY].stream,
        PRESETS[TINY].schedule,
    )


def test_a_key_too_many_leaves_the_family(tmp_path: Path) -> None:
    """Wan, which is asked first, knows none of the camera's keys."""
    write_random_checkpoint(tmp_path / "tiny", MODEL, seed=0, format="lingbot")
    save_file(load_file(tmp_path / "tiny") | {"blocks.0.extra": torch.zeros(1)}, tmp_path / "more")
    recognised = recognise_checkpoint(tmp_path / "more").recognised
    assert (recognised.family, recognised.foreign) == ("lingbot", ("blocks.0.extra",))


def test_control_by_keys_is_another_model(tmp_path: Path) -> None:
    act = written(tmp_path / "act", control_type="act")
    with pytest.raises(CheckpointError, match="control_channels is 6 by shapes, 7 by config"):
        recognise_checkpoint(act)
    for number, word in enumerate(("joystick", ["cam"], {})):
        odd = written(tmp_path / f"odd{number}", control_type=word)
        with pytest.raises(NotACheckpointError, match="expected one of cam, act"):
            recognise_checkpoint(odd)
    with pytest.raises(UsageError, match=r"7 channels \(act\), expected 6"):
        replace(MODEL, control_channels=7)


def test_keys_are_strict(tmp_path: Path) -> None:
    tensors = load_file(written(tmp_path / "small", "lingbot"))
    name = "blocks.1.cam_scale_layer.bias"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, tmp_path / "less")
    with pytest.raises(CheckpointError, match=r"cam_scale_layer\.bias"):
        load_checkpoint(tmp_path / "less", MODEL)
    save_file({**tensors, "blocks.1.k_img.weight": torch.zeros(2)}, tmp_path / "more")
    with pytest.raises(CheckpointError, match="lingbot-world has none"):
        load_checkpoint(tmp_path / "more", MODEL)
    save_file(tensors | {name: torch.zeros(3)}, tmp_path / "odd")
    with pytest.raises(CheckpointError, match=r"cam_scale_layer\.bias"):
        load_checkpoint(tmp_path / "odd", MODEL)


def test_wans_files_stay_wans(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "wan", WAN_PRESETS["tiny"].model, format="wan", seed=0)
    assert recognise_checkpoint(tmp_path / "wan").recognised.family == "wan"
    settings = recognise_checkpoint(tmp_path / "wan").recognised.model
    assert settings["in_channels"].source is Source.SHAPES


@pytest.mark.parametrize("change", [{"in_channels": 35}, {"out_channels": 8}, {"camera": "sometimes"}])
def test_sizes_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(MODEL, **change)
