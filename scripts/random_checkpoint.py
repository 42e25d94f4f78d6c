"""Writer of checkpoints with seeded random weights, for any model and in every format that the loader reads."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scripts.checkpoint_configs import (
    abot_config,
    i2v_config,
    lingbot_config,
    matrix_game_config,
    seko_talk_config,
    stored_i2v_diffusers_config,
    stored_matrix_game_diffusers_config,
    wan_config,
    wan_diffusers_config,
)
from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.checkpoints.key_table import KeyTable, Naming, plain_spread
from seko_export.checkpoints.random import Spread, random_weight
from seko_export.checkpoints.sources import Companion
from seko_export.config.build import ModelIdentity
from seko_export.errors import MachineError, UsageError
from seko_export.families.abot.keys import NAMING as ABOT
from seko_export.families.lingbot.keys import LINGBOT
from seko_export.families.matrix_game.keys import DIFFUSERS as MATRIX_GAME_DIFFUSERS
from seko_export.families.minwm.keys import NAMING as MINWM
from seko_export.families.minwm.keys import WRAPPED
from seko_export.families.registry import family_named
from seko_export.families.seko_talk.keys import SEKO
from seko_export.families.wan.keys import SELF_FORCING
from seko_export.families.wan_layout.namings import DIFFUSERS, WAN
from seko_runtime.format.disk_faults import check_space
from seko_runtime.format.safetensors_map import safetensors_head
from seko_runtime.format.whole_files import check_file_place, whole_path
from seko_runtime.host.faults import told_by_the_system

STEM = "diffusion_pytorch_model"  # as diffusers and Wan name the file
SHARD_BYTES = 5_000_000_000  # of weights in one shard at most, as the Hugging Face Hub cuts them
MIN_SHARDS = 2  # a small model is cut too: the point of the format is the index

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int32: "I32"}
_DRAWN = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class RandomForm:
    """File layout of a checkpoint of seeded random weights.

    Parameters
    ----------
    container : str
        Format of the file: ``pt``, ``safetensors`` or ``sharded`` (safetensors files with an index).
    naming : Naming
        The naming of the checkpoint's keys.
    prefix : str
        Prefix of every key.
    parts : tuple of str
        Entries of a ``pt``, each of which holds all weights. If empty, the ``pt`` holds the weights directly.
    subfolder : str or None
        Subfolder of the checkpoint's folder that holds the file. None: the checkpoint is the file itself or, if
        sharded, a folder with the files.
    config : callable or None
        Function that returns the content of the ``config.json`` beside the weights.
    """

    container: str
    naming: Naming
    prefix: str = ""
    parts: tuple[str, ...] = ()
    subfolder: str | None = None
    config: Callable[[Any], Mapping[str, Any]] | None = None


_GENERATORS = ("generator", "generator_ema")
# The layouts in which each family's checkpoints are published, and further ones that it reads; the first is the usual.
FORMS: Mapping[str, Mapping[str, RandomForm]] = {
    "wan": {
        "self-forcing": RandomForm("pt", SELF_FORCING, "model.", _GENERATORS),
        "wan": RandomForm("safetensors", WAN),
        "wan-sharded": RandomForm("sharded", WAN, config=wan_config),
        "diffusers": RandomForm(
            "safetensors", DIFFUSERS, subfolder="transformer", config=wan_diffusers_config
        ),
    },
    "wan_i2v": {
        "wan-sharded": RandomForm("sharded", WAN, config=i2v_config),
        "wan": RandomForm("safetensors", WAN),
        "diffusers": RandomForm(
            "safetensors", DIFFUSERS, subfolder="transformer", config=stored_i2v_diffusers_config
        ),
    },
    "lingbot": {
        "lingbot-sharded": RandomForm("sharded", LINGBOT, config=lingbot_config),
        "lingbot": RandomForm("safetensors", LINGBOT),
    },
    "seko_talk": {"seko-talk": RandomForm("sharded", SEKO, config=seko_talk_config)},
    "matrix_game": {
        "matrix-game": RandomForm("safetensors", WAN, prefix="model."),
        "matrix-game-sharded": RandomForm("sharded", WAN, config=matrix_game_config),
        "diffusers": RandomForm(
            "safetensors",
            MATRIX_GAME_DIFFUSERS,
            subfolder="transformer",
            config=stored_matrix_game_diffusers_config,
        ),
    },
    "abot": {
        "abot": RandomForm("safetensors", ABOT),
        "abot-sharded": RandomForm("sharded", ABOT, config=abot_config),
    },
    "minwm": {
        "minwm": RandomForm("pt", MINWM, f"model.{WRAPPED}", _GENERATORS),
        "minwm-sharded": RandomForm("sharded", MINWM, config=wan_config),
    },
}


def write_random_checkpoint(
    path: Path,
    config: ModelIdentity,
    *,
    seed: int,
    format: str | None = None,
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
    seed : int
        Seed of the random weights, any integer.
    format : str, optional
        Name of the file layout, one of those of the model's family in `FORMS`; default: the first. All entries of a
        `.pt` file have the same tensors, which are stored once.
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
    keys, forms = family_named(config.family).keys, FORMS[config.family]
    form = next(iter(forms.values())) if format is None else forms.get(format)
    if form is None:
        raise UsageError(f"unknown checkpoint format {format!r}; expected one of {', '.join(forms)}")
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
    spread: Spread = plain_spread
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

    The folder appears complete or not at all. The parameters and errors are those of `write_random_checkpoint`.
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


def require_absent(path: Path) -> None:
    """Refuse a path that exists, with a UsageError."""
    if os.path.lexists(path):
        raise UsageError(f"{path} exists; remove it or name another path: a checkpoint is never overwritten")


@contextmanager
def _appearing_whole(path: Path, size: int) -> Iterator[Path]:
    """Yield the path of a file or folder to make, which gets the name ``path`` if nothing fails."""
    require_absent(path)
    check_file_place(path)
    with whole_path(path, replace=False) as unfinished:
        check_space(path.parent, size)
        yield unfinished


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
        own = {name: shape for name, shape in self.shapes.items() if _companion_of(self.keys, name) is None}
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


def _companion_of(keys: KeyTable, name: str) -> Companion | None:
    """Return the companion file that holds a key (exporter's name), or None if the checkpoint itself holds it."""
    return next((file for file in keys.companions if any(part in name for part in file.parts)), None)


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
    elif any(_companion_of(weights.keys, name) for name in weights.shapes):
        raise UsageError("weights in several files need a format that is a folder")
    for companion in weights.keys.companions:
        own = [name for name in weights.shapes if _companion_of(weights.keys, name) is companion]
        _write_safetensors(home / companion.names[0], weights.keyed(own))
    weights = weights.without_companions
    if form.container == "sharded":
        _write_sharded(home, weights)
    else:
        file = home / f"{STEM}.{form.container}" if is_folder else path
        if form.container == "pt":
            _write_pt(file, weights)
        else:
            _write_safetensors(file, weights.keyed(weights.shapes))
    if is_folder and form.config is not None:
        _write_json(home / CONFIG_FILE, form.config(weights.config))


def _write_pt(path: Path, weights: _RandomWeights) -> None:
    state = {key: tensor.draw() for key, tensor in weights.keyed(weights.shapes).items()}
    # torch.save names the archive after a path; a file keeps the bytes equal
    with path.open("wb") as file, told_by_the_system():
        torch.save(dict.fromkeys(weights.form.parts, state) or state, file)


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
