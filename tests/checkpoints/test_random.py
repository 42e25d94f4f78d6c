"""Random checkpoints: same seed same bytes, sane activations, whole or absent."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
import torch

from scripts import random_checkpoint as random
from scripts.checkpoint_configs import wan_diffusers_config
from scripts.make_checkpoint import main as make_checkpoint
from scripts.random_checkpoint import FORMS, write_random_checkpoint
from scripts.random_clip import FORMS as CLIP_FORMS
from scripts.random_clip import SIZES as CLIPS
from scripts.random_clip import write_random_clip
from scripts.random_text import SIZES as TEXTS
from scripts.random_text import write_random_text
from seko_export.checkpoints import random as drawing
from seko_export.checkpoints.random import random_weight
from seko_export.config.model import ModelConfig
from seko_export.errors import MachineError, UsageError
from seko_export.families.wan_layout.keys import spread, wan_shapes
from seko_export.families.wan_layout.namings import wan_to_diffusers
from seko_export.media.clip.encoder import ClipFeatures
from seko_export.media.clip.files import clip_config_of, clip_shapes, clip_weights
from seko_export.media.umt5.dimensions import text_config_of
from seko_runtime.errors import DiskError


def bytes_under(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("format", FORMS["wan"])
def test_same_seed_same_bytes(format: str, tmp_path: Path, model: ModelConfig) -> None:
    for name, seed in (("one", 1), ("again", 1), ("two", 2)):
        write_random_checkpoint(tmp_path / name, model, format=format, seed=seed)
    assert bytes_under(tmp_path / "one") == bytes_under(tmp_path / "again")
    assert bytes_under(tmp_path / "one") != bytes_under(tmp_path / "two")


def test_every_weight_differs_and_bf16_is_the_rounded_fp32(model: ModelConfig) -> None:
    seen = set()
    for name, shape in wan_shapes(model).items():
        exact = random_weight(name, shape, seed=3, dtype=torch.float32, spread=spread)
        assert torch.equal(
            random_weight(name, shape, seed=3, dtype=torch.bfloat16, spread=spread), exact.bfloat16()
        )
        assert exact.std() > 0
        seen.add(exact.flatten()[:16].numpy().tobytes())
    assert len(seen) == len(wan_shapes(model))


def test_a_large_weight_is_the_same_however_many_threads_draw_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_SLAB", 1000)
    drawn = [random_weight("w", (7, 321), seed=5, dtype=torch.float32)]
    monkeypatch.setattr(drawing.os, "cpu_count", lambda: 1)
    drawn.append(random_weight("w", (7, 321), seed=5, dtype=torch.float32))
    assert torch.equal(*drawn)
    slabs = drawn[0].flatten().split(1000)
    assert not torch.equal(slabs[0], slabs[1])


@pytest.mark.parametrize("layers", [1, 12])
def test_activations_stay_near_one_through_depth(layers: int) -> None:
    from diffusers import WanTransformer3DModel

    config = ModelConfig(name="deep", layers=layers, dim=128, heads=2, ffn_dim=256, text_dim=64, freq_dim=64)
    state = {
        wan_to_diffusers(name): random_weight(name, shape, seed=0, dtype=torch.float32, spread=spread)
        for name, shape in wan_shapes(config).items()
    }
    transformer = WanTransformer3DModel.from_config(wan_diffusers_config(config)).eval()
    transformer.load_state_dict(state, strict=True)
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(2, 8, 64, generator=generator)
    latents = torch.randn(1, 16, 2, 8, 8, generator=generator).expand(2, -1, -1, -1, -1)
    with torch.no_grad():
        out = transformer(latents, torch.tensor([500, 500]), text, return_dict=False)[0]
    assert 0.2 < float(out.std()) < 5
    assert float((out[0] - out[1]).abs().mean()) > 0.01  # the text reaches the output


def test_what_exists_is_not_overwritten(tmp_path: Path, model: ModelConfig) -> None:
    path = tmp_path / "precious.pt"
    path.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists"):
        write_random_checkpoint(path, model, format="wan", seed=0)
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("format", FORMS["wan"])
def test_interrupted_writing_leaves_nothing(
    format: str, tmp_path: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = random.random_weight

    def interrupted(name: str, *arguments: object, **options: object) -> torch.Tensor:
        if name == "blocks.2.norm3.bias":
            raise KeyboardInterrupt
        return real(name, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(random, "random_weight", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_random_checkpoint(tmp_path / "half", model, format=format, seed=0)
    assert os.listdir(tmp_path) == []


def test_no_space_and_no_folder_are_told(tmp_path: Path, model: ModelConfig) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="cannot be written"):
        write_random_checkpoint(tmp_path / "file" / "under.pt", model, format="wan", seed=0)
    huge = ModelConfig(name="huge", layers=1_000, dim=5120, heads=40, ffn_dim=13824)
    with pytest.raises(DiskError, match="are free"):
        write_random_checkpoint(tmp_path / "huge.pt", huge, format="wan", seed=0)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("format", ["self-forcing", "wan", "diffusers"])
def test_a_file_larger_than_the_process_may_write_is_told(
    tmp_path: Path, model: ModelConfig, format: str
) -> None:
    """`torch.save` ends its archive in spite of the fault, and then says "unexpected pos"."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(DiskError, match=r"no space left .*\(ulimit -f\)"):
            write_random_checkpoint(tmp_path / "large", model, format=format, seed=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_unknown_format_and_dtype_are_refused(tmp_path: Path, model: ModelConfig) -> None:
    with pytest.raises(UsageError, match="gguf"):
        write_random_checkpoint(tmp_path / "x", model, format="gguf", seed=0)
    with pytest.raises(UsageError, match="float16"):
        write_random_checkpoint(tmp_path / "x", model, format="wan", seed=0, dtype=torch.float16)


def test_device_that_is_not_there(
    tmp_path: Path, model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="no GPU"):
        write_random_checkpoint(tmp_path / "x", model, format="wan", seed=0, device="cuda")
    with pytest.raises(UsageError, match="abacus"):
        write_random_checkpoint(tmp_path / "x", model, format="wan", seed=0, device="abacus")
    assert os.listdir(tmp_path) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_drawn_on_the_gpu(tmp_path: Path, model: ModelConfig) -> None:
    for name in ("one", "again"):
        write_random_checkpoint(tmp_path / name, model, format="self-forcing", seed=0, device="cuda")
    assert bytes_under(tmp_path / "one") == bytes_under(tmp_path / "again")


def test_script_ends_in_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.pt"
    arguments = ["--preset", "tiny", "--seed", "4", "-o", str(path)]
    assert make_checkpoint(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["path"] == str(path)
    assert report["format"] == "self-forcing"
    assert report["bytes"] == path.stat().st_size
    assert report["keys"] == 69
    assert make_checkpoint(arguments) == 2
    said = capsys.readouterr()
    assert "exists" in said.err
    assert said.out == ""


def test_clip_has_the_numbers_of_one_seed_in_both_forms(tmp_path: Path) -> None:
    """Wan's file and the folder of a pipeline; transformers' class takes the folder."""
    transformers = pytest.importorskip("transformers")
    config = CLIPS["clip-tiny"]
    for form in CLIP_FORMS:
        write_random_clip(tmp_path / form, config, form, seed=3, dtype=torch.float32, device="cpu")
    wan, theirs = (clip_weights(tmp_path / form, config) for form in CLIP_FORMS)
    assert {clip_config_of(tmp_path / form) for form in CLIP_FORMS} == {config}
    with torch.device("meta"):
        names = [name for name, _ in ClipFeatures(config).named_parameters()]
    for name in names:
        assert torch.equal(wan[name], theirs[name].reshape(wan[name].shape)), name
    model, loading = transformers.CLIPVisionModel.from_pretrained(
        tmp_path / "diffusers", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    first = model.state_dict()[
        next(key for key in model.state_dict() if key.endswith("layers.0.mlp.fc1.weight"))
    ]
    assert torch.equal(first, wan["transformer.0.mlp.0.weight"])


def test_full_clip_has_the_published_sizes() -> None:
    """Facts of ViT-H/14: 32 blocks of which the last is not run, 257 positions, joined matrices of 3840 rows."""
    shapes = clip_shapes(CLIPS["vit-h-14"])
    assert shapes["patch_embedding.weight"] == (1280, 3, 14, 14)
    assert shapes["pos_embedding"] == (1, 257, 1280)
    assert shapes["transformer.31.attn.to_qkv.weight"] == (3840, 1280)
    assert shapes["transformer.31.mlp.0.weight"] == (5120, 1280)
    assert "transformer.32.norm1.weight" not in shapes


def test_a_text_encoder_is_one_that_the_exporter_reads(tmp_path: Path) -> None:
    config = TEXTS["umt5-tiny"]
    written = write_random_text(tmp_path / "text", config, seed=0, dtype=torch.bfloat16, device="cpu")
    assert text_config_of(tmp_path / "text") == config
    assert written == 2 + config.layers * 10
    with pytest.raises(UsageError, match="exists"):
        write_random_text(tmp_path / "text", config, seed=0, dtype=torch.bfloat16, device="cpu")
