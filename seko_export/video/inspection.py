"""Report of `seko-export inspect` on files of video models: family, dimensions with their sources, build command."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from seko_export.checkpoints.errors import AmbiguousCheckpointError, NotACheckpointError
from seko_export.checkpoints.json_files import CONFIG_FILE
from seko_export.checkpoints.keycheck import match_sources
from seko_export.checkpoints.load import entry_notes
from seko_export.checkpoints.lora import fits
from seko_export.checkpoints.lora_files import Role, holds_lora, open_lora
from seko_export.checkpoints.readers import open_files
from seko_export.config.model import ModelConfig
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.recognition import CHOSEN, Fact
from seko_export.families.registry import (
    family_named,
    presets,
)
from seko_export.families.video import Preset
from seko_export.media.layouts import TEXT_LAYOUT
from seko_export.media.vaes import vae_config_of, vae_for, vae_of, vaes
from seko_export.options.checks import SAMPLE_FOLDER, is_sample
from seko_export.options.declaration import SAMPLE, BuildOptions
from seko_export.options.model import HEADS, ReadFacts, lacking_sentence, model_of, notes_on, read_facts
from seko_export.options.model_folder import find_files
from seko_export.options.sample import read_sample

CHOICE = "NAME"  # in place of the preset that the user must choose; no preset has this name
_MODELS = "models"  # subfolder of repositories with a .pt


def inspect_checkpoint(path: Path, gpu: str | None = None) -> dict[str, Any]:
    """Return the report on a checkpoint, a LoRA or a VAE. Keys and shapes are checked; no weight is read.

    Parameters
    ----------
    path : Path
        Path of a checkpoint, as `load_checkpoint` takes it, of a folder with all files of a model, of a LoRA, or of the
        file or folder of a VAE.
    gpu : str, optional
        Name of a GPU in `roofline.gpus.GPUS`.

    Returns
    -------
    dict
        The report as plain data. The entries ``checkpoint`` (name of the checkpoint), ``family``, ``format``, ``part``,
        ``bytes``, ``parameters`` and ``dtypes`` (number of tensors of each) describe the file. ``model`` and ``stream``
        have ``value`` and ``from`` of each field. ``preset`` is a preset with the dimensions of the checkpoint, or
        None, and ``presets`` are all presets with these dimensions. ``candidates`` are the presets between which the
        user must choose. ``beside`` has further files of a folder, by option. ``needs`` are the parts of the model that
        no option of ``command`` names. ``gpu`` has the bytes on the GPU, if a GPU is named. ``notes`` are sentences.
        ``command`` builds the checkpoint; it is None if the model cannot be built yet, and it has ``--preset NAME``
        where the user must choose a preset.

    Raises
    ------
    CheckpointError
        If the checkpoint cannot be read, belongs to no known family, contradicts its config.json, or has other keys
        than its model.
    UsageError
        If a GPU is named for a LoRA or a VAE.
    """
    part = _lora_of(path) or _vae_of(path)
    if part is not None:
        if gpu is not None:
            raise UsageError(
                f"--gpu {gpu} is for checkpoints, whose builds it weighs; {path} is a part of one: leave it out"
            )
        return part
    companions: dict[str, Path] = {}
    home, adapter = path, None
    odd: list[str] = []
    several: AmbiguousCheckpointError | None = None
    if path.is_dir():
        try:
            folder = find_files(path)
            if folder.checkpoint is None and (path / _MODELS).is_dir():
                path = path / _MODELS
                folder = find_files(path)
        except AmbiguousCheckpointError as fault:
            several = fault
            odd.append(str(fault))
        else:
            path, companions, adapter = folder.checkpoint or path, folder.companions, folder.audio_adapter
            odd += folder.notes
    options, known = BuildOptions(path, audio_adapter=adapter), presets()
    try:
        facts = read_facts(options, path, known)
    except AmbiguousCheckpointError as fault:
        raise several or fault from None  # which files are of one kind, if a kind is known
    recognised, keys = facts.recognised, family_named(facts.recognised.family).keys
    opened, entry = facts.file.opened, None if facts.preset is None else facts.preset.entry
    if entry in opened.other_parts:  # a build reads the entry that the preset's authors run
        opened = open_files(path, keys.layout(None, entry), adapter)
    whole = is_sample(home)  # its config.json states everything, with the files of VAE and encoders
    notes, preset = [*(() if whole else notes_on(path, facts)), *entry_notes(path, opened), *odd], None
    if recognised.lacking:
        notes.append(f"{path} {lacking_sentence(recognised)}; its keys were not compared")
    else:
        model = model_of(path, facts)
        preset = _preset_of(model, facts.name, known)
        match_sources(path, opened, model, keys)
    missing = "" if facts.preset is None else facts.preset.missing
    if missing:
        notes.append(f"{facts.name} is not built yet: it needs {missing}")
    candidates = () if whole or preset == SAMPLE else facts.candidates
    command = _sample_command(home) if whole else _command(path, facts, preset, companions)
    report: dict[str, Any] = {
        "checkpoint": path.name or path.resolve().name,
        "family": recognised.family,
        "format": recognised.format,
        "part": opened.part,
        "bytes": opened.file_bytes,
        "parameters": sum(math.prod(source.shape) for source in opened.sources),
        "dtypes": dict(Counter(source.dtype_name for source in opened.sources)),
        "model": _shown(recognised.model),
        "stream": _shown(recognised.stream),
        "preset": preset,
        "presets": list(facts.alike),
        "candidates": list(candidates),
        "beside": {option: str(file) for option, file in companions.items()},
        "needs": [] if whole else _needs(facts, command, preset),
        "notes": notes,
        "command": None if missing else command,
    }
    if gpu is not None and not missing and not recognised.lacking:
        report["gpu"] = _bytes_on(gpu, BuildOptions(path, audio_adapter=adapter, **_media_of(companions)))
    return report


def _lora_of(path: Path) -> dict[str, Any] | None:
    """Return the report on a LoRA, or None if a path holds no LoRA; raises the error of a LoRA that is refused."""
    try:
        lora = open_lora(path)
    except CheckpointError:
        if holds_lora(path):
            raise
        return None
    downs = [
        tensors[Role.DOWN].shape
        for tensors in lora.modules.values()
        if Role.DOWN in tensors and len(tensors[Role.DOWN].shape) > 1
    ]
    widths = Counter(shape[1] for shape in downs)
    width = widths.most_common(1)[0][0] if widths else None
    return {
        "lora": path.name or path.resolve().name,
        "modules": len(lora.modules),
        "tensors": dict(Counter(str(role) for tensors in lora.modules.values() for role in tensors)),
        "ranks": sorted({shape[0] for shape in downs}),
        "alpha": "its keys"
        if any(Role.ALPHA in tensors for tensors in lora.modules.values())
        else lora.config.origin or "none: the scale is 1",
        "width": width,
        "presets": [
            name
            for name, preset in presets().items()
            if fits(lora, preset.model, family_named(preset.model.family).keys)
        ],
        "sha256": lora.sha256,
        "command": shlex.join(
            ["seko-export", "build", "CHECKPOINT", "--lora", str(path), "-o", "artifacts/merged"]
        ),
    }


def _vae_of(path: Path) -> dict[str, Any] | None:
    """Return the report on a VAE or a tiny decoder, or None if a path holds another model."""
    from seko_export.media.load import load_vae

    if path.is_dir() and not (path / CONFIG_FILE).is_file():
        return None
    try:
        config = vae_config_of(path)
    except CheckpointError:
        return None
    except UsageError as fault:
        raise NotACheckpointError(f"{path} is a VAE that cannot be built: {fault}") from fault
    vae, checkpoint = vae_of(config), load_vae(path, config)
    kinds = list(vae.alternatives(config))
    notes = [f"only its name tells {' from '.join(kinds)}: --vae-kind says which it is"] if kinds else []
    return {
        "vae": path.name or path.resolve().name,
        "title": config.title,
        "format": checkpoint.format,
        "bytes": checkpoint.identity["bytes"],
        "parameters": sum(math.prod(source.shape) for source in checkpoint.sources.values()),
        "dtypes": dict(Counter(source.dtype_name for source in checkpoint.sources.values())),
        "latent_channels": config.latent_channels,
        "spatial_stride": config.spatial_stride,
        "temporal_stride": config.temporal_stride,
        "encodes_pictures": config.encodes,
        "presets": [
            name
            for name, preset in presets().items()
            if (preset.model.out_channels, preset.stream.spatial_stride, preset.stream.temporal_stride)
            == (config.latent_channels, config.spatial_stride, config.temporal_stride)
        ],
        "notes": notes,
        "command": shlex.join(
            ["seko-export", "build", "CHECKPOINT", "--vae", str(path), "-o", "artifacts/decoded"]
        ),
    }


def _needs(facts: ReadFacts, command: str, preset: str | None) -> list[str]:
    """Return the parts of the model that a build of whole video needs and that the command does not name."""
    needs = []
    if preset != SAMPLE:
        vae = vae_for(
            facts.recognised.model["out_channels"].value,
            _value(facts.stream, "spatial_stride", 8),
            _value(facts.stream, "temporal_stride", 4),
        )
        if "--vae" not in command:
            what = (
                "the VAE of its latents"
                if vae is None
                else f"a VAE of {vae.latent_channels} channels, such as Wan's"
            )
            needs.append(f"--vae: {what}; without it latents come out")
        if "--text-encoder" not in command and _value(facts.recognised.model, "text_dim", 1):
            needs.append("--text-encoder: UMT5-XXL with its tokenizer.json; without it embeddings go in")
        named = command if facts.preset is None else command + facts.preset.needs
        if _value(facts.recognised.model, "image_dim", 0) and "--image-encoder" not in named:
            needs.append("--image-encoder: CLIP; without it features of the picture go in")
    if facts.preset is not None and facts.preset.needs and "--lora" not in shlex.split(command):
        needs.append(facts.preset.needs)
    return needs


def _value(facts: Mapping[str, Fact], name: str, otherwise: int) -> int:
    return facts[name].value if name in facts else otherwise


def _media_of(companions: Mapping[str, Path]) -> dict[str, Any]:
    return {
        option.removeprefix("--").replace("-", "_"): path
        for option, path in companions.items()
        if option in ("--vae", "--text-encoder", "--tokenizer", "--audio-encoder", "--image-encoder")
    }


def _bytes_on(gpu: str, options: BuildOptions) -> dict[str, Any]:
    """Return the bytes that a build needs on a GPU, with Wan's VAE and UMT5-XXL if no others are named."""
    from seko_export.video.plan.predict import PlanRequest, predict

    plan = predict(PlanRequest(options, gpu))
    return {
        "name": plan["gpu_title"],
        "weight_bytes": sum(plan["weight_bytes"].values()),
        "cache_bytes": plan["session_bytes"]["kv"],
        "peak_bytes": plan["peak_bytes"],
        "memory_bytes": plan["memory_bytes"],
        "fits": plan["fits"],
        "fits_with": [change["options"] for change in plan["would_fit"]],
    }


