"""Opening of LoRA files of any trainer, which sorts the tensors of a file by module and role. The reader has no code
for any model.

The keys of a low-rank pair have one of these endings, behind the module's name: PEFT's ``.lora_A.weight`` and
``.lora_B.weight`` (with an adapter's name in between, or without ``.weight``), kohya's and ComfyUI's
``.lora_down.weight`` and ``.lora_up.weight``, older diffusers' ``_lora.down.weight``, ``.lora.down.weight`` and
``.lora_linear_layer.down.weight``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError, naming_option
from seko_export.checkpoints.json_files import read_json_object
from seko_export.checkpoints.lora_config import PEFT_CONFIG, VOXCPM_CONFIG, LoraConfig, lora_config
from seko_export.checkpoints.model_parts import looks_like
from seko_export.checkpoints.readers import open_files
from seko_export.checkpoints.sources import Layout, TensorSource, shown
from seko_export.errors import CheckpointError

FORMATS = "a LoRA (safetensors, .pt, or the folder of PEFT, diffusers or VoxCPM's trainer)"
_PEFT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_VOXCPM_FILES = ("lora_weights.safetensors", "lora_weights.ckpt")
_FOLDER_FILES = (
    *_PEFT_FILES,
    *_VOXCPM_FILES,
    "pytorch_lora_weights.safetensors",
)  # the last is diffusers' name
_LAYOUT = Layout(FORMATS, (), ("generator_lora", "lora", "state_dict"))


class Role(StrEnum):
    """The role of a LoRA's tensor in its module, such as a low-rank factor."""

    DOWN = "down"
    UP = "up"
    UP_BIAS = "up bias"
    ALPHA = "alpha"
    MAGNITUDE = "magnitude"
    DIFF = "diff"
    DIFF_BIAS = "diff_b"
    DIFF_MODULATION = "diff_m"
    SET = "set_weight"
    RESHAPE = "reshape_weight"


_ROLES: tuple[tuple[str, Role], ...] = (
    (r"\.lora_B(?:\.[\w-]+)?\.bias", Role.UP_BIAS),
    (r"\.lora_A(?:\.[\w-]+)?(?:\.weight)?", Role.DOWN),
    (r"\.lora_B(?:\.[\w-]+)?(?:\.weight)?", Role.UP),
    (r"\.lora_down(?:\.weight)?", Role.DOWN),
    (r"\.lora_up(?:\.weight)?", Role.UP),
    (r"(?:_lora|\.lora|\.lora_linear_layer)\.down\.weight", Role.DOWN),
    (r"(?:_lora|\.lora|\.lora_linear_layer)\.up\.weight", Role.UP),
    (r"\.lora_magnitude_vector(?:\.[\w-]+)?(?:\.weight)?", Role.MAGNITUDE),
    (r"\.dora_scale", Role.MAGNITUDE),
    (r"\.alpha", Role.ALPHA),
    (r"\.diff", Role.DIFF),
    (r"\.diff_b", Role.DIFF_BIAS),
    (r"\.diff_m", Role.DIFF_MODULATION),
    (r"\.set_weight", Role.SET),
    (r"\.reshape_weight", Role.RESHAPE),
)
_COMPILED = tuple((re.compile(rf"(.+?){suffix}", re.ASCII), role) for suffix, role in _ROLES)
_BASE_LAYER = ".base_layer."  # PEFT's name of the module that it wraps
# Biases that PEFT saves once more if it trained all biases and whole modules; the keys without these parts are read.
_SAVED_TWICE = (".modules_to_save.", ".original_module.")
_MIDDLE = "lora_mid"
_OTHER_KINDS = {"hada_w1": "a LoHa", "lokr_w": "a LoKr", _MIDDLE: "a LoCon with a middle matrix"}


@dataclass(frozen=True)
class OpenedLora:
    """The tensors of a LoRA by module and role, whose numbers are not read yet.

    Parameters
    ----------
    path : Path
        The file or folder that the user named.
    sha256 : str
        SHA-256 of the file with the tensors; of a LoRA with a config, of that file's bytes and then the config's.
    modules : mapping of str to mapping of Role to TensorSource
        Tensors by role, for each module by its name in the file.
    config : LoraConfig
        What a PEFT config or the file's header says of the tensors, such as their alphas.
    strange : tuple of str
        Keys whose role is unknown.
    """

    path: Path
    sha256: str
    modules: Mapping[str, Mapping[Role, TensorSource]]
    config: LoraConfig
    strange: tuple[str, ...] = ()


