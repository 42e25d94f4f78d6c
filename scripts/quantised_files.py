"""Writes weights in the 8-bit forms of LightX2V and ComfyUI, and as GGUF, from tensors by Wan's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

# Parts of a layer's keys that LightX2V's and ComfyUI's converters quantise.
MATRICES = (".self_attn.", ".cross_attn.", ".ffn.")
FORMS = ("lightx2v-fp8", "lightx2v-int8", "comfyui-scaled", "comfyui-quant", "fp8-cast", "gguf")
_TOP = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


def quantised_names(state: Mapping[str, Tensor]) -> list[str]:
    """Return the matrices that are quantised, by Wan's names."""
    return [
        name
        for name, tensor in state.items()
        if tensor.dim() == 2 and name.endswith(".weight") and any(part in name for part in MATRICES)
    ]


def in_codes(matrix: Tensor, dtype: torch.dtype, *, rows: bool) -> tuple[Tensor, Tensor]:
    """Return codes, and the scale of each row [out, 1] or of the whole matrix [], float32."""
    numbers = matrix.float()
    top = numbers.abs().amax(dim=1, keepdim=True) if rows else numbers.abs().amax()
    scale = top / _TOP[dtype]
    codes = numbers / scale
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scale


def write_quantised(path: Path, state: Mapping[str, Tensor], form: str) -> None:
    """Write weights in one of `FORMS`.

    LightX2V: ``weight_scale`` of rows, in bfloat16 beside e4m3, in float32 beside int8. ComfyUI: scales of matrices,
    with the mark of older files or the JSON of newer ones. ``fp8-cast``: every tensor in e4m3 without scales. ``gguf``:
    matrices in Q8_0, other tensors in F32.
    """
    if form == "gguf":
        _write_gguf(path, state)
        return
    if form == "fp8-cast":
        save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in state.items()}, path)
        return
    stored, metadata = dict(state), {"format": "pt"}
    prefix = "model.diffusion_model." if form.startswith("comfyui") else ""
    for name in quantised_names(state):
        dtype = torch.int8 if form.endswith("int8") else torch.float8_e4m3fn
        codes, scale = in_codes(state[name], dtype, rows=form.startswith("lightx2v"))
        base = name.removesuffix(".weight")
        stored[name] = codes
        if form == "comfyui-scaled":
            stored |= {f"{base}.scale_weight": scale, f"{base}.scale_input": torch.ones(())}
        else:
            stored[f"{base}.weight_scale"] = scale.bfloat16() if form == "lightx2v-fp8" else scale
        if form == "comfyui-quant":
            content = json.dumps({"format": "float8_e4m3fn"}).encode()
            stored[f"{base}.comfy_quant"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if form == "comfyui-scaled":
        stored["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file({f"{prefix}{name}": tensor.contiguous() for name, tensor in stored.items()}, path, metadata)


def _write_gguf(path: Path, state: Mapping[str, Tensor]) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(str(path), "wan")
    matrices = {*quantised_names(state)}
    for name, tensor in state.items():
        numbers = tensor.float().numpy()
        if name in matrices and tensor.shape[-1] % 32 == 0:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(numbers, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
