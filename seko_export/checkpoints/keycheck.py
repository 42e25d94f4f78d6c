"""Compares the keys found with the keys of the model, and says what the set probably is; reads no tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from seko_export.checkpoints.errors import WeightKeysError
from seko_export.checkpoints.keys import diffusers_to_wan, layer_of, wan_shapes, wan_to_diffusers
from seko_export.checkpoints.sources import OpenedFiles, TensorSource, shown
from seko_export.checkpoints.text_keys import (
    SURPLUS_KEYS,
    TIED_KEYS,
    text_shapes,
    text_transformers_names,
)
from seko_export.checkpoints.vae_keys import vae_diffusers_names, vae_shapes
from seko_export.config.media import TextEncoderConfig, VaeConfig
from seko_export.config.model import ModelConfig
from seko_export.media.wan_vae import VAE_PRESETS

SHOWN_KEYS = 20  # of each kind in a message; the error's attributes hold all

# Part of a key -> what a checkpoint with it is.
TELLTALES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("k_img", "img_emb.", "add_k_proj", "image_embedder."),
        "these are the keys of an image-to-video checkpoint; take the text-to-video one",
    ),
    (
        ("weight_scale", "scale_weight"),
        "these are quantised weights; take the bfloat16 or float32 checkpoint",
    ),
    (("lora_",), "these are the keys of a LoRA; merge it into its base model first"),
)


def match_sources(
    path: Path, opened: OpenedFiles, config: ModelConfig
) -> tuple[str, Mapping[str, TensorSource]]:
    """Give every key of the model its stored tensor, strictly.

    Parameters
    ----------
    path : Path
        Where the checkpoint lies, for the message.
    opened : OpenedFiles
        What was found there.
    config : ModelConfig
        What must be there.

    Returns
    -------
    format_name : str
        ``self-forcing``, ``wan`` or ``diffusers``.
    sources : Mapping[str, TensorSource]
        By Wan key, in the order of `wan_shapes`.

    Raises
    ------
    WeightKeysError
        If a key is unknown, missing, of another shape, or there twice; all of them are listed in one error.
    """
    format_name = _format_name(opened)
    naming = _Naming(format_name, diffusers_to_wan, wan_to_diffusers)
    if format_name != "diffusers":
        naming = _Naming(format_name, str, str)
    sources = compare_keys(
        f"{path} ({format_name} names) does not hold the weights of {config.name!r}:",
        opened,
        naming,
        wan_shapes(config),
        hints=lambda: _hints(opened, naming.to_ours, config),
    )
    return format_name, sources


def match_vae_sources(
    path: Path, opened: OpenedFiles, config: VaeConfig, half: str
) -> tuple[str, Mapping[str, TensorSource]]:
    """Give every key of the VAE, or of one half of it, its stored tensor, strictly.

    Parameters
    ----------
    path : Path
        Where the checkpoint lies, for the message.
    opened : OpenedFiles
        What was found there.
    config : VaeConfig
        What must be there.
    half : str
        ``decoder``, ``encoder`` or ``both``. The other half may be there, of any shape, or not; a key of neither
        is unknown.

    Returns
    -------
    format_name : str
        ``wan`` or ``diffusers``.
    sources : Mapping[str, TensorSource]
        By Wan key, in the order of `vae_shapes`.

    Raises
    ------
    WeightKeysError
        If a key is unknown, missing, of another shape, or there twice; all of them are listed in one error.
    """
    names = vae_diffusers_names(config)
    signs = ("mid_block.", "quant_conv.", "up_blocks.", "down_blocks.")
    is_diffusers = any(sign in source.key for source in opened.sources for sign in signs)
    naming = _Naming("wan", str, str)
    if is_diffusers:
        ours = {theirs: name for name, theirs in names.items()}
        naming = _Naming("diffusers", ours.__getitem__, names.__getitem__)
    sources = compare_keys(
        f"{path} ({naming.format_name} names) does not hold the weights of a VAE of base_dim {config.base_dim} "
        f"(asked for: {half}):",
        opened,
        naming,
        vae_shapes(config, half),
        hints=lambda: _vae_hints(opened, naming.to_ours, config),
        passed_over=names,
    )
    return naming.format_name, sources


def match_text_sources(
    path: Path, opened: OpenedFiles, config: TextEncoderConfig
) -> tuple[str, Mapping[str, TensorSource]]:
    """Give every key of the text encoder its stored tensor, strictly.

    Parameters
    ----------
    path : Path
        Where the checkpoint lies, for the message.
    opened : OpenedFiles
        What was found there. The rest of a whole UMT5 may be there too.
    config : TextEncoderConfig
        What must be there.

    Returns
    -------
    format_name : str
        ``wan`` or ``transformers``.
    sources : Mapping[str, TensorSource]
        By Wan key, in the order of `text_shapes`.

    Raises
    ------
    WeightKeysError
        If a key is unknown, missing, of another shape, or there twice; all of them are listed in one error.
    """
    names = text_transformers_names(config)
    naming = _Naming("wan", str, str)
    if is_transformers_text(opened):
        ours = {theirs: name for name, theirs in names.items()}
        ours |= {alias: ours[theirs] for alias, theirs in TIED_KEYS.items()}
        naming = _Naming("transformers", ours.__getitem__, names.__getitem__)
        opened = replace(opened, sources=_without_surplus(opened.sources))
    sources = compare_keys(
        f"{path} ({naming.format_name} names) does not hold a UMT5 encoder of {config.layers} layers and width "
        f"{config.dim}:",
        opened,
        naming,
        text_shapes(config),
        hints=list,
    )
    return naming.format_name, sources


def is_transformers_text(opened: OpenedFiles) -> bool:
    """Tell whether a text encoder's keys are transformers' rather than Wan's."""
    return any(".SelfAttention." in source.key for source in opened.sources)


