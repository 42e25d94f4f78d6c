"""Seeded random checkpoints of any model in every format that the loader reads; trains and checks nothing."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from seko_export.checkpoints.keys import wan_shapes, wan_to_diffusers
from seko_export.config.model import ModelConfig
from seko_export.config.stream import PATCH
from seko_export.errors import MachineError, UsageError

FORMATS = ("self-forcing", "wan", "wan-sharded", "diffusers")
SHARD_BYTES = 5_000_000_000  # of weights in one shard at most, as the Hugging Face Hub cuts them
MIN_SHARDS = 2  # a small model is cut too: the point of the format is the index

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_random_checkpoint(
    path: Path,
    config: ModelConfig,
    *,
    format: str,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> None:
    """Write seeded random weights; each tensor depends on seed, key, shape, dtype and device alone.

    Parameters
    ----------
    path : Path
        Where it goes: a file (``self-forcing``, ``wan``) or a folder (``wan-sharded``, ``diffusers``).
        Nothing may be there yet. It appears whole or not at all.
    config : ModelConfig
        The model.
    format : str
        One of `FORMATS`. ``self-forcing`` stores the tensors once, as ``generator`` and ``generator_ema``.
    seed : int
        Any integer.
    dtype : torch.dtype
        float32, or bfloat16: the float32 numbers rounded.
    device : str
        Where the numbers are drawn; a GPU draws others than a CPU.

    Raises
    ------
    UsageError
        If the format, dtype or device is unknown, or ``path`` exists.
    MachineError
        If there is no such GPU, the disk is too small, or the path cannot be written.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown checkpoint format {format!r}; expected one of {', '.join(FORMATS)}")
    if dtype not in _DTYPE_NAMES:
        raise UsageError(f"random weights are float32 or bfloat16, not {dtype}")
    _check_device(device)
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists; remove it or name another path: a checkpoint is never overwritten")
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = _RandomWeights(config, wan_shapes(config), seed, dtype, device)
        free = shutil.disk_usage(path.parent).free
        if weights.total_bytes > free:
            raise MachineError(
                f"{path} needs {weights.total_bytes} bytes, {free} are free; make room or go elsewhere"
            )
        _WRITERS[format](temporary, weights)
        temporary.rename(path)
    except OSError as fault:
        raise MachineError(f"{path} cannot be written: {fault.strerror or fault}") from fault
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        elif temporary.exists():
            temporary.unlink()


def random_weight(
    name: str, shape: tuple[int, ...], *, seed: int, dtype: torch.dtype, device: str = "cpu"
) -> torch.Tensor:
    """Draw one weight, at a scale that keeps activations near 1 through any depth.

    Matrices have a standard deviation of 1/sqrt(fan in), biases of 0.02, modulations of 1/sqrt(dim) as in
    Wan's own initialisation; norm weights are 1 + 0.1 N(0, 1). Nothing is zero, the head included, so that
    every weight shows in the output.

    Parameters
    ----------
    name : str
        A Wan key.
    shape : tuple[int, ...]
        Its shape, from `wan_shapes`.
    seed : int
        Any integer.
    dtype : torch.dtype
        Of the result; drawn in float32.
    device : str
        Where it is drawn.

    Returns
    -------
    torch.Tensor
        Of that shape, on the CPU.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    # A CPU generator keeps 32 bits of its seed; more would only look like more.
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:4], "little"))
    weight = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    if name.endswith("modulation"):
        weight *= shape[-1] ** -0.5
    elif name.endswith(".bias"):
        weight *= 0.02
    elif len(shape) == 1:
        weight = 1 + 0.1 * weight
    else:
        weight *= math.prod(shape[1:]) ** -0.5
    return weight.to(dtype).cpu()


def diffusers_config(config: ModelConfig) -> dict[str, object]:
    """Return what config.json holds for this model: the arguments of ``diffusers.WanTransformer3DModel``."""
    return {
        "_class_name": "WanTransformer3DModel",
        "patch_size": [1, PATCH, PATCH],
        "num_attention_heads": config.heads,
        "attention_head_dim": config.head_dim,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "text_dim": config.text_dim,
        "freq_dim": config.freq_dim,
        "ffn_dim": config.ffn_dim,
        "num_layers": config.layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": config.norm_eps,
    }


@dataclass(frozen=True)
class _RandomWeights:
    """The weights of one model, drawn when asked for."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    seed: int
    dtype: torch.dtype
    device: str

    @property
    def total_bytes(self) -> int:
        return sum(map(self.bytes_of, self.shapes))

    def bytes_of(self, name: str) -> int:
        return math.prod(self.shapes[name]) * self.dtype.itemsize

    def draw(self, name: str) -> torch.Tensor:
        return random_weight(name, self.shapes[name], seed=self.seed, dtype=self.dtype, device=self.device)


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    if not device.startswith("cuda"):
        raise UsageError(f"weights are drawn on cpu or cuda, not {device!r}")
    if not torch.cuda.is_available():
        raise MachineError(
            f"{device} was asked for, and torch {torch.__version__} finds no GPU here; use cpu"
        )


def _write_self_forcing(path: Path, weights: _RandomWeights) -> None:
    state = {f"model.{name}": weights.draw(name) for name in weights.shapes}
    with path.open("wb") as file:  # torch.save names the archive after a path; a file keeps the bytes equal
        torch.save({"generator": state, "generator_ema": state}, file)
        _sync(file)


def _write_wan(path: Path, weights: _RandomWeights) -> None:
    _write_safetensors(path, {name: name for name in weights.shapes}, weights)


def _write_wan_sharded(folder: Path, weights: _RandomWeights) -> None:
    folder.mkdir()
    shards = max(MIN_SHARDS, math.ceil(weights.total_bytes / SHARD_BYTES))
    names = list(weights.shapes)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        shard = f"diffusion_pytorch_model-{number + 1:05}-of-{shards:05}.safetensors"
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        _write_safetensors(folder / shard, {name: name for name in part}, weights)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": weights.total_bytes}, "weight_map": weight_map}
    _write_json(folder / "diffusion_pytorch_model.safetensors.index.json", index)


def _write_diffusers(folder: Path, weights: _RandomWeights) -> None:
    home = folder / "transformer"
    home.mkdir(parents=True)
    names = {wan_to_diffusers(name): name for name in weights.shapes}
    _write_safetensors(home / "diffusion_pytorch_model.safetensors", names, weights)
    _write_json(home / "config.json", diffusers_config(weights.config))


def _write_safetensors(path: Path, names: Mapping[str, str], weights: _RandomWeights) -> None:
    """Write one safetensors file tensor by tensor: one in memory at a time, where `save_file` wants all.

    The format: 8 bytes of header length, little endian; a JSON header of dtype, shape and byte range by key,
    padded with spaces to a multiple of 8; the bytes. ``names`` maps the key in the file to the Wan key.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, name in names.items():
        end = offset + weights.bytes_of(name)
        header[key] = {
            "dtype": _DTYPE_NAMES[weights.dtype],
            "shape": weights.shapes[name],
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name in names.values():
            file.write(weights.draw(name).view(torch.uint8).numpy().data)
        _sync(file)


def _write_json(path: Path, content: object) -> None:
    with path.open("wb") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")
        _sync(file)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


_WRITERS: dict[str, Callable[[Path, _RandomWeights], None]] = {
    "self-forcing": _write_self_forcing,
    "wan": _write_wan,
    "wan-sharded": _write_wan_sharded,
    "diffusers": _write_diffusers,
}