def open_lora(path: Path) -> OpenedLora:
    """Open a LoRA and sort its tensors.

    Parameters
    ----------
    path : Path
        A safetensors or `.pt` file, or a folder in the form in which PEFT, diffusers or VoxCPM's trainer saves LoRAs;
        its content is not trusted.

    Raises
    ------
    CheckpointError
        If the file cannot be read or is not a LoRA; the message begins with ``--lora``.
    """
    with naming_option("--lora", path):
        return _opened(path)


def holds_lora(path: Path) -> bool:
    """Return whether a path holds a LoRA, even one that `open_lora` refuses."""
    try:
        keys = [source.file_key for source in open_files(_weights_file(path), _LAYOUT).sources]
    except CheckpointError:
        return False
    roles = {match[1] for key in keys if (match := _role_of(key))}
    return bool(roles - {Role.ALPHA}) or any(part in key for part in _OTHER_KINDS for key in keys)


def read_files(path: Path) -> tuple[Path, ...]:
    """Return the files that `open_lora` reads: the file of tensors and, if PEFT or VoxCPM's trainer saved the LoRA, its
    config.

    Raises
    ------
    CheckpointNotFoundError
        If a folder holds no file of tensors, or a file of VoxCPM's trainer lacks its config.
    """
    file = _weights_file(path)
    if file.name in _VOXCPM_FILES:
        config = file.parent / VOXCPM_CONFIG
        if not config.is_file():
            raise CheckpointNotFoundError(
                f"no {VOXCPM_CONFIG} beside {file.name}, which alone states alpha; put it there, or write "
                '{"lora_config": {"r": RANK, "alpha": ALPHA}} with the numbers of the training'
            )
        return file, config
    config = file.parent / PEFT_CONFIG
    return (file, config) if file.name in _PEFT_FILES and config.is_file() else (file,)


def _weights_file(path: Path) -> Path:
    """Return a LoRA's file with tensors: the path itself, or the one in a trainer's folder."""
    if not path.is_dir():
        return path
    file = next((path / name for name in _FOLDER_FILES if (path / name).is_file()), None)
    if file is None:
        raise CheckpointNotFoundError(f"the folder holds no {' or '.join(_FOLDER_FILES)}")
    return file


def _opened(path: Path) -> OpenedLora:
    file, *config_files = read_files(path)
    config_json = read_json_object(config_files[0]) if config_files else None
    opened = open_files(file, _LAYOUT)
    config = lora_config(config_json, opened.metadata, *(file.name for file in config_files))
    modules: dict[str, dict[Role, TensorSource]] = {}
    strange: list[str] = []
    for source in opened.sources:
        if config.replaces and any(part in source.file_key for part in _SAVED_TWICE):
            continue
        found_role = _role_of(source.file_key) or _replaced(source.file_key, config)
        if found_role is None:
            strange.append(source.file_key)
            continue
        module, role = found_role
        if role in modules.setdefault(module, {}):
            raise CheckpointError(f"{shown(module)} has {role} twice; keep one")
        modules[module][role] = source
    if middle := [key for key in strange if _MIDDLE in key]:
        raise NotACheckpointError(
            f"{file} is {_OTHER_KINDS[_MIDDLE]} ({shown(middle[0])}), without which the others give wrong numbers; "
            f"expected {FORMATS}"
        )
    if not any({*roles} - {Role.ALPHA} for roles in modules.values()):
        kinds = [kind for part, kind in _OTHER_KINDS.items() if any(part in key for key in strange)]
        what = kinds[0] if kinds else "no LoRA: it has alphas without matrices" if modules else "no LoRA"
        listed = ", ".join(shown(source.file_key) for source in opened.sources[:5]) or "none"
        other = "" if kinds or modules else looks_like(strange)
        raise NotACheckpointError(
            f"{file} is {what}; expected {FORMATS}; its keys begin with {listed}{other}"
        )
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256")
    # The config states the scale, without which the tensors do not tell what is merged.
    for config_file in config_files:
        digest.update(config_file.read_bytes())
    return OpenedLora(path, digest.hexdigest(), modules, config, tuple(strange))


def _role_of(key: str) -> tuple[str, Role] | None:
    for pattern, role in _COMPILED:
        match = pattern.fullmatch(key)
        if match:
            return match[1], role
    return None


def _replaced(key: str, config: LoraConfig) -> tuple[str, Role] | None:
    """Return the parameter that a tensor of a PEFT folder replaces, by its name in the model; None if the config says
    that PEFT trained no parameter beside the low-rank pairs."""
    if not config.replaces or any(part in key for part in _OTHER_KINDS):
        return None
    return key.replace(_BASE_LAYER, "."), Role.SET
