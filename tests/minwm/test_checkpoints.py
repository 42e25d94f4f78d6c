"""Checkpoints of minWM: strict keys, recognised by the second projection behind self-attention."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from seko_export import inspect
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.minwm.keys import PROJECTION, minwm_shapes
from seko_export.families.minwm.presets import MINWM, PRESETS
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.families.wan.presets import PRESETS as WAN_PRESETS
from seko_export.families.wan_layout.keys import wan_shapes
from seko_export.options.declaration import BuildOptions
from seko_export.options.model import read_model
from tests.minwm.streams import MODEL
from tests.support.asked import resolved

# Wide enough for two heads of 128 channels, which no file states.
WIDE = replace(MODEL, name="small", dim=256, heads=2, text_tokens=512)


def test_numbers_of_the_published_model() -> None:
    """Each layer has one matrix and one bias more than Wan's 1.3B; the times are 1000, 937.5, 833.3 and 625."""
    shapes, plain = minwm_shapes(PRESETS[MINWM].model), wan_shapes(WAN_PRESETS["self-forcing-1.3b"].model)
    own = {name: shape for name, shape in shapes.items() if name not in plain}
    assert set(plain) < set(shapes)
    assert own[f"blocks.29.{PROJECTION}.weight"] == (1536, 1536)
    assert (len(own), sum(map(prod, own.values()))) == (60, 30 * 1536 * 1537)
    stream, schedule = PRESETS[MINWM].stream, PRESETS[MINWM].schedule
    assert schedule is not None
    assert schedule.timesteps == pytest.approx((1000, 937.5, 2500 / 3, 625))
    assert (stream.frame_tokens, stream.chunk_frames, stream.cache_frames, stream.fps) == (1560, 4, 20, 16)


@pytest.mark.parametrize("form", ["minwm", "minwm-sharded"])
def test_what_was_written_is_recognised_and_loaded(form: str, tmp_path: Path) -> None:
    """The .pt has the authors' two prefixes, of which one is left by training in shards."""
    path = tmp_path / ("model.pt" if form == "minwm" else "model")
    write_random_checkpoint(path, WIDE, seed=0, format=form)
    recognised = recognise_checkpoint(path).recognised
    assert (recognised.family, recognised.lacking, recognised.foreign) == ("minwm", (), ())
    assert recognised.model_named("small") == WIDE
    load_checkpoint(path, WIDE)
    assert inspect(path)["family"] == "minwm"


def test_its_preset_is_found_by_its_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    write_random_checkpoint(path, WIDE, seed=0, format="minwm")
    own = replace(WIDE, name=MINWM)
    read = read_model(BuildOptions(path), path, {MINWM: replace(PRESETS[MINWM], model=own)})
    assert (read.model, read.stream, read.schedule) == (own, PRESETS[MINWM].stream, PRESETS[MINWM].schedule)
    config = resolved(checkpoint=path, camera="none").config
    assert config.model == replace(own, name=config.model.name, camera="none")
    assert config.workload.schedule == PRESETS[MINWM].schedule
    with pytest.raises(UsageError, match="run on one GPU so far"):
        resolved(checkpoint=path, ranks=2, device="cuda", arch="sm_90", target="sm_90")


def test_the_projection_tells_it_from_wan(tmp_path: Path) -> None:
    """Without any it is Wan's; with a part of them it is refused."""
    path = tmp_path / "model.pt"
    write_random_checkpoint(path, WIDE, seed=0, format="minwm")
    weights = torch.load(path)["generator"]
    lost = f"model._fsdp_wrapped_module.blocks.1.{PROJECTION}.bias"
    torch.save({"generator": {k: x for k, x in weights.items() if k != lost}}, tmp_path / "lacking.pt")
    with pytest.raises(CheckpointError, match="prope_o"):
        load_checkpoint(tmp_path / "lacking.pt", WIDE)
    plain = {k: x for k, x in weights.items() if "prope_o" not in k}
    torch.save({"generator": plain}, tmp_path / "plain.pt")
    assert recognise_checkpoint(tmp_path / "plain.pt").recognised.family == "wan"
