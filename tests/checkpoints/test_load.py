"""What the loader accepts: every format gives equal tensors, whatever wrapped their keys."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scripts.random_checkpoint import FORMS, write_random_checkpoint
from seko_export.checkpoints.errors import AmbiguousCheckpointError, DamagedCheckpointError, MissingEntryError
from seko_export.checkpoints.load import is_finite
from seko_export.checkpoints.readers import variant_file
from seko_export.checkpoints.sources import Layout, LoadOptions
from seko_export.config.model import ModelConfig
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.families.wan_layout.keys import PREFIXES, wan_shapes
from seko_export.families.wan_layout.namings import wan_to_diffusers

Weights = dict[str, torch.Tensor]


def assert_holds(path: Path, model: ModelConfig, weights: Weights, **options: Any) -> None:
    checkpoint = load_checkpoint(path, model, LoadOptions(**options))
    assert checkpoint.names == tuple(wan_shapes(model))
    for name, tensor in checkpoint.items():
        assert tensor.dtype == weights[name].dtype, name
        assert tensor.is_contiguous(), name
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("format", FORMS["wan"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_format_gives_the_same_tensors(
    format: str, dtype: torch.dtype, write: Callable[..., Path], model: ModelConfig, weights: Weights
) -> None:
    path = write(format, dtype)
    if dtype == torch.bfloat16:
        assert_holds(path, model, weights)
    assert_holds(path, model, weights, dtype=torch.bfloat16)
    checkpoint = load_checkpoint(path, model)
    assert checkpoint.format == format.removesuffix("-sharded")
    assert {checkpoint[name].dtype for name in checkpoint.names} == {dtype}


def test_diffusers_single_file(
    tmp_path: Path, write: Callable[..., Path], model: ModelConfig, weights: Weights
) -> None:
    folder = write("diffusers") / "transformer"
    assert_holds(folder, model, weights)
    assert_holds(folder / "diffusion_pytorch_model.safetensors", model, weights)
    disguised = tmp_path / "weights.pt"  # the content counts, not the suffix
    save_file({wan_to_diffusers(name): tensor for name, tensor in weights.items()}, disguised)
    assert_holds(disguised, model, weights)


def test_diffusers_own_save_is_read(tmp_path: Path, model: ModelConfig) -> None:
    from diffusers import WanTransformer3DModel

    from scripts.checkpoint_configs import wan_diffusers_config

    theirs = WanTransformer3DModel.from_config(wan_diffusers_config(model))
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "cut", max_shard_size="40KB")
    state = theirs.state_dict()
    expected = {name: state[wan_to_diffusers(name)] for name in wan_shapes(model)}
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    for folder in ("whole", "cut"):
        assert_holds(tmp_path / folder, model, expected)


def test_sharded_folder_of_symlinks(
    tmp_path: Path, write: Callable[..., Path], model: ModelConfig, weights: Weights
):
    # The Hugging Face cache keeps blobs elsewhere and links to them.
    folder = write("wan-sharded")
    links = tmp_path / "snapshot"
    links.mkdir()
    for file in folder.iterdir():
        (links / file.name).symlink_to(file)
    assert_holds(links, model, weights)


def test_ema_and_plain_are_told_apart(
    save_pt: Callable[[Any], Path], model: ModelConfig, weights: Weights
) -> None:
    plain = {name: tensor + 1 for name, tensor in weights.items()}
    path = save_pt(
        {
            "generator": {f"model.{name}": tensor for name, tensor in plain.items()},
            "generator_ema": {f"model.{name}": tensor for name, tensor in weights.items()},
            "critic": {"anything": torch.ones(1)},
            "step": 3,
        }
    )
    assert_holds(path, model, weights)
    assert_holds(path, model, plain, entry="generator")
    assert load_checkpoint(path, model).identity["part"] == "generator_ema"
    assert load_checkpoint(path, model, LoadOptions(entry="generator")).identity["part"] == "generator"


def test_the_content_decides_whatever_the_name(
    tmp_path: Path, write: Callable[..., Path], model: ModelConfig, weights: Weights
) -> None:
    """Torch reads a name that ends in .safetensors as such a file, whatever it holds."""
    (tmp_path / "folder").mkdir()
    for format, name in (("self-forcing", "named.safetensors"), ("wan", "named.pt")):
        assert_holds(write(format).rename(tmp_path / "folder" / name), model, weights)
    assert_holds(tmp_path / "folder", model, weights)


def test_fsdp_wrappers_anywhere(save_pt: Callable[[Any], Path], model: ModelConfig, weights: Weights) -> None:
    wrapped = {}
    for number, (name, tensor) in enumerate(weights.items()):
        key = f"model.{name}"
        if number % 2:
            key = key.replace("model.", "model._fsdp_wrapped_module.", 1)
        if number % 3 and ".self_attn." in key:
            key = key.replace(".self_attn.", "._fsdp_wrapped_module.self_attn.")
        if number % 5 == 0:
            key = f"_fsdp_wrapped_module.{key}"
        wrapped[key] = torch.nn.Parameter(tensor) if number % 7 == 0 else tensor
    assert_holds(save_pt({"generator_ema": wrapped}), model, weights)


def test_strided_tensors_become_contiguous(
    save_pt: Callable[[Any], Path], model: ModelConfig, weights: Weights
) -> None:
    state = {
        f"model.{name}": tensor.mT.contiguous().mT if tensor.dim() == 2 else tensor
        for name, tensor in weights.items()
    }
    assert_holds(save_pt({"generator_ema": state}), model, weights)


@pytest.mark.parametrize("format", FORMS["wan"])
def test_weights_are_mapped_and_the_file_stays(
    format: str, write: Callable[..., Path], model: ModelConfig
) -> None:
    path = write(format)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    before = {file: file.read_bytes() for file in files}
    checkpoint = load_checkpoint(path, model)
    checkpoint["head.modulation"].fill_(5)
    assert {file: file.read_bytes() for file in files} == before


@pytest.mark.slow
def test_opening_reads_no_weights(tmp_path: Path) -> None:
    # 50 MB of weights; opening may touch the headers and one page of each tensor.
    model = ModelConfig(name="m", layers=1, dim=512, heads=4, ffn_dim=24_000)
    paths = [tmp_path / format for format in ("self-forcing", "wan-sharded")]
    for path in paths:
        write_random_checkpoint(path, model, format=path.name, seed=0)
    script = """
