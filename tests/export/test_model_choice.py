"""Which model a build is of: read from the checkpoint, told by its config.json, by a preset, by --heads."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from scripts.random_checkpoint import FORMS, write_random_checkpoint
from scripts.random_lora import random_pairs, write_lora
from seko_export import inspect
from seko_export.checkpoints.errors import NotACheckpointError, UnknownModelError
from seko_export.checkpoints.key_table import Dimension, KeyTable
from seko_export.checkpoints.sources import OpenedFiles
from seko_export.cli import main
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.errors import CheckpointError, UsageError
from seko_export.families import registry
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.families.recognition import Recognised, Source
from seko_export.families.video import Preset
from seko_export.families.wan.family import WanFamily
from seko_export.families.wan.keys import KEYS
from seko_export.families.wan.presets import PRESETS
from seko_export.families.wan_layout.keys import wan_shapes
from seko_export.families.wan_layout.picture_sizes import has_condition
from seko_export.families.wan_layout.recognise import recognise
from tests.support.asked import resolved

TINY = PRESETS["tiny"]
ODD = ModelConfig(
    "wan-144x3", layers=3, dim=144, heads=3, ffn_dim=80, text_dim=24, text_tokens=8, freq_dim=16
)

models = st.builds(
    lambda heads, head_dim, **sizes: ModelConfig(name="any", dim=heads * head_dim, heads=heads, **sizes),
    heads=st.integers(1, 5),
    head_dim=st.sampled_from([16, 48, 128]),
    layers=st.integers(1, 11),
    ffn_dim=st.integers(1, 60),
    in_channels=st.integers(1, 20),
    out_channels=st.integers(1, 20),
    text_dim=st.integers(1, 30),
    text_tokens=st.integers(1, 600),
    freq_dim=st.integers(1, 10).map(lambda half: 2 * half),
    norm_eps=st.sampled_from([1e-6, 1e-5]),
).filter(lambda model: not has_condition(model.in_channels, model.out_channels))  # another family's


def put_config(folder: Path, **fields: Any) -> None:
    (folder / "config.json").write_text(json.dumps(fields))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A file of its own folder: nothing but shapes tells its dimensions."""
    write_random_checkpoint(tmp_path / "tiny.pt", TINY.model, format="self-forcing", seed=0)
    return tmp_path / "tiny.pt"


