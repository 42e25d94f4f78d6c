"""Opening of LoRA files of any trainer, which sorts the tensors of a file by module and role. The reader has no code
for any model.

The keys of a low-rank pair have one of these endings, behind the module's name: PEFT's ``.lora_A.weight`` and
``.lora_B.weight`` (with an adapter's name in between, or without ``.weight``), kohya's and ComfyUI's
``.lora_down.weight`` and ``.lora_up.weight``, older diffusers' ``_lora.down.weight``, ``.lora.down.weight`` and
``.lora_linear_layer.down.weight``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError, naming_option
from seko_export.checkpoints.json_files import read_json_object
from seko_export.checkpoints.parts import looks_like
from seko_export.checkpoints.readers import open_files
from seko_export.checkpoints.sources import Layout, TensorSource, shown
from seko_export.errors import CheckpointError

FORMATS = "a LoRA (safetensors, .pt, or the folder of PEFT or diffusers)"
PEFT_CONFIG = "adapter_config.json"
_PEFT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_FOLDER_FILES = (*_PEFT_FILES, "pytorch_lora_weights.safetensors")  # the last one is diffusers' name
_LAYOUT = Layout(FORMATS, (), ("generator_lora", "lora", "state_dict"))
_HEADER = "lora_adapter_metadata"  # diffusers' key of a safetensors header: PEFT's config as JSON
_KOHYA_ALPHA = "ss_network_alpha"
# What PEFT, diffusers and ComfyUI put in front of a module's name when they save a LoRA. The patterns of PEFT's config
# are for names without it.
_SAVED_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.")
_MAX_PATTERN, _MAX_REPEATS = (
    200,
    4,
)  # of a regular expression in adapter_config.json, which comes from strangers


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
# Ways in which PEFT begins a LoRA by taking it out of the base weights.
_CHANGED_BASE = ("pissa", "olora", "corda", "lora_ga")
_MIDDLE = "lora_mid"
_OTHER_KINDS = {"hada_w1": "a LoHa", "lokr_w": "a LoKr", _MIDDLE: "a LoCon with a middle matrix"}


@dataclass(frozen=True)
class Scaling:
    """Alpha, rank and scale rule of a LoRA file, from its PEFT config or header. A module's key ``.alpha`` overrides
    the alpha for this module.

    Parameters
    ----------
    origin : str
        Source of alpha and rank, for reports; empty if no file states alpha or rank.
    alpha, rank : float and int, or None
        Alpha and rank of all modules.
    alphas, ranks : mapping of str to number
        Alphas and ranks by a regular expression on the module's name in the model, without the prefix of the file's
        keys; the first matching expression counts, as in PEFT.
    rank_stabilised : bool
        Whether the scale is alpha / sqrt(rank) (rsLoRA) instead of alpha / rank.
    dora : bool
        Whether matrices have magnitudes (DoRA).
    """

    origin: str = ""
    alpha: float | None = None
    rank: int | None = None
    alphas: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, float] = field(default_factory=dict)
    rank_stabilised: bool = False
    dora: bool = False

    def alpha_of(self, module: str) -> float | None:
        """Return the alpha that config or header state for a module that has no key ``.alpha``; None if neither states
        an alpha."""
        return _by_pattern(self.alphas, module, self.alpha)

    def rank_of(self, module: str) -> float | None:
        """Return the rank that the config states for a module; None if the config states no rank."""
        return _by_pattern(self.ranks, module, self.rank)


@dataclass(frozen=True)
class OpenedLora:
    """The tensors of a LoRA by module and role, whose numbers are not read yet.

    Parameters
    ----------
    path : Path
        The file or folder that the user named.
    sha256 : str
        SHA-256 of the file with the tensors; of a LoRA with PEFT's config, of that file's bytes and then the config's.
    modules : mapping of str to mapping of Role to TensorSource
        Tensors by role, for each module by its name in the file.
    scaling : Scaling
        Alphas and ranks from a PEFT config or the file's header.
    strange : tuple of str
        Keys whose role is unknown.
    """

    path: Path
    sha256: str
    modules: Mapping[str, Mapping[Role, TensorSource]]
    scaling: Scaling
    strange: tuple[str, ...] = ()


def open_lora(path: Path) -> OpenedLora:
    """Open a LoRA and sort its tensors.

    Parameters
    ----------
    path : Path
        A safetensors or `.pt` file, or a folder in the form in which PEFT or diffusers saves LoRAs; its content is not
        trusted.

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
    """Return the files that `open_lora` reads: the file of tensors and, if PEFT saved the LoRA, its config.

    Raises
    ------
    CheckpointNotFoundError
        If a folder holds no file of tensors.
    """
    file = _weights_file(path)
    config = file.parent / PEFT_CONFIG
    return (file, config) if file.name in _PEFT_FILES and config.is_file() else (file,)