def _without_surplus(sources: tuple[TensorSource, ...]) -> tuple[TensorSource, ...]:
    """Drop a whole model's other half, and the second name of a tensor that is stored under both."""
    named = {source.key: source for source in sources}
    surplus = {key for key in named if SURPLUS_KEYS.fullmatch(key)}
    for alias, key in TIED_KEYS.items():
        if alias in named and key in named and torch.equal(named[alias].read(), named[key].read()):
            surplus.add(alias)
    return tuple(source for source in sources if source.key not in surplus)


@dataclass(frozen=True)
class _Naming:
    """A checkpoint's naming, with the translation of a key to ours (KeyError: no such key) and back."""

    format_name: str
    to_ours: Callable[[str], str]
    to_theirs: Callable[[str], str]


def compare_keys(
    heading: str,
    opened: OpenedFiles,
    naming: _Naming,
    expected: Mapping[str, tuple[int, ...]],
    *,
    hints: Callable[[], list[str]],
    passed_over: Iterable[str] = (),
) -> Mapping[str, TensorSource]:
    """Give every expected key its stored tensor, in order; names of ``passed_over`` may be there too.

    Raises
    ------
    WeightKeysError
        If a key is unknown, missing, of another shape, or there twice: ``heading``, all of them, ``hints``.
    """
    known = {*expected, *passed_over}
    found: dict[str, TensorSource] = {}
    unknown: list[str] = []
    doubled: list[str] = []
    for source in opened.sources:
        name = _translated(source.key, naming.to_ours)
        if name is None or name not in known:
            unknown.append(source.file_key)
        elif name in found:
            doubled.append(source.file_key)
        else:
            found[name] = source
    missing = [name for name in expected if name not in found]
    misshapen = [name for name in expected if name in found and found[name].shape != expected[name]]
    if not (unknown or missing or misshapen or doubled):
        return {name: found[name] for name in expected}

    shapes = [
        f"{shown(found[name].file_key)} is {list(found[name].shape)}, expected {list(expected[name])}"
        for name in misshapen
    ]
    lines = [heading]
    for kind, keys in (
        ("unknown", [shown(key) for key in unknown]),
        ("missing", [naming.to_theirs(name) for name in missing]),
        ("mis-shaped", shapes),
        ("there twice under different wrappers", [shown(key) for key in doubled]),
    ):
        if keys:
            rest = f", and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
            lines.append(f"  {len(keys)} {kind}: {', '.join(keys[:SHOWN_KEYS])}{rest}")
    lines.extend(f"  hint: {hint}" for hint in hints())
    raise WeightKeysError(
        "\n".join(lines),
        unknown=tuple(unknown),
        missing=tuple(missing),
        misshapen=tuple(misshapen),
        doubled=tuple(doubled),
    )