def _shown(facts: Mapping[str, Fact]) -> dict[str, dict[str, Any]]:
    return {name: {"value": fact.value, "from": fact.origin} for name, fact in facts.items()}


def _preset_of(model: ModelConfig, usual: str, known: Mapping[str, Preset]) -> str | None:
    """Return the preset with these dimensions, including the sample; if several match, the one that a build uses."""
    models = {name: preset.model for name, preset in known.items()}
    if usual in models:
        models = {usual: models.pop(usual), **models}
    if SAMPLE_FOLDER.is_dir():
        models[SAMPLE] = read_sample().model
    chosen = {name: value for name, value in vars(model).items() if name in CHOSEN}
    return next(
        (
            name
            for name, preset_model in models.items()
            if type(preset_model) is type(model) and replace(preset_model, name=model.name, **chosen) == model
        ),
        None,
    )


def _sample_command(folder: Path) -> str:
    """Return the command that builds a sample: its config.json describes its encoders, too."""
    return shlex.join(["seko-export", "build", str(folder), "-o", f"artifacts/{SAMPLE}"])


def _command(path: Path, facts: ReadFacts, preset: str | None, companions: Mapping[str, Path]) -> str:
    """Return the command that builds a checkpoint. It includes ``--heads`` and the answers to questions of its family,
    if the file does not state them, and ``--preset NAME`` if the user must choose a preset.
    """
    words = ["seko-export", "build", str(path)]
    heads = facts.model.get("heads")
    if (heads is None or not heads.is_read) and not facts.candidates:  # presets state their heads
        words += [HEADS, "N" if heads is None else str(heads.value)]
    questions = facts.recognised.questions
    words += [question.usual for name, question in questions.items() if name not in facts.stream]
    if preset == SAMPLE:  # naming this preset also sets its VAE and text encoder
        words += ["--preset", SAMPLE]
    elif facts.candidates:
        words += ["--preset", CHOICE]
    folders = {name: "--vae" for vae in vaes() for name in vae.layout.subfolders}
    folders |= dict.fromkeys(TEXT_LAYOUT.subfolders, "--text-encoder")
    files = {
        option: path / name for name, option in folders.items() if (path / name).is_dir()
    }  # files of a diffusers pipeline
    for option, file in (files | dict(companions)).items():
        words += [option, str(file)]
    if facts.preset is not None and facts.preset.lora and not facts.candidates:
        lora = path.parent / facts.preset.lora
        words += ["--lora", str(lora)] if lora.is_file() else []
    chosen = CHOICE if facts.candidates and preset != SAMPLE else facts.name
    return shlex.join([*words, "-o", f"artifacts/{chosen}"])
