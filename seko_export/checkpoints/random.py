"""Writer of checkpoints with seeded random weights, for any model and in every format that the loader reads."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.checkpoints.key_table import KeyTable, RandomForm, plain_spread
from seko_export.config.build import ModelIdentity
from seko_export.errors import MachineError, UsageError
from seko_runtime.format.disk_faults import check_space, disk_faults
from seko_runtime.format.safetensors_map import safetensors_head
from seko_runtime.format.whole_files import check_file_place, whole_path
from seko_runtime.host.faults import told_by_the_system

STEM = "diffusion_pytorch_model"  # as diffusers and Wan name the file
SHARD_BYTES = 5_000_000_000  # of weights in one shard at most, as the Hugging Face Hub cuts them
MIN_SHARDS = 2  # a small model is cut too: the point of the format is the index

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32"}
_DRAWN = (torch.float32, torch.bfloat16)


def write_random_model(
    path: Path,
    config: ModelIdentity,
    keys: KeyTable,
    *,
    format: str,
    seed: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> None:
    """Write seeded random weights of a model. Each random tensor depends only on seed, key, shape, dtype and device.

    Parameters
    ----------
    path : Path
        The file to write, or the folder for formats that are folders. The path must not exist. The new file or
        folder appears complete or not at all.
    config : ModelIdentity
        Dimensions of the model.
    keys : KeyTable
        Key table of the model's family, which `seko_export.families.model_files.write_random_checkpoint` finds.
    format : str
        Name of the file layout, one of ``keys.random_forms``. All entries of a `.pt` file have the same tensors, which
        are stored once.
    seed : int
        Seed of the random weights, any integer.
    dtype : torch.dtype
        Dtype of the weights: float32, or bfloat16, to which the float32 numbers are rounded.
    device : str
        Device on which the random numbers are drawn. The same seed gives other numbers on a GPU than on a CPU.

    Raises
    ------
    UsageError
        If the format, dtype or device is unknown, or ``path`` exists.
    MachineError
        If there is no GPU of this number.
    DiskError
        If the disk is full, or the path cannot be written.
    """
    form = keys.random_forms.get(format)
    if form is None:
        raise UsageError(
            f"unknown checkpoint format {format!r}; expected one of {', '.join(keys.random_forms)}"
        )
    if dtype not in _DRAWN:
        raise UsageError(f"random weights are float32 or bfloat16, not {dtype}")
    _check_device(device)
    weights = _RandomWeights(config, keys, form, keys.shapes(config), seed, dtype, device)
    with _appearing_whole(path, weights.total_bytes) as temporary:
        _write(temporary, weights)


@dataclass(frozen=True)
class RandomFile:
    """The description of one safetensors file with random weights, for a folder of several files.

    Parameters
    ----------
    shapes : mapping of str to tuple of int
        Shape of every tensor, by its key.
    dtype : torch.dtype
        Dtype of the random tensors, float32 or bfloat16.
    spread : callable
        Function that returns mean and standard deviation of a weight by key and shape.
    tensors : mapping of str to Tensor
        Further tensors to write unchanged, by key, in float32, bfloat16 or int32.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    spread: Callable[[str, tuple[int, ...]], tuple[float, float]] = plain_spread
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def stored(self, seed: int, device: str) -> dict[str, _Stored]:
        """Return the tensors that the file holds, by key."""

        def draw(key: str, shape: tuple[int, ...]) -> torch.Tensor:
            return random_weight(key, shape, seed=seed, dtype=self.dtype, device=device, spread=self.spread)

        drawn = {
            key: _Stored(shape, self.dtype, partial(draw, key, shape))
            for key, shape in self.shapes.items()
            if key not in self.tensors
        }
        return drawn | {
            key: _Stored(tuple(tensor.shape), tensor.dtype, tensor.clone)
            for key, tensor in self.tensors.items()
        }


def write_random_folder(
    path: Path,
    files: Mapping[str, RandomFile],
    documents: Mapping[str, object],
    *,
    seed: int,
    device: str = "cpu",
) -> None:
    """Write a folder with several safetensors files of random weights, and with JSON documents.

    The folder appears complete or not at all. The parameters and errors are those of `write_random_model`.
    """
    _check_device(device)
    contents = {name: file.stored(seed, device) for name, file in files.items()}
    size = sum(tensor.nbytes for content in contents.values() for tensor in content.values())
    with _appearing_whole(path, size) as temporary:
        temporary.mkdir()
        for name, content in contents.items():
            _write_safetensors(temporary / name, content)
        for name, document in documents.items():
            _write_json(temporary / name, document)


