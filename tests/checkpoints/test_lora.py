"""LoRAs of every trainer merge as their formula says; what does not fit is refused and named."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.make_checkpoint import main as make_checkpoint
from scripts.random_checkpoint import FORMS as FILES
from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_lora import FORMS, Pair, random_pairs, write_lora
from seko_export.checkpoints.errors import WeightKeysError
from seko_export.checkpoints.load import Checkpoint
from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.config.model import ModelConfig
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.model_files import load_checkpoint
from seko_export.families.registry import presets
from seko_export.options.declaration import BuildOptions
from tests.truth.naive_lora import merged

Weights = dict[str, torch.Tensor]
Load = Callable[..., Checkpoint]
RANK, ALPHA = 4, 6.0
Q = "blocks.1.self_attn.q"


@pytest.fixture
def pairs(model: ModelConfig) -> dict[str, Pair]:
    return random_pairs(model, rank=RANK, seed=3)


@pytest.fixture
def load(write: Callable[..., Path], model: ModelConfig) -> Load:
    base = write("wan")

    def loaded(*files: LoraFile | Path, partial: bool = False) -> Checkpoint:
        loras = [file if isinstance(file, LoraFile) else LoraFile(file) for file in files]
        return load_checkpoint(base, model, LoadOptions(loras=loras, lora_partial=partial))

    return loaded


def numbers(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.double().numpy()


def assert_close(found: torch.Tensor, expected: np.ndarray[Any, Any]) -> None:
    assert found.dtype == torch.float32
    np.testing.assert_allclose(numbers(found), expected, rtol=1e-5, atol=1e-6)


def assert_merged(checkpoint: Checkpoint, weights: Weights, pairs: dict[str, Pair], **formula: Any) -> None:
    changed = {f"{module}.weight": pair for module, pair in pairs.items()}
    for name, tensor in checkpoint.items():
        if name in changed:
            pair = changed[name]
            truth = merged(numbers(weights[name]), numbers(pair.down), numbers(pair.up), **formula)
            assert_close(tensor, truth)
        else:
            assert torch.equal(tensor, weights[name]), name


@pytest.mark.shows("lora")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_merges_by_the_formula(
    form: str, tmp_path: Path, load: Load, weights: Weights, pairs: dict[str, Pair]
) -> None:
    write_lora(tmp_path / "lora", pairs, form, ALPHA)
    checkpoint = load(LoraFile(tmp_path / "lora", 0.7))
    alpha = None if form == "lightx2v" else ALPHA
    assert_merged(checkpoint, weights, pairs, strength=0.7, alpha=alpha)
    (adapter,) = checkpoint.adapters
    assert (adapter.name, adapter.weight, len(adapter.sha256)) == ("lora", 0.7, 64)
    (note,) = checkpoint.notes
    assert f"{len(pairs)} weights changed, rank {RANK}" in note
    assert ("no alpha: 1" in note) == (alpha is None)


@pytest.mark.parametrize("format", FILES["wan"])
def test_any_base_format(
    format: str,
    tmp_path: Path,
    write: Callable[..., Path],
    model: ModelConfig,
    weights: Weights,
    pairs: dict[str, Pair],
) -> None:
    write_lora(tmp_path / "lora", pairs, "comfyui", ALPHA)
    checkpoint = load_checkpoint(write(format), model, LoadOptions(loras=[LoraFile(tmp_path / "lora")]))
    assert_merged(checkpoint, weights, pairs, alpha=ALPHA)


@pytest.mark.parametrize("form", ["comfyui", "diffusers"])
@pytest.mark.parametrize("preset", ["lingbot-tiny", "seko-talk-tiny"])
def test_other_families(preset: str, form: str, tmp_path: Path) -> None:
    other = presets()[preset].model
    write_random_checkpoint(tmp_path / "base", other, seed=0)
    wan_pairs = random_pairs(other, rank=RANK, seed=1)
    write_lora(tmp_path / "lora", wan_pairs, form, ALPHA)
    base = load_checkpoint(tmp_path / "base", other)
    checkpoint = load_checkpoint(tmp_path / "base", other, LoadOptions(loras=[LoraFile(tmp_path / "lora")]))
    assert_merged(checkpoint, dict(base.items()), wan_pairs, alpha=ALPHA)


def test_two_loras_add_up(tmp_path: Path, load: Load, weights: Weights, model: ModelConfig) -> None:
    files = []
    for seed, form in enumerate(("peft", "musubi")):
        write_lora(tmp_path / form, random_pairs(model, rank=2 + seed, seed=seed), form, ALPHA)
        files.append(LoraFile(tmp_path / form, 0.5 + seed))
    expected = numbers(weights[f"{Q}.weight"])
    for seed, file in enumerate(files):
        pair = random_pairs(model, rank=2 + seed, seed=seed)[Q]
        expected = merged(expected, numbers(pair.down), numbers(pair.up), strength=file.weight, alpha=ALPHA)
    assert_close(load(*files)[f"{Q}.weight"], expected)


def test_full_differences(tmp_path: Path, load: Load, weights: Weights) -> None:
    drawn = {name: torch.randn(weights[name].shape) for name in (
        "blocks.0.self_attn.norm_q.weight", "blocks.0.ffn.0.bias", "blocks.1.modulation", "head.head.weight",
        "head.modulation",
    )}  # fmt: skip
    state = {
        "diffusion_model.blocks.0.self_attn.norm_q.diff": drawn["blocks.0.self_attn.norm_q.weight"],
        "diffusion_model.blocks.0.ffn.0.diff_b": drawn["blocks.0.ffn.0.bias"],
        "diffusion_model.blocks.1.diff_m": drawn["blocks.1.modulation"],
        "diffusion_model.head.diff_m": drawn["head.modulation"],
        "diffusion_model.head.head.set_weight": drawn["head.head.weight"],
    }
    save_file(state, tmp_path / "lora.safetensors")
    checkpoint = load(LoraFile(tmp_path / "lora.safetensors", 0.5))
    for name, tensor in checkpoint.items():
        if name == "head.head.weight":
            assert torch.equal(tensor, drawn[name])
        elif name in drawn:
            assert_close(tensor, numbers(weights[name]) + 0.5 * numbers(drawn[name]))
        else:
            assert torch.equal(tensor, weights[name]), name


def test_patch_embedding_as_a_convolution(
    tmp_path: Path, load: Load, weights: Weights, model: ModelConfig
) -> None:
    down, up = torch.randn(RANK, model.in_channels, 1, 2, 2), torch.randn(model.dim, RANK, 1, 1, 1)
    at = "diffusion_model.patch_embedding"
    save_file({f"{at}.lora_down.weight": down, f"{at}.lora_up.weight": up}, tmp_path / "lora")
    name = "patch_embedding.weight"
    assert_close(load(tmp_path / "lora")[name], merged(numbers(weights[name]), numbers(down), numbers(up)))


def test_patterns_and_rank_stabilisation(
    tmp_path: Path, load: Load, weights: Weights, pairs: dict[str, Pair], model: ModelConfig
) -> None:
    wider = random_pairs(model, rank=8, seed=5)
    mixed = pairs | {module: pair for module, pair in wider.items() if module.endswith("ffn.0")}
    write_lora(tmp_path / "lora", mixed, "peft", ALPHA)
    config = tmp_path / "lora" / "adapter_config.json"
    stated = json.loads(config.read_text()) | {
        "r": RANK, "use_rslora": True, "rank_pattern": {"ffn.0": 8}, "alpha_pattern": {r"blocks\.1\..*": 3.0},
    }  # fmt: skip
    config.write_text(json.dumps(stated))
    checkpoint = load(tmp_path / "lora")
    for module, pair in mixed.items():
        alpha = 3.0 if module.startswith("blocks.1.") else ALPHA
        expected = merged(
            numbers(weights[f"{module}.weight"]),
            numbers(pair.down),
            numbers(pair.up),
            alpha=alpha,
            rank_stabilised=True,
        )
        assert_close(checkpoint[f"{module}.weight"], expected)


def test_patterns_of_diffusers_begin_behind_its_prefix(
    tmp_path: Path, load: Load, weights: Weights, pairs: dict[str, Pair]
) -> None:
    write_lora(tmp_path / "lora", pairs, "diffusers", ALPHA)
    about = {
        "transformer.lora_alpha": ALPHA,
        "transformer.alpha_pattern": {r"^blocks\.1\.attn1\.to_q": 3.0},
    }
    save_file(load_file(tmp_path / "lora"), tmp_path / "new", {"lora_adapter_metadata": json.dumps(about)})
    checkpoint = load(tmp_path / "new")
    for module, alpha in ((Q, 3.0), ("blocks.0.self_attn.q", ALPHA)):
        pair = pairs[module]
        truth = merged(
            numbers(weights[f"{module}.weight"]), numbers(pair.down), numbers(pair.up), alpha=alpha
        )
        assert_close(checkpoint[f"{module}.weight"], truth)


@pytest.mark.parametrize("spelling", ["lora_magnitude_vector", "dora_scale"])
def test_dora(spelling: str, tmp_path: Path, load: Load, weights: Weights, pairs: dict[str, Pair]) -> None:
    pair, magnitude = pairs[Q], torch.rand(weights[f"{Q}.weight"].shape[0]) + 0.5
    state = {
        f"diffusion_model.{Q}.lora_A.weight": pair.down,
        f"diffusion_model.{Q}.lora_B.weight": pair.up,
        f"diffusion_model.{Q}.{spelling}": magnitude[:, None] if spelling == "dora_scale" else magnitude,
    }
    save_file(state, tmp_path / "lora")
    expected = merged(
        numbers(weights[f"{Q}.weight"]),
        numbers(pair.down),
        numbers(pair.up),
        strength=0.6,
        magnitude=numbers(magnitude),
    )
    assert_close(load(LoraFile(tmp_path / "lora", 0.6))[f"{Q}.weight"], expected)


@pytest.mark.parametrize(
    ("variant", "weight"),
    [("lora", 1.0), ("lora", -0.7), ("rslora", 1.0), ("dora", 1.0), ("dora", 0.0), ("dora", -0.7), ("bias", 1.0),
     ("anchored", 1.0), ("lora_only", 1.0), ("lora_only", 0.5), ("all", 1.0), ("saved", -0.7), ("all, saved", 1.0)],
)  # fmt: skip
def test_merges_as_peft_does(variant: str, weight: float, tmp_path: Path) -> None:
    """A DoRA of weight 0 also scales rows to its magnitudes. Anchored patterns begin with the model's first module.
    Biases and modules that PEFT saves whole replace those of the model, whatever the weight is."""
    peft = pytest.importorskip("peft")
    from peft.tuners.lora import LoraLayer

    tiny = ModelConfig(name="t", layers=1, dim=32, heads=2, ffn_dim=48, text_dim=24, freq_dim=16)
    write_random_checkpoint(tmp_path / "base", tiny, format="wan", seed=7, dtype=torch.float32)
    base = load_checkpoint(tmp_path / "base", tiny)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            attention, layer, self.head = torch.nn.Module(), torch.nn.Module(), torch.nn.Module()
            attention.q, attention.o = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
            layer.self_attn, layer.ffn = attention, torch.nn.ModuleList([torch.nn.Linear(32, 48)])
            layer.norm3 = torch.nn.LayerNorm(32)
            self.blocks = torch.nn.ModuleList([layer])
            self.head.head = torch.nn.Linear(32, len(base["head.head.bias"]))

    net = Net()
    net.load_state_dict({name: base[name] for name in net.state_dict()})
    begin = r"^blocks\.0\." if variant == "anchored" else ""
    bias = variant.removesuffix(", saved")
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q", "o", "ffn.0"], rank_pattern={f"{begin}self_attn.o": 2},
        alpha_pattern={f"{begin}ffn.0": 3}, use_rslora=variant == "rslora", use_dora=variant == "dora",
        lora_bias=variant == "bias", init_lora_weights=False, bias=bias if bias in ("lora_only", "all") else "none",
        modules_to_save=["head.head"] if "saved" in variant else None,
    )  # fmt: skip
    torch.manual_seed(0)
    adapted = peft.get_peft_model(net, config)
    for name, parameter in adapted.named_parameters():
        if "magnitude" in name or (parameter.requires_grad and "lora_" not in name):
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT takes its own lora_B.bias for a shard
        adapted.save_pretrained(tmp_path / "lora")
    if weight != 1:
        for layer in adapted.modules():
            if isinstance(layer, LoraLayer):
                layer.set_scale("default", weight)
    merged_net = adapted.merge_and_unload()
    tensors = load_checkpoint(
        tmp_path / "base", tiny, LoadOptions(loras=[LoraFile(tmp_path / "lora", weight)])
    )
    changed = set()
    for name, tensor in merged_net.state_dict().items():
        torch.testing.assert_close(tensors[name].float(), tensor, rtol=1e-5, atol=1e-6)
        if not torch.equal(tensor, base[name]):
            changed.add(name)
    for name in base.names:
        assert name in changed or torch.equal(tensors[name], base[name])
    matrices = {f"blocks.0.{module}" for module in ("self_attn.q", "self_attn.o", "ffn.0")}
    expected = {f"{module}.weight" for module in matrices}
    if bias in ("bias", "lora_only", "all"):
        expected |= {f"{module}.bias" for module in matrices}
    if bias == "all":
        expected |= {"blocks.0.norm3.bias", "head.head.bias"}
    if "saved" in variant:
        expected |= {"head.head.weight", "head.head.bias"}
    assert changed == expected


def test_the_image_branch_of_a_2_1_lora_is_left_out(
    tmp_path: Path, load: Load, weights: Weights, pairs: dict[str, Pair]
) -> None:
    write_lora(tmp_path / "lora", pairs, "musubi", ALPHA)
    state = load_file(tmp_path / "lora")
    for module in ("blocks_0_cross_attn_k_img", "blocks_0_cross_attn_v_img", "img_emb_proj_1"):
        state[f"lora_unet_{module}.lora_down.weight"] = torch.ones(RANK, 32)
        state[f"lora_unet_{module}.lora_up.weight"] = torch.ones(32, RANK)
    save_file(state, tmp_path / "i2v")
    checkpoint = load(tmp_path / "i2v")
    assert_merged(checkpoint, weights, pairs, alpha=ALPHA)
    assert any("6 keys left out, of an image branch" in note for note in checkpoint.notes)


def test_keys_of_an_image_branch_that_the_model_has_must_fit(tmp_path: Path) -> None:
    model = presets()["i2v-tiny"].model
    write_random_checkpoint(tmp_path / "base", model, format="wan", seed=0)
    module = f"diffusion_model.blocks.{model.layers}.cross_attn.k_img"
    state = {"diffusion_model.blocks.0.cross_attn.k_img.diff": torch.ones(model.dim, model.dim)}
    save_file(state, tmp_path / "fits")
    load_checkpoint(tmp_path / "base", model, LoadOptions(loras=[LoraFile(tmp_path / "fits")]))
    save_file(state | {f"{module}.diff": torch.ones(model.dim, model.dim)}, tmp_path / "deeper")
    with pytest.raises(WeightKeysError, match=rf"1 keys belong to no weight of the model: {module}\.diff;"):
        load_checkpoint(tmp_path / "base", model, LoadOptions(loras=[LoraFile(tmp_path / "deeper")]))


def test_one_weight_under_two_prefixes_is_refused(tmp_path: Path, load: Load, pairs: dict[str, Pair]) -> None:
    """Merged twice, it would have twice the weight."""
    write_lora(tmp_path / "lora", pairs, "comfyui", ALPHA)
    state = load_file(tmp_path / "lora")
    again = {key.replace("diffusion_model.", "transformer."): tensor + 0 for key, tensor in state.items()}
    save_file(state | again, tmp_path / "twice")
    with pytest.raises(
        CheckpointError, match=r"diffusion_model\..* and transformer\..* both change blocks\..*keep one"
    ):
        load(tmp_path / "twice")


def test_unmatched_keys_are_listed_and_may_be_left_out(
    tmp_path: Path, load: Load, weights: Weights, pairs: dict[str, Pair]
) -> None:
    write_lora(tmp_path / "lora", pairs, "comfyui", ALPHA)
    state = load_file(tmp_path / "lora")
    stray = ("lora_te1_layers_0.lora_down.weight", "diffusion_model.blocks.9.self_attn.q.diff", "unknown")
    save_file(state | {key: torch.ones(2, 2) for key in stray}, tmp_path / "more")
    with pytest.raises(WeightKeysError, match=r"3 keys belong to no weight.*--lora-partial") as caught:
        load(tmp_path / "more")
    assert sorted(caught.value.unknown) == sorted(stray)
    checkpoint = load(tmp_path / "more", partial=True)
    assert_merged(checkpoint, weights, pairs, alpha=ALPHA)
    assert any("3 keys left out" in note for note in checkpoint.notes)


def _refusals() -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    ones = torch.ones
    pair = {"q.lora_A.weight": ones(4, 32), "q.lora_B.weight": ones(32, 4)}
    return {
        "ranks differ": ({**pair, "q.lora_B.weight": ones(32, 3)}, "different ranks"),
        "rank 0": ({"q.lora_A.weight": ones(0, 32), "q.lora_B.weight": ones(32, 0)}, "have rank 0"),
        "another base": ({"q.lora_A.weight": ones(4, 64), "q.lora_B.weight": ones(64, 4)}, "another base model"),
        "no up": ({"q.lora_A.weight": ones(4, 32)}, "without up"),
        "alpha alone": ({**pair, "k.alpha": torch.tensor(1.0)}, "without matrices"),
        "magnitude alone": ({**pair, "k.dora_scale": ones(32, 1)}, "without matrices"),
        "alpha is NaN": ({**pair, "q.alpha": torch.tensor(math.nan)}, "alpha is nan"),
        "alpha is negative": ({**pair, "q.alpha": torch.tensor(-4.0)}, "alpha is -4, expected .* above 0"),
        "alpha is 0": ({**pair, "q.alpha": torch.tensor(0.0)}, "alpha is 0, expected .* above 0"),
        "alpha is a vector": ({**pair, "q.alpha": ones(3)}, "expected one number"),
        "alpha is complex": ({**pair, "q.alpha": torch.tensor(4 + 1j)}, "alpha is .*expected a real number"),
        "alpha is true": ({**pair, "q.alpha": torch.tensor(True)}, "alpha is .*expected a real number"),
        "wide diff": ({"q.diff": ones(32, 64)}, "another base model"),
        "widened": ({**pair, "q.reshape_weight": ones(2)}, "widens the model"),
        "widened, in integers": (
            {**pair, "q.reshape_weight": ones(2, dtype=torch.int64)}, "widens the model"
        ),
        "magnitude of columns": ({**pair, "q.dora_scale": ones(1, 32)}, "expected one number a row"),
        "integers": ({**pair, "q.lora_A.weight": ones(4, 32, dtype=torch.int32)}, "expected float32"),
        "LoHa": ({"q.hada_w1_a": ones(4, 4)}, "a LoHa"),
        "LoCon": ({**pair, "q.lora_mid.weight": ones(4, 4)}, "a LoCon with a middle matrix"),
        "weights": ({"q.weight": ones(32, 32)}, "no LoRA.*a video model's transformer; give it as the checkpoint"),
    }  # fmt: skip


@pytest.mark.parametrize("fault", _refusals())
def test_files_that_do_not_fit(fault: str, tmp_path: Path, load: Load) -> None:
    state, sentence = _refusals()[fault]
    path = tmp_path / "lora.safetensors"
    save_file({f"diffusion_model.blocks.0.self_attn.{key}": tensor for key, tensor in state.items()}, path)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load(path)
    if fault == "LoCon":  # it would be merged without its middle
        with pytest.raises(CheckpointError, match=sentence):
            load(path, partial=True)
    assert str(caught.value).startswith(f"--lora {path}")
    assert caught.value.exit_code == 3


def test_numbers_are_checked_when_they_are_read(tmp_path: Path, load: Load, pairs: dict[str, Pair]) -> None:
    pairs[Q].up[0, 0] = math.nan
    write_lora(tmp_path / "lora", pairs, "comfyui", ALPHA)
    checkpoint = load(tmp_path / "lora")
    with pytest.raises(CheckpointError, match=r"--lora .*lora_up.weight holds NaN"):
        checkpoint[f"{Q}.weight"]


def test_numbers_that_overflow_in_the_merge(tmp_path: Path, load: Load, pairs: dict[str, Pair]) -> None:
    write_lora(tmp_path / "lora", pairs, "comfyui", ALPHA)
    with pytest.raises(CheckpointError, match=r"weight 1e\+39 times its scale 1.5 is no float32 number"):
        load(LoraFile(tmp_path / "lora", 1e39))
    pairs[Q].up.fill_(1e30)
    write_lora(tmp_path / "large", pairs, "comfyui", ALPHA)
    checkpoint = load(LoraFile(tmp_path / "large", 1e20))
    with pytest.raises(CheckpointError, match=r"when LoRAs are merged; .* smaller weights of --lora"):
        checkpoint[f"{Q}.weight"]


@pytest.mark.parametrize(
    "change",
    [{"lora_alpha": "x"}, {"lora_alpha": -1}, {"lora_alpha": math.inf}, {"r": 5}, {"alpha_pattern": [1]},
     {"alpha_pattern": {"(a*)*b": 1}}, {"alpha_pattern": {"(": 1}}, {"use_dora": True},
     {"init_lora_weights": "pissa_niter_16"}, {"init_lora_weights": "OLoRA"}],
)  # fmt: skip
def test_configs_that_do_not_fit(
    change: dict[str, Any], tmp_path: Path, load: Load, pairs: dict[str, Pair]
) -> None:
    write_lora(tmp_path / "lora", pairs, "peft", ALPHA)
    config = tmp_path / "lora" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(CheckpointError, match="--lora ") as caught:
        load(tmp_path / "lora")
    assert caught.value.exit_code == 3


def test_the_digest_tells_another_scale(tmp_path: Path, load: Load, pairs: dict[str, Pair]) -> None:
    """PEFT's folders with the same tensors and another alpha merge to other weights."""
    digests = set()
    for alpha in (ALPHA, 2 * ALPHA):
        folder = tmp_path / f"alpha-{alpha}"
        write_lora(folder, pairs, "peft", alpha)
        files = [folder / name for name in ("adapter_model.safetensors", "adapter_config.json")]
        (adapter,) = load(folder).adapters
        assert adapter.sha256 == sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        digests.add(adapter.sha256)
    assert len(digests) == 2


