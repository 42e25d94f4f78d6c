"""A build with LoRAs: merged weights in the artifact, which names the LoRAs; fp8 codes of merged ones."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts.quantised_files import write_quantised
from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_lora import random_pairs, write_lora
from seko_export import BuildOptions, build
from seko_export.artifact.sbom import SBOM_FILE
from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import CheckpointError
from seko_export.families.model_files import load_checkpoint
from seko_export.families.registry import family_of, presets
from seko_export.families.wan.family import FAMILY
from seko_export.families.wan.presets import PRESETS
from seko_kernels.matmul import quantise_weight
from seko_runtime.opening.artifact import read_manifest
from tests.support.small_artifact import MODEL, STREAM, write_style

Q = "blocks.1.cross_attn.q"


def test_artifact_holds_merged_weights_and_names_the_loras(small_artifact: Path, tmp_path: Path) -> None:
    lora = write_style(tmp_path)
    write_random_checkpoint(tmp_path / "base.pt", MODEL, format="self-forcing", seed=0, dtype=torch.float32)
    merged = load_checkpoint(tmp_path / "base.pt", MODEL, LoadOptions(loras=[lora]))
    manifest, *_ = read_manifest(small_artifact)
    (weight,) = (weight for weight in manifest.weights if weight.name == f"{Q}.weight")
    stored = load_file(small_artifact / weight.file)[weight.name]
    assert torch.equal(stored, merged[weight.name].to(stored.dtype))
    assert not torch.equal(stored, load_checkpoint(tmp_path / "base.pt", MODEL)[weight.name].to(stored.dtype))
    digest = hashlib.sha256(lora.path.read_bytes()).hexdigest()
    assert manifest.model["loras"] == [{"name": "style.safetensors", "weight": 0.5, "sha256": digest}]
    bill = json.loads((small_artifact / SBOM_FILE).read_bytes())
    assert [part["hashes"] for part in bill["components"] if "hashes" in part] == [
        [{"alg": "SHA-256", "content": digest}]
    ]


def test_fp8_weights_are_those_of_merged_matrices(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "base", MODEL, format="wan", seed=0)
    write_lora(tmp_path / "lora", random_pairs(MODEL, rank=4, seed=1), "peft", 2.0)
    merged = load_checkpoint(tmp_path / "base", MODEL, LoadOptions(loras=[LoraFile(tmp_path / "lora")]))
    config = VideoBuild(MODEL, VideoConfig(STREAM, Schedule.warped(), "fp4"), TargetConfig("cpu"))
    config = config.changed(fused=True, fp8=True)
    built = dict(FAMILY.weights(FAMILY.graph(config).pieces, merged))
    codes, scales = quantise_weight(
        torch.cat([merged[f"blocks.0.self_attn.{part}.weight"] for part in "qkv"])
    )
    assert torch.equal(built["blocks.0.self_attn.qkv.weight_fp8"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(built["blocks.0.self_attn.qkv.weight_scale"], scales)


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("tiny", "plain"),
        ("tiny", "offload"),
        ("wan-5b-tiny", "fp8"),
        ("i2v-tiny", "ranks"),
        ("i2v-tiny", "fp8"),
        ("lingbot-tiny", "ranks"),
        ("lingbot-tiny", "fp8"),
        ("seko-talk-tiny", "offload"),
        ("seko-talk-tiny", "fp8"),
    ],
)
def test_every_family_and_build_takes_merged_weights(preset: str, kind: str, tmp_path: Path) -> None:
    """No weight of the artifact is read past the merge: neither codes of fp8, nor parts of ranks, nor joined ones."""
    model = replace(presets()[preset].model, layers=5)  # of fewer, the device would hold the whole cache
    stream = replace(presets()[preset].stream, offload_cache=kind == "offload")
    work = VideoConfig(stream, Schedule.warped(2), "fp4" if kind == "fp8" else "fp32")
    changes: dict[str, dict[str, Any]] = {
        "fp8": {"fused": True, "fp8": True},
        "ranks": {"ranks": model.heads},
    }
    config = VideoBuild(model, work, TargetConfig("cpu")).changed(**changes.get(kind, {}))
    family = family_of(config)
    write_random_checkpoint(tmp_path / "base", model, seed=0, dtype=torch.float32)
    write_lora(tmp_path / "lora", random_pairs(model, rank=4, seed=1), "comfyui", 2.0)
    base, merged = (
        load_checkpoint(tmp_path / "base", model, LoadOptions(loras=loras))
        for loras in ((), (LoraFile(tmp_path / "lora"),))
    )
    pieces = family.graph(config).pieces
    plain, built, expected = (
        dict(family.weights(pieces, source)) for source in (base, merged, dict(merged.items()))
    )
    assert built.keys() == expected.keys()
    assert all(torch.equal(as_bytes(built[name]), as_bytes(expected[name])) for name in expected)
    changed = {name for name in plain if not torch.equal(as_bytes(plain[name]), as_bytes(built[name]))}
    for layer in range(model.layers):
        for part in ("self_attn", "cross_attn", "ffn"):
            assert any(name.startswith(f"blocks.{layer}.{part}") for name in changed), (layer, part)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes; floats of 8 bits cannot be compared."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_fp8_codes_of_the_file_are_not_taken_where_a_lora_changes_them(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "base", MODEL, format="wan", seed=0)
    weights = dict(load_checkpoint(tmp_path / "base", MODEL).items())
    write_quantised(tmp_path / "coded", weights, "lightx2v-fp8")
    pairs = {name: pair for name, pair in random_pairs(MODEL, rank=4, seed=1).items() if name == Q}
    write_lora(tmp_path / "lora", pairs, "comfyui", 2.0)
    base, merged = (
        load_checkpoint(tmp_path / "coded", MODEL, LoadOptions(loras=loras))
        for loras in ((), (LoraFile(tmp_path / "lora"),))
    )
    for name in (f"{Q}.weight", f"{Q}.weight".replace("cross_attn.q", "ffn.0")):
        assert base.row_codes(name) is not None
        assert (merged.row_codes(name) is None) == (name == f"{Q}.weight")
    assert not torch.equal(merged[f"{Q}.weight"], base[f"{Q}.weight"])


@pytest.mark.parametrize("fault", ["absent", "negative", "another base", "code", "cut"])
def test_a_lora_that_cannot_be_merged_leaves_nothing(fault: str, tmp_path: Path) -> None:
    """The sentence names the option; the exit code is that of checkpoints."""
    write_random_checkpoint(tmp_path / "base", PRESETS["tiny"].model, format="wan", seed=0)
    lora = tmp_path / "lora"
    asked = str(lora)
    if fault == "negative":
        asked = f"{lora}:-0.5"
    elif fault == "another base":
        write_lora(lora, random_pairs(MODEL, rank=4, seed=1), "comfyui", 2.0)
    elif fault == "code":
        torch.save({"blocks.0.self_attn.q.lora_A.weight": print}, lora)
    elif fault == "cut":
        write_lora(lora, random_pairs(PRESETS["tiny"].model, rank=4, seed=1), "comfyui", 2.0)
        lora.write_bytes(lora.read_bytes()[:-9])
    options = BuildOptions(tmp_path / "base", lora=(asked,), target="cpu")
    with pytest.raises(CheckpointError, match="--lora ") as caught:
        build(options, tmp_path / "out" / "artifact", room_check=False, note=lambda _: None)
    assert caught.value.exit_code == 3
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