@given(model=models, format=st.sampled_from([*FORMS["wan"]]))
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_what_was_written_is_recognised(
    model: ModelConfig, format: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Shapes give every dimension that leaves one; config.json the others; the rest is marked as assumed."""
    path = tmp_path_factory.mktemp("any") / "checkpoint"
    write_random_checkpoint(path, model, format=format, seed=0)
    recognised = recognise_checkpoint(path).recognised
    assert recognised.format == format.removesuffix("-sharded")
    read = {name: fact.value for name, fact in recognised.model.items() if fact.is_read}
    assert read == {name: getattr(model, name) for name in read}
    unread = {"heads", "text_tokens", "norm_eps"}
    unread -= {"wan-sharded": unread, "diffusers": {"heads", "norm_eps"}}.get(format, set())
    assert {name for name, fact in recognised.model.items() if fact.source is Source.ASSUMED} | {
        *recognised.lacking
    } == unread
    if format == "wan-sharded":
        assert recognised.model_named("any") == model
    if format == "diffusers":
        assert recognised.model_named("any") == replace(model, text_tokens=512)
    if format in ("self-forcing", "wan") and model.dim % 128 == 0:
        usual = replace(model, heads=model.dim // 128, text_tokens=512, norm_eps=1e-6)
        assert recognised.model_named("any") == usual
    if not recognised.lacking:  # and what was recognised is what is loaded
        load_checkpoint(path, recognised.model_named("any"))


@pytest.mark.parametrize("format", FORMS["wan"])
def test_a_preset_that_is_left_out_builds_the_same(format: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    write_random_checkpoint(path, TINY.model, format=format, seed=0)
    named, read = resolved("tiny", checkpoint=path), resolved(checkpoint=path)
    assert read.config == named.config
    assert (named.notes, bool(read.notes)) == ((), format != "wan-sharded")


LIKE_TINY = {
    "first": Preset(replace(TINY.model, name="first"), TINY.stream),
    "windowed": Preset(
        replace(TINY.model, name="windowed"),
        replace(TINY.stream, sink_frames=3, ring_frames=9),
        Schedule((900.0, 500.0)),
        entry="generator",
        files=("models/windowed.pt",),
    ),
    "unbuilt": Preset(
        replace(TINY.model, name="unbuilt"), TINY.stream, files=("unbuilt.pt",), missing="a clock of its own"
    ),
}


@pytest.fixture
def alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `.pt` of random weights, whose sizes several presets have."""
    monkeypatch.setattr("seko_export.families.wan.presets.PRESETS", LIKE_TINY)
    (tmp_path / "models").mkdir()
    write_random_checkpoint(tmp_path / "any.pt", TINY.model, format="self-forcing", seed=0)
    return tmp_path / "any.pt"


def test_of_presets_with_the_same_sizes_the_file_s_name_tells(alike: Path) -> None:
    build = resolved(checkpoint=alike)
    assert (build.config.model.name, build.config.workload.stream) == ("first", TINY.stream)
    assert build.load_options.first_entry is None
    assert any(
        "of: first, windowed, unbuilt have its sizes; stream and passes of first" in note
        for note in build.notes
    )
    named = alike.rename(alike.parent / "models" / "windowed.pt")
    build = resolved(checkpoint=named)
    assert build.config.model.name == "windowed"
    assert build.config.workload.schedule.timesteps == (900.0, 500.0)
    assert build.config.workload.stream.sink_frames == 3
    assert build.load_options.first_entry == "generator"
    assert any("those of windowed, since the file is named so" in note for note in build.notes)
    assert resolved("first", checkpoint=named).config.model.name == "first"


def test_a_command_leaves_a_choice_that_the_file_does_not_make_to_the_user(alike: Path) -> None:
    report = inspect(alike)
    assert report["candidates"] == ["first", "windowed", "unbuilt"]
    assert report["command"] == f"seko-export build {alike} --preset NAME -o artifacts/NAME"
    program, *words = shlex.split(report["command"])
    refused = CliRunner().invoke(main, words)
    assert (program, refused.exit_code) == ("seko-export", 2)
    assert "NAME" in refused.stderr
    named = inspect(alike.rename(alike.parent / "models" / "windowed.pt"))
    assert named["candidates"] == []
    assert "--preset" not in named["command"]


@pytest.mark.parametrize("named", ["file", "folder", "repository"])
def test_a_lora_that_a_preset_needs_is_in_the_command(
    alike: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """It lies beside the checkpoint, in the folder `models` of a repository."""
    needs = "--lora models/lora.pt of the same repository"
    preset = replace(LIKE_TINY["windowed"], needs=needs, lora="lora.pt")
    monkeypatch.setitem(LIKE_TINY, "windowed", preset)
    models = alike.parent / "models"
    file = alike.rename(models / "windowed.pt")
    path = {"file": file, "folder": models, "repository": models.parent}[named]
    alone = inspect(path)
    assert "--lora" not in alone["command"]
    assert needs in alone["needs"]
    write_lora(
        tmp := models / "written.safetensors", random_pairs(TINY.model, rank=2, seed=0), "comfyui", 1.0
    )
    torch.save({"generator_lora": load_file(tmp)}, models / "lora.pt")
    tmp.unlink()
    report = inspect(path)
    assert f"build {file} " in report["command"]
    assert f"--lora {models / 'lora.pt'}" in report["command"]
    assert needs not in report["needs"]


def test_a_config_json_tells_which_of_them(alike: Path) -> None:
    put_config(alike.parent, num_heads=2, text_len=32, local_attn_size=12, sink_size=3)
    build = resolved(checkpoint=alike)
    assert build.config.model.name == "windowed"
    assert not any("have the same sizes" in note for note in build.notes)


def test_a_preset_that_lacks_something_is_refused_by_name(alike: Path) -> None:
    with pytest.raises(UsageError, match="unbuilt is not built yet: it needs a clock of its own"):
        resolved("unbuilt", checkpoint=alike)
    named = alike.rename(alike.parent / "unbuilt.pt")
    with pytest.raises(UsageError, match="unbuilt is not built yet"):
        resolved(checkpoint=named)
    report = inspect(named)
    assert report["command"] is None
    assert any("a clock of its own" in note for note in report["notes"])


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("memflow-1.3b", "MemFlow"),
    ],
)
def test_a_loop_that_no_build_makes_is_refused_by_name_and_on_the_page(name: str, title: str) -> None:
    missing = PRESETS[name].missing
    assert missing
    with pytest.raises(UsageError, match=re.escape(f"{name} is not built yet: it needs {missing}")):
        resolved(name, random_weights=0)
    page = (Path(__file__).parents[2] / "docs" / "real-models.md").read_text(encoding="utf-8")
    section = page.split("### Loops that are refused")[1].split("\n## ")[0]
    assert f"\n- **{title}** " in section