def _weights_file(path: Path) -> Path:
    """Return a LoRA's file with tensors: the path itself, or the file in PEFT's or diffusers' folder."""
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
    modules: dict[str, dict[Role, TensorSource]] = {}
    strange: list[str] = []
    for source in opened.sources:
        found_role = _role_of(source.file_key)
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
    # PEFT's config states the scale, without which the tensors do not tell what is merged.
    for config_file in config_files:
        digest.update(config_file.read_bytes())
    return OpenedLora(
        path, digest.hexdigest(), modules, _scaling(config_json, opened.metadata), tuple(strange)
    )


def _role_of(key: str) -> tuple[str, Role] | None:
    for pattern, role in _COMPILED:
        match = pattern.fullmatch(key)
        if match:
            return match[1], role
    return None


def _scaling(config_json: Mapping[str, Any] | None, metadata: Mapping[str, str]) -> Scaling:
    """Return alphas and ranks from PEFT's config; without one, from the header of diffusers or kohya."""
    if config_json is not None:
        return _peft_scaling(PEFT_CONFIG, config_json)
    if _HEADER in metadata:
        try:
            content = json.loads(metadata[_HEADER])
        except (ValueError, RecursionError) as fault:
            raise NotACheckpointError(f"{_HEADER} of its header is no JSON: {shown(str(fault))}") from fault
        if not isinstance(content, dict):
            raise NotACheckpointError(f"{_HEADER} of its header is no JSON object")
        known = {name.removeprefix("transformer."): value for name, value in content.items()}
        return _peft_scaling(f"header ({_HEADER})", known)
    if _KOHYA_ALPHA in metadata:
        try:
            return Scaling(f"header ({_KOHYA_ALPHA})", _number(_KOHYA_ALPHA, float(metadata[_KOHYA_ALPHA])))
        except ValueError:  # "None" where the trainer was not told
            return Scaling()
    return Scaling()


def _peft_scaling(origin: str, config_json: Mapping[str, Any]) -> Scaling:
    start = config_json.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise NotACheckpointError(
            f"{shown(repr(start))} (init_lora_weights) in its {origin} says that training changed the base weights, "
            "too; let its author save it with path_initial_model_for_weight_conversion"
        )
    alpha, rank = config_json.get("lora_alpha"), config_json.get("r")
    patterns: dict[str, dict[str, float]] = {}
    for name in ("alpha_pattern", "rank_pattern"):
        stated = config_json.get(name) or {}
        if not isinstance(stated, dict):
            raise NotACheckpointError(f"{name} in its {origin} is {shown(repr(stated))}, expected an object")
        patterns[name] = {_pattern(key, origin): _number(name, value) for key, value in stated.items()}
    return Scaling(
        origin,
        None if alpha is None else _number("lora_alpha", alpha),
        None if rank is None else int(_number("r", rank)),
        patterns["alpha_pattern"],
        patterns["rank_pattern"],
        bool(config_json.get("use_rslora")),
        bool(config_json.get("use_dora")),
    )


def _number(name: str, value: object) -> float:
    """Return a positive number from a LoRA's config."""
    if type(value) not in (int, float) or not 0 < float(value) < 1e9:  # type: ignore[arg-type]
        raise NotACheckpointError(f"{name} is {shown(repr(value))}, expected a number above 0")
    return float(value)  # type: ignore[arg-type]


def _pattern(text: str, origin: str) -> str:
    """Return a regular expression from a LoRA's config, which must be one that cannot run for long."""
    simple = len(text) <= _MAX_PATTERN and sum(text.count(sign) for sign in "*+{") <= _MAX_REPEATS
    try:
        if simple and not re.search(r"\)[*+?{]", text):
            re.compile(text)
            return text
    except (re.error, RecursionError, OverflowError):
        pass
    raise NotACheckpointError(
        f"{shown(repr(text))} in its {origin} is no pattern of module names that is read"
    )


def _by_pattern(values: Mapping[str, float], module: str, otherwise: float | None) -> float | None:
    prefix = next((prefix for prefix in _SAVED_PREFIXES if module.startswith(prefix)), "")
    module = module.removeprefix(prefix)
    for pattern, value in values.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise
