"""Strict reader of the config.json of a VoxCPM2 checkpoint.

Every field of config.json has to be known to this reader. Fields of config.json about training are checked and not
used. A field of config.json that the original implementation never reads is accepted only with the value that matches
the implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.checkpoints.json_files import CONFIG_FILE, finite_number, read_json_object
from seko_export.checkpoints.sources import shown
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.voxcpm2.config import LongRope, NetConfig, VoxCpm2Config
from seko_export.media.audio_vae.config import AudioVaeConfig

ARCHITECTURE, EARLIER = "voxcpm2", "voxcpm"
_DTYPES = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float32": "float32",
    "fp32": "float32",
}
T = TypeVar("T")
_REQUIRED = object()


def recognise(folder: Path) -> VoxCpm2Config | None:
    """Return the config of the VoxCPM2 model in a folder, or None if the folder's config.json describes another model.

    Raises
    ------
    CheckpointNotFoundError
        If the folder has no config.json.
    NotACheckpointError
        If config.json describes a VoxCPM 1; if a field is unknown, missing, or has a type or value that is not
        supported.
    CheckpointError
        If two fields of config.json contradict each other.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise CheckpointNotFoundError(f"no {CONFIG_FILE} in {folder}: expected the folder of a VoxCPM2 model")
    parsed = read_json_object(file)
    # The package voxcpm takes a config without an architecture for one of version 1.
    if parsed.get("architecture", EARLIER) == EARLIER and "lm_config" in parsed:
        raise NotACheckpointError(
            f"{file} describes a VoxCPM 1, such as VoxCPM-0.5B and VoxCPM1.5, a model of speech that is not built; "
            "take VoxCPM2"
        )
    return read_config(parsed, str(file)) if is_config(parsed) else None


def is_config(parsed: Mapping[str, Any]) -> bool:
    """Return whether a config.json describes a VoxCPM2 model."""
    return parsed.get("architecture") == ARCHITECTURE


def read_config(parsed: Mapping[str, Any], where: str) -> VoxCpm2Config:
    """Return the config of the model that the content of a config.json describes; ``where`` names the file in messages.
    `read_config` raises the errors of `recognise`.
    """
    top = _Section(where, "", parsed)
    top.fixed("architecture", ARCHITECTURE)
    lm, encoder, dit = (top.section(name) for name in ("lm_config", "encoder_config", "dit_config"))
    vae = _vae(top.section("audio_vae_config", optional=True))
    try:
        base, embed_scale, rope = _language_model(lm)
        residual = replace(base, layers=top.whole("residual_lm_num_layers", 8))
        encoder_net, decoder_net = _local_net(encoder, base), _local_net(dit, base)
        mean_mode = _mean_mode(dit)
        _check_solver(dit.section("cfm_config"))
        feat_dim = top.whole("feat_dim", 64)
        config = VoxCpm2Config(
            name=ARCHITECTURE,
            vocab_size=lm.whole("vocab_size"),
            base=base,
            residual=residual,
            encoder=encoder_net,
            decoder=decoder_net,
            rope=rope,
            residual_rope=not top.flag("residual_lm_no_rope", False),
            patch_size=top.whole("patch_size", 4),
            fsq_dim=top.whole("scalar_quantization_latent_dim", 512),
            fsq_scale=top.whole("scalar_quantization_scale", 9),
            embed_scale=embed_scale,
            mean_mode=mean_mode,
            max_length=top.whole("max_length", 8192),
            dtype=top.choice("dtype", _DTYPES, "bfloat16"),
            vae=vae,
        )
    except UsageError as fault:
        raise NotACheckpointError(f"{where} describes no VoxCPM2 model: {fault}") from fault
    top.text("device", "cuda")  # of the original's process
    if feat_dim != vae.latent_dim:
        raise CheckpointError(
            f"{where} contradicts itself: feat_dim is {feat_dim}, audio_vae_config.latent_dim {vae.latent_dim}; "
            "correct the one that is wrong"
        )
    for section in (top, lm, encoder, dit):
        section.close()
    return config


