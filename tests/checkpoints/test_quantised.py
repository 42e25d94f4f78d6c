"""8-bit files of LightX2V and ComfyUI give codes times scales; other formats are refused by name."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.quantised_files import FORMS, in_codes, quantised_names, write_quantised
from scripts.random_checkpoint import write_random_checkpoint
from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import CheckpointError
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.families.wan.family import FAMILY
from tests.support.small_artifact import MODEL, STREAM

Weights = dict[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn
BASE = "blocks.0.ffn.0"
PREFIX = "model.diffusion_model."


def expected(weights: Weights, form: str) -> Weights:
    """What a file of that form holds, in float32."""
    if form == "fp8-cast":
        return {name: tensor.to(E4M3).float() for name, tensor in weights.items()}
    numbers = {name: tensor.float() for name, tensor in weights.items()}
    for name in quantised_names(weights):
        dtype = torch.int8 if form.endswith("int8") else E4M3
        codes, scale = in_codes(weights[name], dtype, rows=form.startswith("lightx2v"))
        numbers[name] = codes.float() * (scale.bfloat16().float() if form == "lightx2v-fp8" else scale)
    return numbers


@pytest.mark.shows("quantised")
@pytest.mark.parametrize("form", [form for form in FORMS if form != "gguf"])
@pytest.mark.parametrize("container", ["safetensors", "pt"])
def test_every_form_is_expanded(
    form: str, container: str, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    path = tmp_path / "file.safetensors"
    write_quantised(path, weights, form)
    if container == "pt":
        torch.save(load_file(path), tmp_path / "file.pt")
        path = tmp_path / "file.pt"
    checkpoint = load_checkpoint(path, model)
    truth = expected(weights, form)
    for name, tensor in checkpoint.items():
        assert torch.equal(tensor.float(), truth[name]), name
    codes, scales = ("int8" if form.endswith("int8") else "e4m3"), "without" if form == "fp8-cast" else "with"
    count = len(weights) if form == "fp8-cast" else len(quantised_names(weights))
    assert checkpoint.quantised == {f"{codes} {scales} scales": count}
    assert recognise_checkpoint(path).recognised.family == "wan"


@pytest.mark.parametrize("form", ["lightx2v-fp8", "comfyui-scaled", "comfyui-quant"])
def test_fp8_takes_codes_byte_for_byte(form: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "base", MODEL, format="wan", seed=0)
    weights = load_file(tmp_path / "base")
    write_quantised(tmp_path / "file", weights, form)
    config = VideoBuild(MODEL, VideoConfig(STREAM, Schedule.warped(), "fp4"), TargetConfig("cpu"))
    pieces = FAMILY.graph(config.changed(fused=True, fp8=True)).pieces
    checkpoint = load_checkpoint(tmp_path / "file", MODEL)
    built = dict(FAMILY.weights(pieces, checkpoint))
    for ours, theirs in (
        ("blocks.1.ffn.2", ["ffn.2"]),
        ("blocks.1.self_attn.qkv", [f"self_attn.{part}" for part in "qkv"]),
    ):
        pairs = [
            in_codes(weights[f"blocks.1.{part}.weight"], E4M3, rows=form == "lightx2v-fp8") for part in theirs
        ]
        codes = torch.cat([codes.view(torch.uint8) for codes, _ in pairs])
        assert torch.equal(built[f"{ours}.weight_fp8"].view(torch.uint8), codes)
        scales = torch.cat([scale.expand(len(codes), 1) for codes, scale in pairs])
        scales = scales.bfloat16().float() if form == "lightx2v-fp8" else scales
        assert torch.equal(built[f"{ours}.weight_scale"], scales)


def test_a_merged_matrix_is_quantised_anew(tmp_path: Path, model: ModelConfig, weights: Weights) -> None:
    write_quantised(tmp_path / "file", weights, "lightx2v-fp8")
    save_file({f"diffusion_model.{BASE}.diff": torch.ones(48, 32)}, tmp_path / "lora")
    checkpoint = load_checkpoint(tmp_path / "file", model, LoadOptions(loras=[LoraFile(tmp_path / "lora")]))
    assert checkpoint.row_codes(f"{BASE}.weight") is None
    assert checkpoint.row_codes("blocks.0.ffn.2.weight") is not None
    assert checkpoint.quantised == {"e4m3 with scales": len(quantised_names(weights)) - 1}
    truth = expected(weights, "lightx2v-fp8")[f"{BASE}.weight"] + 1
    torch.testing.assert_close(checkpoint[f"{BASE}.weight"], truth)


def _json(**content: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


# As NVFP4 stores a matrix: codes of 4 bits in pairs, and scales of 16 codes.
_PACKED: dict[str, torch.Tensor | None] = {
    f"{BASE}.weight": torch.ones(48, 16, dtype=torch.uint8),
    f"{BASE}.weight_scale": torch.ones(48, 2).to(E4M3),
}
_FAULTS: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "rotated int8": (
        "comfyui-quant",
        {f"{PREFIX}{BASE}.comfy_quant": _json(format="int8_tensorwise", convrot=True)},
        "rotated weights",
    ),
    "MXFP8": ("comfyui-quant", {f"{PREFIX}{BASE}.comfy_quant": _json(format="mxfp8")}, "'mxfp8'"),
    "NVFP4": ("comfyui-quant", {f"{PREFIX}{BASE}.comfy_quant": _json(format="nvfp4")}, "'nvfp4'"),
    "no format": ("comfyui-quant", {f"{PREFIX}{BASE}.comfy_quant": _json()}, "the format None"),
    "another type than said": (
        "comfyui-quant",
        {f"{PREFIX}{BASE}.comfy_quant": _json(format="int8_tensorwise")},
        "stored as e4m3",
    ),
    "no JSON": (
        "comfyui-quant",
        {f"{PREFIX}{BASE}.comfy_quant": torch.full((9,), 200, dtype=torch.uint8)},
        "is no JSON",
    ),
    "NVFP4 of LightX2V": (
        "lightx2v-fp8",
        {**_PACKED, f"{BASE}.weight_global_scale": torch.ones(())},
        "NVFP4 of LightX2V",
    ),
    "calibrated NVFP4": ("lightx2v-fp8", {**_PACKED, f"{BASE}.alpha": torch.ones(())}, "NVFP4 of LightX2V"),
    "second scale": (
        "lightx2v-fp8",
        {**_PACKED, f"{BASE}.weight_scale_2": torch.ones(())},
        "NVFP4 of ComfyUI",
    ),
    "packed": ("lightx2v-fp8", _PACKED, "less than 8 bits"),
    "scales of blocks": ("lightx2v-fp8", {f"{BASE}.weight_scale": torch.ones(48, 2)}, "one a row"),
    "scales of columns": ("lightx2v-fp8", {f"{BASE}.weight_scale": torch.ones(1, 32)}, "one a row"),
    "scale in integers": (
        "lightx2v-fp8",
        {f"{BASE}.weight_scale": torch.ones(48, 1, dtype=torch.uint8)},
        "MXFP8 or NVFP4",
    ),
    "negative scale": (
        "lightx2v-fp8",
        {f"{BASE}.weight_scale": -torch.ones(48, 1)},
        "weight_scale holds negative",
    ),
    "one negative scale of int8": (
        "lightx2v-int8",
        {f"{BASE}.weight_scale": torch.ones(48, 1).index_fill_(0, torch.tensor([5]), -0.5)},
        "weight_scale holds negative",
    ),
    "scale 0 of a matrix": (
        "comfyui-scaled",
        {f"{PREFIX}{BASE}.scale_weight": torch.zeros(())},
        r"scale_weight is 0 for codes of .*ffn\.0\.weight that are not",
    ),
    "scale 0 of a row": (
        "lightx2v-fp8",
        {f"{BASE}.weight_scale": torch.ones(48, 1).index_fill_(0, torch.tensor([5]), 0)},
        r"weight_scale is 0 for codes of .*ffn\.0\.weight that are not",
    ),
    "no scale": ("lightx2v-fp8", {f"{BASE}.weight_scale": None}, "has no scale"),
    "no matrix": ("lightx2v-fp8", {f"{BASE}.weight": None}, "without their matrices"),
    "TransformerEngine": (
        "lightx2v-fp8",
        {f"{BASE}._extra_state": torch.ones(3, dtype=torch.uint8)},
        "TransformerEngine",
    ),
    "bitsandbytes": ("lightx2v-fp8", {f"{BASE}.weight.absmax": torch.ones(3)}, "bitsandbytes"),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_what_is_not_read_is_named(fault: str, tmp_path: Path, model: ModelConfig, weights: Weights) -> None:
    form, changes, sentence = _FAULTS[fault]
    write_quantised(tmp_path / "whole", weights, form)
    state = load_file(tmp_path / "whole") | changes
    present = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(present, tmp_path / "file")
    torch.save(dict(sorted(present.items())), tmp_path / "sorted.pt")  # safetensors sorts keys by dtype first
    for path in (tmp_path / "file", tmp_path / "sorted.pt"):
        with pytest.raises(CheckpointError, match=sentence) as caught:
            load_checkpoint(path, model)
        assert BASE in str(caught.value)
        assert str(path) in str(caught.value)
        assert caught.value.exit_code == 3


SCALES = (".weight_scale", ".scale_weight")


@pytest.mark.parametrize("marks", [True, False], ids=["with marks", "without marks"])
@pytest.mark.parametrize("form", [form for form in FORMS if "fp8" in form or "comfyui" in form])
def test_a_file_without_all_its_scales_is_no_plain_cast(
    form: str, marks: bool, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    """Its codes would be taken as weights that are a thousand times too large."""
    write_quantised(tmp_path / "whole", weights, form)
    lost = SCALES if marks else (*SCALES, ".scale_input", "scaled_fp8", ".comfy_quant")
    state = {key: tensor for key, tensor in load_file(tmp_path / "whole").items() if not key.endswith(lost)}
    save_file(state, tmp_path / "file")
    if form == "fp8-cast":  # which has no scale to lose
        assert load_checkpoint(tmp_path / "file", model).quantised
        return
    with pytest.raises(
        CheckpointError, match=r"weight is in 8 bits and has no scale, .*: the scales of all"
    ) as caught:
        load_checkpoint(tmp_path / "file", model)
    assert str(caught.value).startswith(str(tmp_path / "file"))


def test_large_weights_of_a_plain_cast(tmp_path: Path, model: ModelConfig, weights: Weights) -> None:
    """As a text encoder's embeddings have them; other matrices tell that no scale is missing."""
    weights["time_embedding.0.weight"][0, 0] = 400
    write_quantised(tmp_path / "file", weights, "fp8-cast")
    assert load_checkpoint(tmp_path / "file", model)["time_embedding.0.weight"].max() == 384


def test_rows_of_zeros_may_have_the_scale_0(tmp_path: Path, model: ModelConfig, weights: Weights) -> None:
    write_quantised(tmp_path / "whole", weights, "lightx2v-fp8")
    state = load_file(tmp_path / "whole")
    state[f"{BASE}.weight"][5] = 0
    state[f"{BASE}.weight_scale"][5] = 0
    save_file(state, tmp_path / "file")
    assert not load_checkpoint(tmp_path / "file", model)[f"{BASE}.weight"][5].any()


@pytest.mark.parametrize("state", [None, io.BytesIO(b"state")], ids=["none", "bytes"])
@pytest.mark.parametrize("nested", [False, True], ids=["entry", "dict in an entry"])
def test_what_transformer_engine_pickles_is_named(
    state: object, nested: bool, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    content: dict[str, object] = {**weights, f"{BASE}._extra_state": state}
    torch.save({"generator": {"model": content} if nested else content}, tmp_path / "model_te.pt")
    with pytest.raises(
        CheckpointError, match=r"_extra_state is of TransformerEngine, which is not read"
    ) as caught:
        load_checkpoint(tmp_path / "model_te.pt", model)
    assert str(caught.value).startswith(str(tmp_path / "model_te.pt"))
    assert "give it" not in str(caught.value)


def test_the_header_names_formats_too(tmp_path: Path, model: ModelConfig, weights: Weights) -> None:
    write_quantised(tmp_path / "whole", weights, "comfyui-quant")
    state = {
        name: tensor for name, tensor in load_file(tmp_path / "whole").items() if "comfy_quant" not in name
    }
    layers = {
        name.removesuffix(".weight_scale"): {"format": "float8_e4m3fn"}
        for name in state
        if name.endswith("_scale")
    }
    for name, format, sentence in (
        (f"{PREFIX}{BASE}", "float8_e4m3fn", None),
        (f"{PREFIX}{BASE}", "mxfp8", "'mxfp8'"),
        (BASE, "nvfp4", "'nvfp4'"),  # without the prefix of the keys
        ("blocks.99.ffn.0", "float8_e4m3fn", "blocks.99.ffn.0, which is not in the file"),
    ):
        layers[name] = {"format": format}
        save_file(state, tmp_path / "file", {"_quantization_metadata": json.dumps({"layers": layers})})
        if sentence is None:
            assert load_checkpoint(tmp_path / "file", model).quantised
        else:
            with pytest.raises(CheckpointError, match=sentence):
                load_checkpoint(tmp_path / "file", model)
            del layers[name]


def test_a_header_and_a_key_that_contradict_each_other(
    tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    write_quantised(tmp_path / "whole", weights, "comfyui-quant")
    state = load_file(tmp_path / "whole")
    for format in ("float8_e4m3fn", "float8_e5m2", "mxfp8"):
        about = json.dumps({"layers": {BASE: {"format": format}}})
        save_file(state, tmp_path / "file", {"_quantization_metadata": about})
        if format == "float8_e4m3fn":
            assert load_checkpoint(tmp_path / "file", model).quantised
        else:
            with pytest.raises(CheckpointError, match=f"'float8_e4m3fn' by .*comfy_quant, and '{format}' by"):
                load_checkpoint(tmp_path / "file", model)


@pytest.mark.parametrize("content", ["[", "[]", "{}", '{"layers": 3}', '{"layers": {"x": 1}}'])
def test_headers_that_are_no_table_of_formats(
    content: str, tmp_path: Path, model: ModelConfig, weights: Weights
) -> None:
    save_file(weights, tmp_path / "file", {"_quantization_metadata": content})
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "file", model)


def test_a_scale_that_is_no_number(tmp_path: Path, model: ModelConfig, weights: Weights) -> None:
    write_quantised(tmp_path / "whole", weights, "lightx2v-fp8")
    state = load_file(tmp_path / "whole")
    state[f"{BASE}.weight_scale"][3] = torch.nan
    save_file(state, tmp_path / "file")
    checkpoint = load_checkpoint(tmp_path / "file", model)
    for read in (checkpoint.__getitem__, checkpoint.row_codes):
        with pytest.raises(CheckpointError, match=r"ffn\.0\.weight holds 32 NaN"):
            read(f"{BASE}.weight")