def test_the_folder_of_diffusers(
    tmp_path: Path, load: Load, weights: Weights, pairs: dict[str, Pair]
) -> None:
    (tmp_path / "lora").mkdir()
    write_lora(tmp_path / "lora/pytorch_lora_weights.safetensors", pairs, "diffusers", ALPHA)
    assert_merged(load(tmp_path / "lora"), weights, pairs, alpha=ALPHA)


def test_a_name_that_is_not_utf_8(tmp_path: Path, load: Load, pairs: dict[str, Pair]) -> None:
    """A build writes the name into its bill of materials and its manifest."""
    write_lora(tmp_path / "lora", pairs, "comfyui", ALPHA)
    path = tmp_path / os.fsdecode(b"style-\xff.pt")
    with path.open("wb") as file:
        torch.save(load_file(tmp_path / "lora"), file)
    (adapter,) = load(path).adapters
    assert adapter.name.encode("utf-8") == rb"style-\udcff.pt"


def test_a_negative_weight_subtracts(
    tmp_path: Path, load: Load, weights: Weights, pairs: dict[str, Pair]
) -> None:
    write_lora(tmp_path / "lora", pairs, "comfyui", ALPHA)
    (file,) = BuildOptions(lora=(f"{tmp_path / 'lora'}:-0.5",)).lora_files
    assert_merged(load(file), weights, pairs, strength=-0.5, alpha=ALPHA)