class _Section:
    """An object of config.json whose fields are read by name and type, each once or more."""

    def __init__(self, where: str, path: str, parsed: Mapping[str, Any]) -> None:
        self._where, self._path, self._fields = where, path, parsed
        self._read: set[str] = set()

    def section(self, name: str, *, optional: bool = False) -> _Section:
        """Return the object in a field; an empty object if the field is optional and missing or null."""
        value = self._take(name, None if optional else _REQUIRED)
        if value is None and optional:
            value = {}
        if not isinstance(value, dict):
            raise self._odd(name, value, "an object")
        return _Section(self._where, f"{self._path}{name}.", value)

    def whole(self, name: str, default: object = _REQUIRED) -> int:
        """Return a whole number of at least 1 from a field of config.json."""
        value = self._take(name, default)
        if type(value) is not int or value < 1:
            raise self._odd(name, value, "a whole number of at least 1")
        return value

    def number(self, name: str, default: object = _REQUIRED) -> float:
        """Return a finite number from a field of config.json."""
        value = self._take(name, default)
        number = finite_number(value)
        if number is None:
            raise self._odd(name, value, "a finite number")
        return number

    def flag(self, name: str, default: object = _REQUIRED) -> bool:
        """Return a boolean from a field of config.json."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._odd(name, value, "true or false")
        return value

    def text(self, name: str, default: object = _REQUIRED) -> str:
        """Return a string from a field of config.json."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise self._odd(name, value, "a string")
        return value

    def choice(self, name: str, choices: Mapping[str, T], default: str) -> T:
        """Return the value for which the string in a field stands; only some strings are allowed."""
        value = self.text(name, default)
        if value not in choices:
            raise self._odd(name, value, f"one of {', '.join(choices)}")
        return choices[value]

    def wholes(self, name: str, default: object = _REQUIRED) -> tuple[int, ...]:
        """Return an array of whole numbers of at least 1 from a field of config.json."""
        value = self._take(name, default)
        if not isinstance(value, list | tuple) or any(type(size) is not int or size < 1 for size in value):
            raise self._odd(name, value, "an array of whole numbers of at least 1")
        return tuple(value)

    def numbers(self, name: str, default: object = _REQUIRED) -> tuple[float, ...]:
        """Return an array of finite numbers from a field of config.json."""
        value = self._take(name, default)
        if not isinstance(value, list | tuple) or any(finite_number(entry) is None for entry in value):
            raise self._odd(name, value, "an array of finite numbers")
        return tuple(map(float, value))

    def fixed(self, name: str, wanted: object, default: object = _REQUIRED) -> None:
        """Refuse a field whose value is not the only supported one."""
        value = self._take(name, default)
        if value != wanted or type(value) is not type(wanted):
            raise self._odd(name, value, f"{wanted!r}, which alone is built")

    def has(self, name: str) -> bool:
        """Return whether a field is present in config.json and not null."""
        return self._fields.get(name) is not None

    def close(self) -> None:
        """Refuse the fields of config.json that were not read."""
        unknown = sorted(set(self._fields) - self._read)
        if unknown:
            names = ", ".join(shown(f"{self._path}{name}") for name in unknown[:20])
            raise NotACheckpointError(
                f"{self._where} has {len(unknown)} fields that are not known: {names}; what they change would be lost: "
                "take out those that change nothing"
            )

    def contradiction(self, name: str, other: str) -> CheckpointError:
        """Return the error for two fields that contradict each other."""
        return CheckpointError(
            f"{self._where} contradicts itself: {self._path}{name} is {self._fields[name]!r}, {other}; correct the one "
            "that is wrong"
        )

    def _take(self, name: str, default: object) -> Any:
        self._read.add(name)
        if name in self._fields:
            return self._fields[name]
        if default is _REQUIRED:
            raise NotACheckpointError(f"{self._where} lacks {self._path}{name}")
        return default

    def _odd(self, name: str, value: object, wanted: str) -> NotACheckpointError:
        return NotACheckpointError(
            f"{self._path}{name} in {self._where} is {shown(repr(value))}, expected {wanted}"
        )


