"""What PEFT's config, or the header of a safetensors file, says of the tensors of a LoRA: alphas, ranks, and the rule
of the scale. Configs and headers come from strangers, and are not trusted.

The patterns of a PEFT config are regular expressions. They are matched by RE2, which takes time in proportion to the
length of a name; Python's `re` takes exponential time for some patterns.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seko_export.checkpoints.errors import NotACheckpointError
from seko_export.checkpoints.json_files import finite_number, parse_json
from seko_export.checkpoints.sources import shown

PEFT_CONFIG = "adapter_config.json"
VOXCPM_CONFIG = "lora_config.json"  # of VoxCPM's trainer
_HEADER = "lora_adapter_metadata"  # diffusers' key of a safetensors header: PEFT's config as JSON
_KOHYA_ALPHA = "ss_network_alpha"
# What PEFT, diffusers and ComfyUI put in front of a module's name when they save a LoRA. The patterns of PEFT's config
# are for names without it.
_SAVED_PREFIXES = ("base_model.model.", "transformer.", "diffusion_model.")
# Ways in which PEFT begins a LoRA by taking it out of the base weights.
_CHANGED_BASE = ("pissa", "olora", "corda", "lora_ga")
_BIASES = {"none": False, "all": True, "lora_only": True}  # whether PEFT saves biases that it trained
_LARGEST = 1e9  # of alphas and ranks
_MAX_PATTERNS = 2048  # PEFT writes at most one for each module; a model of 14B has 400
_MAX_PATTERN_LETTERS = 200
# Syntax that RE2 reads in another way than Python does, or with flags; no name of a module needs it. A repeated group
# of repeats, and very many repeats and groups: PEFT would not end on them, so nobody has trained with them.
_NOT_READ = re.compile(r"\(\?(?!:)|\{,|[*+}][^()]*\)[*+{]")
_MAX_REPEATS_AND_GROUPS = 24

Patterns = Sequence[tuple[Any, float]]  # compiled by RE2, which has no types


@dataclass(frozen=True)
class LoraConfig:
    """Alpha, rank and scale rule of a LoRA file. A module's key ``.alpha`` overrides the alpha for this module.

    Parameters
    ----------
    origin : str
        Source of alpha and rank, for reports; empty if no file states alpha or rank.
    alpha, rank : float and int, or None
        Alpha and rank of all modules.
    alphas, ranks : sequence of pairs
        Alphas and ranks, each behind a regular expression on the module's name in the model, without the prefix of the
        file's keys; the first matching expression counts, as in PEFT.
    rank_stabilised : bool
        Whether the scale is alpha / sqrt(rank) (rsLoRA) instead of alpha / rank.
    dora : bool
        Whether matrices have magnitudes (DoRA).
    replaces : bool
        Whether tensors of no low-rank pair replace parameters of the model: the biases that PEFT trained, and the
        modules of ``modules_to_save``.
    """

    origin: str = ""
    alpha: float | None = None
    rank: int | None = None
    alphas: Patterns = ()
    ranks: Patterns = ()
    rank_stabilised: bool = False
    dora: bool = False
    replaces: bool = False

    def alpha_of(self, module: str) -> float | None:
        """Return the alpha that config or header state for a module that has no key ``.alpha``; None if neither states
        an alpha."""
        return _by_pattern(self.alphas, module, self.alpha)

    def rank_of(self, module: str) -> float | None:
        """Return the rank that the config states for a module; None if the config states no rank."""
        return _by_pattern(self.ranks, module, self.rank)


def lora_config(
    config_json: Mapping[str, Any] | None, metadata: Mapping[str, str], origin: str = PEFT_CONFIG
) -> LoraConfig:
    """Return what the config of PEFT or of VoxCPM's trainer says of a LoRA; without one, what the header of diffusers
    or kohya says.

    Parameters
    ----------
    config_json : mapping or None
        Content of the config.
    origin : str
        The config's name: `PEFT_CONFIG` or `VOXCPM_CONFIG`.
    metadata : mapping of str to str
        Metadata of the header of the safetensors file.

    Raises
    ------
    NotACheckpointError
        If a field has another type or value than the trainers write; the message names the field.
    """
    if config_json is not None and origin == VOXCPM_CONFIG:
        return _of_voxcpm(config_json)
    if config_json is not None:
        return _of_peft(PEFT_CONFIG, config_json)
    if _HEADER in metadata:
        try:
            content = parse_json(metadata[_HEADER])
        except ValueError as fault:
            raise NotACheckpointError(f"{_HEADER} of its header is no JSON: {shown(str(fault))}") from fault
        if not isinstance(content, dict):
            raise NotACheckpointError(f"{_HEADER} of its header is no JSON object")
        known = {name.removeprefix("transformer."): value for name, value in content.items()}
        return _of_peft(f"header ({_HEADER})", known)
    if _KOHYA_ALPHA in metadata:
        try:
            alpha = float(metadata[_KOHYA_ALPHA])
        except ValueError:  # "None" where the trainer was not told
            return LoraConfig()
        return LoraConfig(f"header ({_KOHYA_ALPHA})", _number(_KOHYA_ALPHA, alpha, "header"))
    return LoraConfig()


def _of_voxcpm(config_json: Mapping[str, Any]) -> LoraConfig:
    """Return what VoxCPM's trainer says, which has one rank and one alpha for all modules."""
    table = config_json.get("lora_config")
    if not isinstance(table, dict):
        raise _refused("lora_config", table, VOXCPM_CONFIG, "an object with r and alpha")
    rank, alpha = (_number(name, table.get(name), VOXCPM_CONFIG) for name in ("r", "alpha"))
    if not rank.is_integer():
        raise _refused("r", rank, VOXCPM_CONFIG, "a whole number")
    return LoraConfig(VOXCPM_CONFIG, alpha, int(rank))


