"""Checkpoints of ABot-World: strict keys, recognised by the adapter of keys and 48 channels."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.abot.keys import ADAPTER, abot_shapes
from seko_export.families.abot.presets import ABOT, PRESETS, TINY
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.families.wan.presets import PRESETS as WAN_PRESETS
from seko_export.families.wan_layout.keys import wan_shapes
from seko_export.options.declaration import BuildOptions
from seko_export.options.model import read_model
from tests.support.asked import resolved

TINY_MODEL = PRESETS[TINY].model
# Wide enough for two heads of 128 channels, which no file states.
MODEL = replace(TINY_MODEL, name="small", dim=256, heads=2)


def written(path: Path, form: str = "abot-sharded", **config: object) -> Path:
    write_random_checkpoint(path, MODEL, seed=0, format=form)
    if config:
        file = path / "config.json"
        fields = json.loads(file.read_text(encoding="utf-8")) | config
        file.write_text(json.dumps(fields), encoding="utf-8")
    return path


def test_numbers_of_the_published_model() -> None:
    """The adapter has the 270.5 million numbers that the facts count, in six tensors."""
    shapes = abot_shapes(PRESETS[ABOT].model)
    adapter = {name: shape for name, shape in shapes.items() if name.startswith(ADAPTER)}
    assert (len(adapter), round(sum(map(prod, adapter.values())) / 1e6, 1)) == (6, 270.5)
    assert adapter[f"{ADAPTER}.conv.weight"] == (3072, 8192, 2, 2)
    assert adapter[f"{ADAPTER}.residual_blocks.0.conv2.bias"] == (3072,)
    assert shapes["patch_embedding.weight"] == (3072, 48, 1, 2, 2)
    assert set(shapes) - set(adapter) == set(wan_shapes(WAN_PRESETS["wan-5b"].model))
    model, stream = PRESETS[ABOT].model, PRESETS[ABOT].stream
    assert (model.front_tokens, stream.frame_tokens, stream.cache_frames) == (1280, 880, 21)


@pytest.mark.parametrize("form", ["abot", "abot-sharded"])
def test_what_was_written_is_recognised_and_loaded(form: str, tmp_path: Path) -> None:
    recognised = recognise_checkpoint(written(tmp_path / "small", form)).recognised
    assert (recognised.family, recognised.lacking, recognised.foreign) == ("abot", (), ())
    model = recognised.model_named("small")
    wanted = MODEL if form == "abot-sharded" else replace(MODEL, text_tokens=512, reference_side=16)
    assert model == wanted
    load_checkpoint(tmp_path / "small", model)


def test_its_preset_is_found_by_its_sizes(tmp_path: Path) -> None:
    """The authors' file alone is enough: heads of 128 channels, and what no shape shows is the preset's."""
    path = written(tmp_path / "diffusion_pytorch_model.safetensors", "abot")
    own = replace(MODEL, name=ABOT, text_tokens=512, reference_side=16)
    read = read_model(BuildOptions(path), path, {ABOT: replace(PRESETS[ABOT], model=own)})
    assert (read.model, read.stream, read.schedule) == (own, PRESETS[ABOT].stream, PRESETS[ABOT].schedule)


def test_a_file_without_a_preset_keeps_positions_and_passes(tmp_path: Path) -> None:
    config = resolved(checkpoint=written(tmp_path / "small", local_attn_size=18, sink_size=6)).config
    stream = config.workload.stream
    assert (stream.chunk_frames, stream.sink_frames, stream.ring_frames) == (3, 6, 12)
    assert (stream.window_positions, stream.spatial_stride, stream.fps) == (True, 16, 12)
    assert config.workload.schedule == PRESETS[ABOT].schedule


def test_the_adapter_and_the_channels_tell_it_from_wan(tmp_path: Path) -> None:
    """Without the adapter it is Wan's 5B; with a part of it, it is refused."""
    path = written(tmp_path / "small.safetensors", "abot")
    weights = load_file(path)
    plain = {name: weight for name, weight in weights.items() if ADAPTER not in name}
    save_file(plain, tmp_path / "plain.safetensors")
    assert recognise_checkpoint(tmp_path / "plain.safetensors").recognised.family == "wan"
    lacking = weights.copy()
    del lacking[f"{ADAPTER}.residual_blocks.0.conv1.bias"]
    save_file(lacking, tmp_path / "lacking.safetensors")
    own = replace(MODEL, reference_side=16, text_tokens=512)
    with pytest.raises(CheckpointError, match="residual_blocks") as refused:
        load_checkpoint(tmp_path / "lacking.safetensors", own)
    assert "Wan Fun" not in str(refused.value)  # whose keys begin with control_adapter


@pytest.mark.parametrize("channels", [16, 48])
def test_sizes_that_fit_no_keys_are_refused(channels: int) -> None:
    with pytest.raises(UsageError, match="multiple of 32: 8 keys, 4 channels of each"):
        replace(TINY_MODEL, key_channels=channels)