def dims_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Read the model's dimensions off a set of Wan-named shapes, as far as the keys are there.

    Parameters
    ----------
    shapes : Mapping[str, tuple[int, ...]]
        Wan key to stored shape.

    Returns
    -------
    dict[str, int]
        Field of `ModelConfig` to value. Heads and text tokens leave no trace in the shapes.
    """
    dims: dict[str, int] = {}
    for field, name, axis in (
        ("dim", "patch_embedding.weight", 0),
        ("in_channels", "patch_embedding.weight", 1),
        ("ffn_dim", "blocks.0.ffn.0.weight", 0),
        ("text_dim", "text_embedding.0.weight", 1),
        ("freq_dim", "time_embedding.0.weight", 1),
    ):
        if len(shapes.get(name, ())) > axis:
            dims[field] = shapes[name][axis]
    layers = [layer for layer in map(layer_of, shapes) if layer is not None]
    if layers:
        dims["layers"] = 1 + max(layers)
    return dims


def _format_name(opened: OpenedFiles) -> str:
    if opened.container == "pt":
        return "self-forcing"
    signs = ("condition_embedder.", ".attn1.", "scale_shift_table")
    return "diffusers" if any(sign in source.key for source in opened.sources for sign in signs) else "wan"


def _translated(key: str, translate: Callable[[str], str]) -> str | None:
    try:
        return translate(key)
    except KeyError:
        return None


def _hints(opened: OpenedFiles, translate: Callable[[str], str], config: ModelConfig) -> list[str]:
    keys = [source.key for source in opened.sources]
    hints = [hint for parts, hint in TELLTALES if any(part in key for part in parts for key in keys)]
    landmark = "patch_embedding.weight"
    prefixes = {key.removesuffix(landmark) for key in keys if key.endswith(landmark)} - {""}
    if prefixes:
        hints.append(f"the keys carry the prefix {shown(min(prefixes))!r}; save them without it")

    shapes = {
        name: source.shape
        for source in opened.sources
        if (name := _translated(source.key, translate)) is not None
    }
    found = dims_of(shapes)
    wanted = dims_of(wan_shapes(config))
    differing = [field for field in wanted if field in found and found[field] != wanted[field]]
    if differing:
        sizes = ", ".join(f"{field} {found[field]} (expected {wanted[field]})" for field in differing)
        from seko_export.families.registry import (
            presets,  # families read checkpoints: not the other way round
        )

        named = [name for name, preset in presets().items() if dims_of(wan_shapes(preset.model)) == found]
        known = f": the dimensions of --preset {named[0]}" if named else ""
        hints.append(f"the file's model has {sizes}{known}")
    return hints


def _vae_hints(opened: OpenedFiles, translate: Callable[[str], str], config: VaeConfig) -> list[str]:
    shapes = {_translated(source.key, translate): source.shape for source in opened.sources}
    # Where each half has base_dim channels, at the first level: what goes into the last conv, out of the first.
    for name, axis in (("decoder.head.2.weight", 1), ("encoder.conv1.weight", 0)):
        if len(shapes.get(name, ())) > axis:
            base_dim = (
                shapes[name][axis] // config.dim_mult[0] if name.startswith("decoder") else shapes[name][axis]
            )
            if base_dim != config.base_dim:
                presets = [name for name, preset in VAE_PRESETS.items() if preset.base_dim == base_dim]
                known = f": the VAE {presets[0]!r}" if presets else ""
                return [f"the file's VAE has base_dim {base_dim} (expected {config.base_dim}){known}"]
    return []