import sys
from pathlib import Path
from seko_export.families.model_files import load_checkpoint
from seko_export.config.model import ModelConfig
model = ModelConfig(name="m", layers=1, dim=512, heads=4, ffn_dim=24_000)
anonymous = lambda: next(
    int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line
)
for path in map(Path, sys.argv[1:]):
    load_checkpoint(path, model)  # imports and allocators settle
    before = anonymous()
    checkpoint = load_checkpoint(path, model)
    tensors = dict(checkpoint.items())
    print(anonymous() - before)
"""
    run = subprocess.run([sys.executable, "-c", script, *paths], check=True, capture_output=True, text=True)
    for path, grown in zip(paths, run.stdout.split(), strict=True):
        assert path.is_dir() or path.stat().st_size > 40e6
        assert int(grown) < 20_000  # KiB of memory that no file backs, with all weights held


def test_identity_has_no_path_and_knows_the_weights(
    tmp_path: Path, write: Callable[..., Path], model: ModelConfig
) -> None:
    identities = [load_checkpoint(write(format), model).identity for format in FORMS["wan"]]
    assert len({identity["fingerprint"] for identity in identities}) == 1
    for format, identity in zip(FORMS["wan"], identities, strict=True):
        assert identity["name"] == f"made-{format}-bfloat16"
        assert not any(str(tmp_path) in str(value) for value in identity.values())
    other = load_checkpoint(write("wan", torch.float32), model).identity
    assert other["fingerprint"] != identities[0]["fingerprint"]
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "made-diffusers-bfloat16", moved)
    assert load_checkpoint(moved, model).identity["fingerprint"] == identities[0]["fingerprint"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_number_is_seen_at_any_place(dtype: torch.dtype, poison: float) -> None:
    # Sizes around vector widths and the parallel grain; the place walks over all of them.
    for size in (1, 7, 8, 31, 32, 33, 64, 100, 257):
        for place in range(size):
            weight = torch.zeros(size, dtype=dtype)
            weight[place] = poison
            assert not is_finite(weight), (size, place)
    large = torch.zeros(1 << 18, dtype=dtype)
    for place in range(0, 1 << 18, 7919):
        large[place] = poison
        assert not is_finite(large), place
        large[place] = 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    # A sum in a half type, or in float32 of bfloat16's largest, would overflow and cry wolf.
    weight = torch.full((4096,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(weight)
    assert is_finite(-weight)


def test_other_dtypes_to_convert_to_are_refused(write: Callable[..., Path], model: ModelConfig) -> None:
    with pytest.raises(UsageError, match="int8"):
        load_checkpoint(write("wan"), model, LoadOptions(dtype=torch.int8))


@pytest.mark.parametrize("entry", ["generator", "model", "state_dict", None])
def test_a_pt_with_one_entry_or_none(
    entry: str | None, save_pt: Callable[[Any], Path], model: ModelConfig, weights: Weights
) -> None:
    path = save_pt(weights if entry is None else {entry: weights, "step": 3})
    assert_holds(path, model, weights)
    assert load_checkpoint(path, model).identity["part"] == (entry or "all")
    assert load_checkpoint(path, model).notes == ()


def test_an_entry_of_a_file_without_entries(write: Callable[..., Path], model: ModelConfig) -> None:
    with pytest.raises(MissingEntryError, match=r"--entry generator: .* is a safetensors file"):
        load_checkpoint(write("wan"), model, LoadOptions(entry="generator"))


def test_a_preset_s_entry_comes_first_and_is_told(
    save_pt: Callable[[Any], Path], model: ModelConfig, weights: Weights
) -> None:
    raw = {name: tensor + 1 for name, tensor in weights.items()}
    path = save_pt({"generator_ema": weights, "generator": raw})
    assert_holds(path, model, raw, first_entry="generator")
    assert_holds(path, model, weights, first_entry="generator", entry="generator_ema")
    (note,) = load_checkpoint(path, model, LoadOptions(first_entry="generator")).notes
    assert "the entry generator " in note
    assert "--entry generator_ema" in note


def test_another_entry_than_the_preset_s_is_told(
    save_pt: Callable[[Any], Path], model: ModelConfig, weights: Weights
) -> None:
    path = save_pt({"generator_ema": weights})
    (note,) = load_checkpoint(path, model, LoadOptions(first_entry="generator")).notes
    assert note == f"{path} has no entry generator, which the preset takes; the entry generator_ema is taken"
    for told in (
        LoadOptions(first_entry="generator_ema"),
        LoadOptions(None),
        LoadOptions("generator_ema", "generator"),
    ):
        assert load_checkpoint(path, model, told).notes == ()
    assert load_checkpoint(save_pt(weights), model, LoadOptions(first_entry="generator")).notes == ()


@pytest.mark.parametrize("prefix", [*PREFIXES, "_orig_mod.", "model._fsdp_wrapped_module.", "module.model."])
@pytest.mark.parametrize("container", ["safetensors", "pt"])
def test_prefixes_in_any_container(
    prefix: str, container: str, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    state = {f"{prefix}{name}": tensor for name, tensor in weights.items()}
    path = tmp_path / f"file.{container}"
    if container == "pt":
        torch.save({"generator": state}, path)
    else:
        save_file(state, path)
    assert_holds(path, model, weights)
    assert recognise_checkpoint(path).recognised.family == "wan"


def variants(folder: Path, variant: str) -> Path:
    """Give the files of a folder a variant's names, as diffusers writes them."""
    for file in [*folder.rglob("*.safetensors*")]:
        stem, dot, rest = file.name.partition(".safetensors")
        name, dash, shard = stem.partition("-0")
        new = f"{name}.{variant}{dash}{shard}{dot}{rest}"
        if rest:  # an index
            new = f"{stem}{dot}{rest.removesuffix('json')}{variant}.json"
            index = json.loads(file.read_text())
            index["weight_map"] = {
                key: shard.replace("-0", f".{variant}-0", 1) for key, shard in index["weight_map"].items()
            }
            file.write_text(json.dumps(index))
        file.rename(file.with_name(new))
    return folder