def _of_peft(origin: str, config_json: Mapping[str, Any]) -> LoraConfig:
    start = config_json.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise NotACheckpointError(
            f"{shown(repr(start))} (init_lora_weights) in its {origin} says that training changed the base weights, "
            "too; let its author save it with path_initial_model_for_weight_conversion"
        )
    alpha, rank = config_json.get("lora_alpha"), config_json.get("r")
    if rank is not None and not _number("r", rank, origin).is_integer():
        raise _refused("r", rank, origin, "a whole number")
    bias, saved = config_json.get("bias") or "none", config_json.get("modules_to_save") or []
    if not isinstance(bias, str) or bias not in _BIASES:
        raise _refused("bias", bias, origin, f"one of {', '.join(_BIASES)}")
    if not isinstance(saved, list):
        raise _refused("modules_to_save", saved, origin, "a list of modules")
    return LoraConfig(
        origin,
        None if alpha is None else _number("lora_alpha", alpha, origin),
        None if rank is None else int(rank),
        _patterns("alpha_pattern", config_json, origin),
        _patterns("rank_pattern", config_json, origin),
        _flag("use_rslora", config_json, origin),
        _flag("use_dora", config_json, origin),
        _BIASES[bias] or bool(saved),
    )


def _refused(name: str, value: object, origin: str, wanted: str) -> NotACheckpointError:
    return NotACheckpointError(f"{name} in its {origin} is {shown(repr(value))}, expected {wanted}")


def _flag(name: str, config_json: Mapping[str, Any], origin: str) -> bool:
    value = config_json.get(name)
    if value is not None and type(value) is not bool:
        raise _refused(name, value, origin, "true or false")
    return bool(value)


def _number(name: str, value: object, origin: str) -> float:
    number = finite_number(value)
    if number is None or not 0 < number < _LARGEST:
        raise _refused(name, value, origin, f"a number above 0 and below {_LARGEST:g}")
    return number


def _patterns(name: str, config_json: Mapping[str, Any], origin: str) -> Patterns:
    stated = config_json.get(name) or {}
    if not isinstance(stated, dict):
        raise _refused(name, stated, origin, "an object")
    if len(stated) > _MAX_PATTERNS:
        raise NotACheckpointError(
            f"{name} in its {origin} has {len(stated)} patterns, at most {_MAX_PATTERNS} are read"
        )
    return [(_pattern(name, text, origin), _number(name, value, origin)) for text, value in stated.items()]


def _pattern(name: str, text: str, origin: str) -> Any:
    """Return PEFT's regular expression for a pattern, compiled by RE2. It is one that Python compiles, too, so that it
    has the meaning that it has in PEFT."""
    import re2  # takes 20 ms, and few LoRAs have patterns

    whole = rf"(.*\.)?({text})$"
    options = re2.Options()
    options.log_errors = False
    simple = sum(text.count(sign) for sign in "*+?{(") <= _MAX_REPEATS_AND_GROUPS and not _NOT_READ.search(
        text
    )
    if simple and len(text) <= _MAX_PATTERN_LETTERS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FutureWarning)  # of sets whose meaning will change
                re.compile(whole)
            return re2.compile(whole, options)
        except (re.error, re2.error, ValueError, RecursionError, OverflowError, FutureWarning):
            pass
    raise NotACheckpointError(
        f"{name} in its {origin} has {shown(repr(text))}, which is no regular expression of module names that is read: "
        f"at most {_MAX_PATTERN_LETTERS} letters with {_MAX_REPEATS_AND_GROUPS} repeats and groups, without repeats of "
        "repeats, look-around, references or flags; write the names out"
    )


def _by_pattern(patterns: Patterns, module: str, otherwise: float | None) -> float | None:
    prefix = next((prefix for prefix in _SAVED_PREFIXES if module.startswith(prefix)), "")
    module = module.removeprefix(prefix)
    return next((value for pattern, value in patterns if pattern.match(module)), otherwise)