def test_published_presets() -> None:
    """Names that the page promises, with a source each; those of the same sizes differ in files."""
    named = [preset for name, preset in PRESETS.items() if "tiny" not in name]
    assert all(preset.source and preset.unverified for preset in named)
    files = [file for preset in named for file in preset.files]
    assert len(files) == len(set(files))
    assert {
        *("self-forcing-1.3b", "causvid-1.3b", "causal-forcing-1.3b", "causal-forcing-framewise-1.3b"),
        *("causal-forcing-pp-1.3b", "longlive-1.3b", "longlive-2-5b", "krea-14b", "wan-14b", "wan-5b"),
    } <= {*PRESETS}
    refused = {name for name, preset in PRESETS.items() if preset.missing}
    assert refused == {"memflow-1.3b"}
    for passes, name in ((1, "causal-forcing-pp-1step-1.3b"), (2, "causal-forcing-pp-1.3b")):
        schedule = PRESETS[name].schedule
        assert schedule is not None
        assert (len(schedule.timesteps), len(schedule.first_timesteps)) == (passes, 4)
    longlive = PRESETS["longlive-1.3b"].stream
    assert (longlive.sink_frames, longlive.cache_frames) == (3, 12)


def test_heads_that_nobody_told_are_said(tiny: Path) -> None:
    (note,) = resolved(checkpoint=tiny).notes
    assert "heads 2" in note
    assert "preset tiny" in note
    assert "--heads N" in note
    build = resolved(checkpoint=tiny, heads=4)
    assert build.config.model == replace(TINY.model, name="wan-256x2", heads=4, text_tokens=512)
    assert "heads" not in build.notes[0].split(";")[1]


def test_a_config_beside_the_file_is_read(tiny: Path) -> None:
    """Other heads: it is no preset's model any more, and nothing of a preset is taken."""
    put_config(tiny.parent, num_heads=4, text_len=77, eps=1e-5)
    build = resolved(checkpoint=tiny)
    wanted = replace(TINY.model, name="wan-256x2", heads=4, text_tokens=77, norm_eps=1e-5)
    assert build.config.model == wanted
    assert build.notes == ()


@pytest.mark.parametrize("format", ["wan-sharded", "diffusers"])
def test_any_size_is_taken_with_the_options_that_belong_to_the_stream(format: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "odd", ODD, format=format, seed=0)
    build = resolved(checkpoint=tmp_path / "odd", height=32, width=48, kv="fp4").config
    assert build.model == replace(ODD, text_tokens=8 if format == "wan-sharded" else 512)
    usual = PRESETS["self-forcing-1.3b"].stream
    assert build.workload.stream == replace(usual, height=32, width=48)


def test_a_model_that_attends_to_windows_of_tokens_is_refused(tiny: Path) -> None:
    put_config(tiny.parent, num_heads=2, window_size=[-1, -1])
    assert resolved(checkpoint=tiny).config.model == TINY.model
    put_config(tiny.parent, num_heads=2, window_size=[128, 0])
    with pytest.raises(NotACheckpointError, match=r"window_size .* is \[128, 0\], and only"):
        resolved(checkpoint=tiny)


# -- window, sink, shift ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "stream"),
    [
        ({"local_attn_size": 12, "sink_size": 3}, {"ring_frames": 9, "sink_frames": 3}),
        ({"local_attn_size": 12}, {"ring_frames": 12, "sink_frames": 0}),
        ({"local_attn_size": -1, "sink_size": 0}, {}),
        ({"sink_size": 2}, {"sink_frames": 2}),
        ({"num_frame_per_block": 2}, {"chunk_frames": 2}),
    ],
)
def test_windows(tiny: Path, fields: Mapping[str, int], stream: Mapping[str, int]) -> None:
    """The window of the file includes the sink, our ring stands behind it; options are above both."""
    put_config(tiny.parent, num_heads=2, text_len=32, **fields)
    assert resolved(checkpoint=tiny).config.workload.stream == replace(TINY.stream, **stream)
    asked = resolved(checkpoint=tiny, ring_frames=5, sink_frames=1, chunk_frames=3).config.workload.stream
    assert asked == replace(TINY.stream, ring_frames=5, sink_frames=1, chunk_frames=3)


def test_the_shift_of_the_times(tiny: Path) -> None:
    put_config(tiny.parent, num_heads=2, timestep_shift=3)
    for preset in (None, "tiny"):
        schedule = resolved(preset, checkpoint=tiny).config.workload.schedule
        assert schedule.shift == 3.0
        assert schedule.timesteps[1] == pytest.approx(1000 * 3 * 0.75 / (1 + 2 * 0.75))


def test_a_shift_of_the_first_chunks_times_leaves_the_others_theirs() -> None:
    """A session with other passes is warped by it, as the later chunks' are."""
    usual = resolved("causvid-1.3b").config.workload.schedule
    asked = resolved("causvid-1.3b", first_timesteps=(1000.0, 500.0), shift=5.0).config.workload.schedule
    assert asked == replace(usual, first_timesteps=asked.first_timesteps)
    assert asked.first_timesteps == pytest.approx((1000.0, 1000 * 2.5 / 3))


# -- contradictions: both values are in the sentence ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_layers": 30}, ("layers", "2 by shapes", "30 by config.json (num_layers)")),
        ({"dim": 512}, ("dim", "256 by shapes", "512 by config.json")),
        ({"in_dim": 36}, ("in_channels", "16 by shapes", "36 by config.json (in_dim)")),
        ({"num_heads": 2, "num_attention_heads": 4}, ("2 by config.json", "4 by config.json")),
        ({"num_heads": 3, "attention_head_dim": 128}, ("dim", "256 by shapes", "384 by config.json")),
        ({"attention_head_dim": 96}, ("256 by shapes", "96")),
    ],
)
@pytest.mark.parametrize("preset", [None, "tiny"])
def test_a_file_that_contradicts_its_config(
    tiny: Path, preset: str | None, fields: Mapping[str, int], words: tuple[str, ...]
) -> None:
    put_config(tiny.parent, **fields)
    with pytest.raises(CheckpointError) as raised:
        resolved(preset, checkpoint=tiny)
    for word in ("contradicts itself", *words):
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "settled", "words"),
    [
        ({"num_heads": 4}, None, "heads is 4 by config.json (num_heads), 2 by the preset"),
        ({"attention_head_dim": 64}, None, "heads is 4 by config.json (attention_head_dim), 2 by the preset"),
        ({"eps": 1e-5}, None, "norm_eps is 1e-05 by config.json (eps), 1e-06 by the preset"),
        ({"text_len": 512}, None, "text_tokens is 512 by config.json (text_len), 32 by the preset"),
        ({"local_attn_size": 5}, {"ring_frames": 5, "sink_frames": 0}, "ring_frames is 5 by config.json"),
    ],
)
def test_a_config_that_contradicts_the_named_preset(
    tiny: Path, fields: Mapping[str, Any], settled: Mapping[str, int] | None, words: str
) -> None:
    """Heads of another number make wrong video that passes its own goldens."""
    put_config(tiny.parent, **fields)
    with pytest.raises(CheckpointError, match="contradicts --preset tiny") as raised:
        resolved("tiny", checkpoint=tiny)
    assert words in str(raised.value)
    if settled:
        assert resolved("tiny", checkpoint=tiny, **settled).config.workload.stream.ring_frames == 5


def test_a_config_that_contradicts_the_heads_asked_for(tiny: Path) -> None:
    put_config(tiny.parent, num_heads=4)
    with pytest.raises(CheckpointError, match=r"--heads 8: heads is 4 by config.json \(num_heads\)"):
        resolved(checkpoint=tiny, heads=8)
    assert resolved(checkpoint=tiny, heads=4).config.model.heads == 4


@pytest.mark.parametrize(
    "fields",
    [
        *({"num_heads": bad} for bad in (0, -1, 2.0, True, "2", [2], {})),
        *({"eps": bad} for bad in (0, -1e-6, "small", float("nan"), float("inf"), True)),
        *({"local_attn_size": bad} for bad in (-2, 1.5, [3, 4], "all")),
        {"local_attn_size": 3, "sink_size": 3},
        {"sink_size": -1},
        {"num_frame_per_block": 0},
        *({"timestep_shift": bad} for bad in (-1, 1e-30, 1e308)),
        {"num_heads": 7},
        {"num_heads": 32},
        {"num_heads": 10**30},
    ],
)
def test_configs_that_cannot_be(tiny: Path, fields: Mapping[str, Any]) -> None:
    put_config(tiny.parent, **fields)
    with pytest.raises(NotACheckpointError):
        resolved(checkpoint=tiny)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "[" * 100_000, "\x00"])
def test_a_config_that_is_no_json_object(tiny: Path, content: str) -> None:
    (tiny.parent / "config.json").write_text(content)
    for preset in (None, "tiny"):
        with pytest.raises(NotACheckpointError, match=r"config\.json"):
            resolved(preset, checkpoint=tiny)


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["UMT5EncoderModel"], "num_heads": 64, "num_layers": 24},
        {"_class_name": "AutoencoderKLWan", "in_channels": 3, "base_dim": 96},
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
        {"something": "else"},
    ],
)
def test_a_config_of_something_else_is_not_read_and_that_is_said(
    tiny: Path, fields: Mapping[str, Any]
) -> None:
    put_config(tiny.parent, **fields)
    build = resolved(checkpoint=tiny)
    assert build.config == resolved("tiny", checkpoint=tiny).config
    assert "config.json is of something else" in build.notes[-1]


# -- families beside each other -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CameraModel(ModelConfig):
    """A model with a size that others have not."""

    camera: int = 6


class CameraFamily(WanFamily):
    """Wan's layers, and a matrix for a camera in each of them."""

    name = f"{__name__}:CAMERA"

    @property
    def keys(self) -> KeyTable:
        model = CameraModel(**{**vars(TINY.model), "family": self.name})
        sizes = (*KEYS.dimensions, Dimension("camera", "blocks.0.camera.weight", 1))
        return replace(KEYS, shapes=_camera_shapes, dimensions=sizes, models={"camera": model})

    def recognise(
        self, where: str, opened: OpenedFiles, stored: Mapping[str, Any] | None
    ) -> Recognised | None:
        recognised = recognise(where, opened, stored, family=self.name, keys=self.keys)
        return None if recognised is None else replace(recognised, kind=CameraModel)


