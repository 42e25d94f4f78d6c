"""A VoxCPM2 folder: its file of weights in either form, and a random one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.make_checkpoint import main as make_checkpoint
from scripts.random_speech import write_random_voxcpm2
from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError, WeightKeysError
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.voxcpm2.family import TOKENIZER_FILE
from seko_export.families.voxcpm2.keys import load_voxcpm2, voxcpm2_shapes
from seko_export.families.voxcpm2.presets import FULL, PRESETS, TINY
from seko_export.families.voxcpm2.recognise import recognise
from seko_export.media.audio_vae.files import BOUNDARIES, AudioVaeTensors, load_audio_vae
from seko_export.media.audio_vae.modules import DecodeChunk, state_size
from seko_runtime.speech.tokens import SpeechTokenizer
from tests.voxcpm2.oracle import original_model, weights_of

CONFIG = PRESETS[TINY]
KEY = "residual_lm.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def stored() -> dict[str, Tensor]:
    """The tensors of the original's model."""
    return weights_of(original_model(CONFIG))[0]


FORMS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {
    "safetensors": lambda tensors, folder: save_file(tensors, folder / "model.safetensors"),
    "bin": lambda tensors, folder: torch.save(tensors, folder / "pytorch_model.bin"),
    "entry": lambda tensors, folder: torch.save(
        {"state_dict": tensors, "step": 7}, folder / "pytorch_model.bin"
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_originals_tensors_are_read(form: str, stored: dict[str, Tensor], tmp_path: Path) -> None:
    FORMS[form](stored, tmp_path)
    loaded = load_voxcpm2(tmp_path, CONFIG)
    assert loaded.names == tuple(voxcpm2_shapes(CONFIG))
    assert all(torch.equal(loaded[name], stored[name]) for name in loaded.names)
    half = load_voxcpm2(tmp_path, CONFIG, dtype=torch.bfloat16)
    assert torch.equal(half[KEY], stored[KEY].bfloat16())


def test_safetensors_are_read_where_there_are_both(stored: dict[str, Tensor], tmp_path: Path) -> None:
    FORMS["safetensors"](stored, tmp_path)
    FORMS["bin"]({name: tensor + 1 for name, tensor in stored.items()}, tmp_path)
    assert torch.equal(load_voxcpm2(tmp_path, CONFIG)[KEY], stored[KEY])


@pytest.mark.parametrize("form", FORMS)
def test_every_difference_of_the_keys_is_told(form: str, stored: dict[str, Tensor], tmp_path: Path) -> None:
    """The original loads such files, and leaves what is missing random."""
    changed = {name: tensor for name, tensor in stored.items() if name != KEY}
    changed |= {"lora_A": torch.zeros(2), "stop_head.weight": torch.zeros(3, 64)}
    FORMS[form](changed, tmp_path)
    with pytest.raises(WeightKeysError) as refusal:
        load_voxcpm2(tmp_path, CONFIG)
    assert refusal.value.missing == (KEY,)
    assert refusal.value.unknown == ("lora_A",)
    assert refusal.value.misshapen == ("stop_head.weight",)


def test_what_is_no_such_file_is_refused(stored: dict[str, Tensor], tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"no model\.safetensors and no pytorch_model\.bin"):
        load_voxcpm2(tmp_path, CONFIG)
    file = tmp_path / "pytorch_model.bin"
    torch.save({**stored, KEY: stored[KEY].to(torch.int8)}, file)
    with pytest.raises(CheckpointError, match="int8"):
        load_voxcpm2(tmp_path, CONFIG)
    torch.save({"state_dict": "weights"}, file)
    with pytest.raises(NotACheckpointError, match="'state_dict' in"):
        load_voxcpm2(tmp_path, CONFIG)

    class Runs:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (eval, ("1",))

    torch.save({"state_dict": stored, "hook": Runs()}, file)
    with pytest.raises(CheckpointError, match="eval"):
        load_voxcpm2(tmp_path, CONFIG)


def test_a_random_folder_is_a_whole_checkpoint(tmp_path: Path) -> None:
    """Equal for equal seeds; the audio VAE in float32; nothing is zero."""
    folder = tmp_path / "model"
    write_random_voxcpm2(folder, CONFIG, seed=3)
    config = recognise(folder)
    assert config is not None
    model, vae = load_voxcpm2(folder, config), load_audio_vae(folder, config.vae)
    assert {tensor.dtype for _, tensor in model.items()} == {torch.bfloat16}
    assert all(tensor.count_nonzero() for _, tensor in (*model.items(), *vae.items()))
    assert load_file(folder / "audiovae.safetensors")[BOUNDARIES].dtype is torch.int32
    tokenizer = SpeechTokenizer((folder / TOKENIZER_FILE).read_bytes(), TOKENIZER_FILE, config.vocab_size)
    assert len(tokenizer.ids("hello 世界"))
    again = tmp_path / "again"
    write_random_voxcpm2(again, CONFIG, seed=3)
    for file in folder.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes()
    with pytest.raises(UsageError, match="exists"):
        write_random_voxcpm2(folder, CONFIG, seed=4)


def test_a_random_audio_vae_makes_sound(tmp_path: Path) -> None:
    """With the public sizes: neither silence nor sound that is cut off at -1 and 1, at any depth."""
    config = replace(CONFIG, vae=PRESETS[FULL].vae)
    write_random_voxcpm2(tmp_path / "model", config, seed=1)
    stored = load_audio_vae(tmp_path / "model", config.vae)
    tensors, decoder = AudioVaeTensors(stored, config.vae), DecodeChunk(config.vae)
    decoder.load_state_dict({name: tensors[f"decoder.{name}"] for name, _ in decoder.named_parameters()})
    latents = 1.5 * torch.randn(1, 8, config.latent_dim, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        sound, _ = decoder(latents, torch.zeros(1, state_size(decoder)))
    assert 0.05 < sound.std() < 0.7


def test_the_script_makes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "speech"
    assert make_checkpoint(["--preset", TINY, "-o", str(folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["keys"] == len(voxcpm2_shapes(CONFIG)) + len(load_audio_vae(folder, CONFIG.vae).names) + 1
    with pytest.raises(SystemExit):
        make_checkpoint(["--preset", TINY, "--format", "pt", "-o", str(tmp_path / "other")])