@pytest.mark.parametrize("weight", ["nan", "inf", "-inf"])
def test_weights_that_mean_nothing(weight: str) -> None:
    with pytest.raises(UsageError, match=r"expected a finite weight$"):
        _ = BuildOptions(lora=(f"some.safetensors:{weight}",)).lora_files


def test_file_and_weight_are_told_apart(tmp_path: Path) -> None:
    odd = tmp_path / "name:2"
    odd.touch()
    options = BuildOptions(lora=("a.safetensors:0.5", "b.safetensors", "c:d", str(odd)))
    assert [(str(file.path), file.weight) for file in options.lora_files] == [
        ("a.safetensors", 0.5), ("b.safetensors", 1.0), ("c:d", 1.0), (str(odd), 1.0),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="--lora-partial"):
        BuildOptions(lora_partial=True)


def test_the_script_writes_checkpoints_and_loras_that_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = presets()["tiny"].model
    base, lora = tmp_path / "base.safetensors", tmp_path / "lora.safetensors"
    assert make_checkpoint(["--format", "lightx2v-fp8", "-o", str(base)]) == 0
    assert make_checkpoint(["--lora", "musubi", "--rank", "8", "-o", str(lora)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["format"] == "lora musubi"
    (note, *_) = load_checkpoint(base, tiny, LoadOptions(loras=[LoraFile(lora)])).notes
    assert "16 weights changed, rank 8" in note
    assert make_checkpoint(["--lora", "musubi", "-o", str(lora)]) == 2