def _language_model(lm: _Section) -> tuple[NetConfig, float, LongRope]:
    """Return the base language model, the scale of text embeddings, and the rotary positions of all transformers."""
    for unused in ("bos_token_id", "eos_token_id"):
        lm.whole(unused)
    lm.number("dim_model_base")
    heads, dim = lm.whole("num_attention_heads"), lm.whole("hidden_size")
    head_dim = _head_dim(lm, dim, heads)
    scaled = lm.flag("use_mup", True)
    depth, embed = lm.number("scale_depth"), lm.number("scale_emb")
    base = NetConfig(
        layers=lm.whole("num_hidden_layers"),
        dim=dim,
        ffn_dim=lm.whole("intermediate_size"),
        heads=heads,
        kv_heads=lm.whole("num_key_value_heads"),
        head_dim=head_dim,
        norm_eps=lm.number("rms_norm_eps"),
        scale_depth=depth if scaled else None,
    )
    lm.fixed("no_rope", False, False)
    scaling = lm.section("rope_scaling")
    scaling.fixed("type", "longrope")
    rope = LongRope(
        theta=lm.number("rope_theta"),
        short_factors=scaling.numbers("short_factor"),
        long_factors=scaling.numbers("long_factor"),
        max_positions=lm.whole("max_position_embeddings"),
        original_positions=scaling.whole("original_max_position_embeddings"),
    )
    scaling.close()
    return base, embed if scaled else 1.0, rope


def _local_net(local: _Section, base: NetConfig) -> NetConfig:
    """Return a local transformer: it has the base model's heads of keys, epsilon and scaling, and sizes of its own."""
    dim, heads = local.whole("hidden_dim", 1024), local.whole("num_heads", 16)
    return replace(
        base,
        layers=local.whole("num_layers", 4),
        dim=dim,
        ffn_dim=local.whole("ffn_dim", 4096),
        heads=heads,
        head_dim=_head_dim(local, dim, heads),
    )


def _head_dim(section: _Section, dim: int, heads: int) -> int:
    """Return the number of channels of a head: the field ``kv_channels``; if it is missing, the width divided by the
    number of heads."""
    if section.has("kv_channels"):
        return section.whole("kv_channels")
    section.fixed("kv_channels", None, None)
    if dim % heads:
        raise UsageError(f"a width of {dim} is no multiple of {heads} heads, and kv_channels is not given")
    return dim // heads


def _mean_mode(dit: _Section) -> bool:
    """Return the field ``dit_mean_mode``. The original ignores ``mean_mode``, the name in the public file; both must
    agree."""
    mean_mode = dit.flag("dit_mean_mode", False)
    if dit.flag("mean_mode", mean_mode) != mean_mode:
        raise dit.contradiction(
            "mean_mode", f"dit_mean_mode, which alone the original reads, is {str(mean_mode).lower()}"
        )
    return mean_mode


def _check_solver(cfm: _Section) -> None:
    """Check the solver's fields in config.json. Only ``solver`` matters: a session chooses the guidance."""
    cfm.fixed("solver", "euler", "euler")
    for name in ("sigma_min", "training_cfg_rate", "inference_cfg_rate", "noise_cond_scale"):
        cfm.number(name, 0.0)
    for name in ("t_scheduler", "reg_loss_type"):
        cfm.text(name, "")
    for name in ("ratio_r_neq_t_range", "noise_cond_prob_range"):
        cfm.numbers(name, ())
    cfm.close()


def _vae(section: _Section) -> AudioVaeConfig:
    usual = AudioVaeConfig()
    section.fixed("depthwise", True, True)
    section.fixed("use_noise_block", False, False)
    section.fixed("cond_out_layer", False, False)
    section.choice("cond_type", {"scale_bias": None, "scale_bias_init": None}, "scale_bias")
    section.whole("cond_dim", 128)  # of other kinds of conditions
    try:
        config = AudioVaeConfig(
            encoder_dim=section.whole("encoder_dim", usual.encoder_dim),
            encoder_rates=section.wholes("encoder_rates", usual.encoder_rates),
            latent_dim=section.whole("latent_dim", usual.latent_dim),
            decoder_dim=section.whole("decoder_dim", usual.decoder_dim),
            decoder_rates=section.wholes("decoder_rates", usual.decoder_rates),
            sample_rate=section.whole("sample_rate", usual.sample_rate),
            out_sample_rate=section.whole("out_sample_rate", usual.out_sample_rate),
            rate_boundaries=section.wholes("sr_bin_boundaries", usual.rate_boundaries),
        )
    except UsageError as fault:
        raise NotACheckpointError(str(fault)) from fault
    section.close()
    return config