def write_tensor_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a file that appears complete or not at all. If the name of the file ends in ``.safetensors``,
    the format is safetensors, otherwise that of torch.

    Raises
    ------
    UsageError
        If the path exists.
    MachineError
        If the file cannot be written.
    """
    with _appearing_whole(path, sum(tensor.nbytes for tensor in tensors.values())) as temporary:
        if path.suffix == ".safetensors":
            save_file(dict(tensors), temporary)
        else:
            torch.save(dict(tensors), temporary)


@contextmanager
def _appearing_whole(path: Path, size: int) -> Iterator[Path]:
    """Yield the path of a file or folder to make, which gets the name ``path`` if nothing fails."""
    if os.path.lexists(path):
        raise UsageError(f"{path} exists; remove it or name another path: a checkpoint is never overwritten")
    check_file_place(path)
    with disk_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    check_space(path.parent, size)
    with whole_path(path, replace=False) as unfinished:
        yield unfinished


def random_weight(
    name: str,
    shape: tuple[int, ...],
    *,
    seed: int,
    dtype: torch.dtype,
    device: str = "cpu",
    spread: Callable[[str, tuple[int, ...]], tuple[float, float]] = plain_spread,
) -> torch.Tensor:
    """Draw one weight, scaled so that activations stay near 1 at any depth.

    Parameters
    ----------
    name : str
        Key of the weight, by the exporter's names.
    shape : tuple[int, ...]
        Shape of the weight.
    seed : int
        Seed of the random weights, any integer.
    dtype : torch.dtype
        Dtype of the result; numbers are drawn in float32.
    device : str
        Device on which the random numbers are drawn.
    spread : callable
        Function that returns mean and standard deviation of a weight by name and shape.

    Returns
    -------
    torch.Tensor
        The weight, of shape ``shape``, on the CPU.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    # A CPU generator keeps 32 bits of its seed; more would only look like more.
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:4], "little"))
    weight = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    mean, deviation = spread(name, shape)
    weight *= deviation
    if mean:
        weight += mean
    return weight.to(dtype).cpu()


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file with random weights, which is drawn when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    draw: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _RandomWeights:
    """The random weights of one model, drawn when they are needed."""

    config: ModelIdentity
    keys: KeyTable
    form: RandomForm
    shapes: Mapping[str, tuple[int, ...]]
    seed: int
    dtype: torch.dtype
    device: str

    @property
    def total_bytes(self) -> int:
        return sum(math.prod(shape) * self.dtype.itemsize for shape in self.shapes.values())

    @property
    def without_companions(self) -> _RandomWeights:
        """Names of the weights in the checkpoint itself, without those in companion files."""
        own = {name: shape for name, shape in self.shapes.items() if self.keys.companion_of(name) is None}
        return replace(self, shapes=own)

    def draw(self, name: str) -> torch.Tensor:
        return random_weight(
            name,
            self.shapes[name],
            seed=self.seed,
            dtype=self.dtype,
            device=self.device,
            spread=self.keys.spread,
        )

    def keyed(self, names: Iterable[str]) -> dict[str, _Stored]:
        """Return the random weights of these names, by the keys of the file."""
        return {
            f"{self.form.prefix}{self.form.naming.to_theirs(name)}": _Stored(
                self.shapes[name], self.dtype, partial(self.draw, name)
            )
            for name in names
        }


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    if not device.startswith("cuda"):
        raise UsageError(f"weights are drawn on cpu or cuda, not {device!r}")
    if not torch.cuda.is_available():
        raise MachineError(
            f"{device} was asked for, and torch {torch.__version__} finds no GPU here; use cpu"
        )


def _write(path: Path, weights: _RandomWeights) -> None:
    form = weights.form
    is_folder = form.subfolder is not None or form.container == "sharded"
    home = path / (form.subfolder or "")
    if is_folder:
        home.mkdir(parents=True)
    elif any(map(weights.keys.companion_of, weights.shapes)):
        raise UsageError("weights in several files need a format that is a folder")
    for companion in weights.keys.companions:
        own = [name for name in weights.shapes if weights.keys.companion_of(name) is companion]
        _write_safetensors(home / companion.names[0], weights.keyed(own))
    weights = weights.without_companions
    if form.container == "sharded":
        _write_sharded(home, weights)
    else:
        _WRITERS[form.container](home / f"{STEM}.{form.container}" if is_folder else path, weights)
    if is_folder and form.config is not None:
        _write_json(home / CONFIG_FILE, form.config(weights.config))


def _write_pt(path: Path, weights: _RandomWeights) -> None:
    state = {key: tensor.draw() for key, tensor in weights.keyed(weights.shapes).items()}
    # torch.save names the archive after a path; a file keeps the bytes equal
    with path.open("wb") as file, told_by_the_system():
        torch.save(dict.fromkeys(weights.form.parts, state) or state, file)


def _write_whole(path: Path, weights: _RandomWeights) -> None:
    _write_safetensors(path, weights.keyed(weights.shapes))


def _write_sharded(folder: Path, weights: _RandomWeights) -> None:
    shards = max(MIN_SHARDS, math.ceil(weights.total_bytes / SHARD_BYTES))
    names = list(weights.shapes)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        shard = f"{STEM}-{number + 1:05}-of-{shards:05}.safetensors"
        part = weights.keyed(names[number * len(names) // shards : (number + 1) * len(names) // shards])
        _write_safetensors(folder / shard, part)
        weight_map |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": weights.total_bytes}, "weight_map": weight_map}
    _write_json(folder / f"{STEM}.safetensors.index.json", index)


def _write_safetensors(path: Path, content: Mapping[str, _Stored]) -> None:
    """Write a safetensors file tensor by tensor, with one tensor in memory at a time; the library's `save_file` needs
    all of them."""
    entries = (
        (key, _DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.nbytes) for key, tensor in content.items()
    )
    with path.open("wb") as file:
        file.write(safetensors_head(entries, {"format": "pt"}))
        for tensor in content.values():
            file.write(tensor.draw().view(torch.uint8).numpy().data)


def _write_json(path: Path, content: object) -> None:
    with path.open("wb") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")


_WRITERS: dict[str, Callable[[Path, _RandomWeights], None]] = {
    "pt": _write_pt,
    "safetensors": _write_whole,
}