def _camera_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    sizes = (model.dim, getattr(model, "camera", 0))
    return wan_shapes(model) | {f"blocks.{layer}.camera.weight": sizes for layer in range(model.layers)}


CAMERA = CameraFamily()


def test_a_file_is_of_the_family_that_knows_all_keys_of_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wan, which stands first, has all keys that it looks for in the other's file; sizes of a family's own are told."""
    model = CameraModel(**{**vars(TINY.model), "camera": 5, "family": CAMERA.name})
    monkeypatch.setitem(FORMS, CAMERA.name, FORMS["wan"])
    write_random_checkpoint(tmp_path / "camera", model, seed=0)
    write_random_checkpoint(tmp_path / "plain", TINY.model, seed=0)
    alone = recognise_checkpoint(tmp_path / "camera").recognised
    assert (alone.family, len(alone.foreign)) == ("wan", TINY.model.layers)
    with pytest.raises(CheckpointError, match="2 unknown"):
        load_checkpoint(tmp_path / "camera", TINY.model)
    monkeypatch.setitem(registry.FAMILIES.own, CAMERA.name, CAMERA.name)
    recognised = recognise_checkpoint(tmp_path / "camera").recognised
    assert (recognised.family, recognised.lacking, recognised.foreign) == (CAMERA.name, (), ())
    assert recognised.model_named(model.name) == replace(model, text_tokens=512)
    load_checkpoint(tmp_path / "camera", recognised.model_named("any"))
    assert recognise_checkpoint(tmp_path / "plain").recognised.family == "wan"


# -- what is no model, or not to be believed ------------------------------------------------------------------------


def test_other_weights_are_no_known_model(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torch import zeros

    save_file({"net.patch_embedding.weight": zeros(8, 4, 1, 2, 2)}, tmp_path / "file")
    with pytest.raises(UnknownModelError, match=r"prefix 'net\.'"):
        resolved(checkpoint=tmp_path / "file")
    with pytest.raises(CheckpointError, match="known family"):
        recognise_checkpoint(tmp_path / "file")


def test_a_layer_of_a_huge_number_asks_for_no_more_layers_than_there_are(tmp_path: Path) -> None:
    """One key must not make a table of a million layers."""
    from safetensors.torch import load_file, save_file
    from torch import zeros

    write_random_checkpoint(tmp_path / "tiny", TINY.model, format="wan", seed=0)
    tensors = load_file(tmp_path / "tiny")
    tensors |= {f"blocks.{'9' * digits}.norm3.bias": zeros(256) for digits in (5, 6, 9, 5000)}
    save_file(tensors, tmp_path / "far")
    recognised = recognise_checkpoint(tmp_path / "far").recognised
    assert recognised.model["layers"].value == 4
    with pytest.raises(CheckpointError, match="unknown"):
        load_checkpoint(tmp_path / "far", recognised.model_named("far"))


@pytest.mark.parametrize(
    ("name", "shape"), [("patch_embedding.weight", (0, 16, 1, 2, 2)), ("head.head.weight", (3, 256))]
)
def test_dimensions_of_nothing_are_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    from safetensors.torch import load_file, save_file
    from torch import zeros

    write_random_checkpoint(tmp_path / "tiny", TINY.model, format="wan", seed=0)
    save_file(load_file(tmp_path / "tiny") | {name: zeros(shape)}, tmp_path / "odd")
    with pytest.raises(NotACheckpointError, match="must be a whole number from 1 to 1048576, got 0"):
        resolved(checkpoint=tmp_path / "odd")


def test_heads_that_do_not_fit_are_the_users_mistake(tiny: Path) -> None:
    with pytest.raises(UsageError, match="dim 256 is no multiple of heads 3"):
        resolved(checkpoint=tiny, heads=3)