@pytest.mark.parametrize("format", ["wan-sharded", "diffusers"])
def test_variants_of_diffusers(
    format: str, write: Callable[..., Path], model: ModelConfig, weights: Weights
) -> None:
    layout = Layout("any", ("transformer",))
    folder = variants(write(format), "fp16")
    assert_holds(folder, model, weights)  # there is no other
    chosen = variant_file(folder, layout, "fp16")
    assert chosen.suffix == (".json" if format == "wan-sharded" else ".safetensors")
    assert_holds(chosen, model, weights)
    with pytest.raises(CheckpointError, match=r"--variant bf16: .* its variants: fp16"):
        variant_file(folder, layout, "bf16")
    home = folder / "transformer" if format == "diffusers" else folder
    save_file(
        {name: tensor + 1 for name, tensor in weights.items()}, home / "diffusion_pytorch_model.safetensors"
    )
    assert_holds(chosen, model, weights)
    save_file(weights, home / "diffusion_pytorch_model.bf16.safetensors")
    # The one without a variant is taken, where there is one.
    assert_holds(folder, model, {name: tensor + 1 for name, tensor in weights.items()})
    (home / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(AmbiguousCheckpointError, match="--variant"):
        load_checkpoint(folder, model)
    assert_holds(variant_file(folder, layout, "bf16"), model, weights)


def test_an_index_of_mixed_variants(write: Callable[..., Path], model: ModelConfig) -> None:
    folder = write("wan-sharded")
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = "diffusion_pytorch_model-00001-of-00002.safetensors"
    other = "diffusion_pytorch_model.fp16-00001-of-00002.safetensors"
    (folder / first).rename(folder / other)
    content["weight_map"] = {
        key: other if shard == first else shard for key, shard in content["weight_map"].items()
    }
    index.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpointError, match="mixes the variants fp16, none"):
        load_checkpoint(folder, model)
