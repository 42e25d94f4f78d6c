"""Resolving of command-line options to the configuration of a speech build."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from seko_export.backends import export_backend
from seko_export.backends.base import check_capabilities
from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.checkpoints.sources import LoadOptions
from seko_export.config.pool import PoolConfig
from seko_export.config.target import TargetConfig
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.speech.config import QUANTISED, SpeechBuild, SpeechConfig, SpeechModel
from seko_export.families.speech.family import speech_families, speech_family_of, speech_presets
from seko_export.host.environment import Target, archs_elsewhere, has_fp8, resolve_target
from seko_export.media.sources import MediaSources
from seko_export.options.build_files import TOKENIZER
from seko_export.options.checks import check_no_goldens
from seko_export.options.declaration import KV_FORMATS, BuildOptions
from seko_export.options.resolved import ResolvedBuild
from seko_export.speech.options import (
    DEFAULT_BUCKETS,
    DEFAULT_POSITIONS,
    DEFAULT_PREFILL,
    DEFAULT_READ_LENGTHS,
    DEFAULT_STEPS,
    SpeechOptions,
)


def resolve_speech(options: BuildOptions, *, machine: Target | None = None) -> ResolvedBuild[SpeechBuild]:
    """Return the configuration and input files of a speech build; see `ExportWorkload.resolve_options`."""
    options = SpeechOptions.of(options)
    folder = options.checkpoint or options.model_folder
    model = (
        speech_presets()[options.preset or ""]
        if folder is None
        else recognised_speech(folder, options.preset)
    )
    backend = export_backend(options.backend)
    cross = backend.capabilities.cross_targets
    machine = machine or resolve_target(options.target, cross)
    tokenizer = _tokenizer(folder, model, options.tokenizer)
    target = TargetConfig(
        machine.device,
        archs=archs_elsewhere(machine, cross),
        ranks=options.ranks,
        fused=_fused(options, machine),
        fp8=options.fp8,
    )
    if target.fp8 and machine.device == "cuda" and not has_fp8(machine):
        raise UsageError("--fp8: this GPU has no fp8 numbers, which need sm_89 or newer; leave it out")
    config = SpeechBuild(model, _sizes(options, model, tokenizer, fused=target.fused), target)
    config = config.changed(kv_scheme=_kv_scheme(options, config))
    check_capabilities(backend, config)
    check_no_goldens(options, config.target)
    notes = () if tokenizer else ("no tokenizer: the artifact takes token ids; name one with --tokenizer",)
    loras = LoadOptions(loras=options.lora_files, lora_partial=options.lora_partial)
    return ResolvedBuild(config, folder, MediaSources(tokenizer=tokenizer), notes, loras)


def _kv_scheme(options: BuildOptions, config: SpeechBuild) -> str:
    """Return the name of the format of a speech build's KV caches."""
    named = "fp4" if options.fp4_kv else options.kv or KV_FORMATS[0]
    if named != KV_FORMATS[0] and named not in QUANTISED:
        raise UsageError(
            f"--kv {named}: caches of speech are {KV_FORMATS[0]}, {' or '.join(QUANTISED)}, keys and values alike"
        )
    return config.exact_scheme if named == KV_FORMATS[0] else named


def _fused(options: BuildOptions, machine: Target) -> bool:
    """Return whether a build's layers use fused kernels: wherever the device supports them, unless the options say
    otherwise."""
    if options.kernels == "auto":
        return machine.device == "cuda" and export_backend(options.backend).capabilities.fused_kernels
    return options.kernels == "fused"


def _sizes(
    options: SpeechOptions, model: SpeechModel, tokenizer: Path | None, *, fused: bool
) -> SpeechConfig:
    positions = min(DEFAULT_POSITIONS, model.longest) if options.positions is None else options.positions
    sessions = max((1, *(options.batch or ()))) if options.sessions is None else options.sessions
    buckets = options.batch or tuple(size for size in DEFAULT_BUCKETS if size <= sessions)
    usual = DEFAULT_READ_LENGTHS[-2:] if fused else DEFAULT_READ_LENGTHS
    lengths = (*(length for length in usual if length < positions), positions)
    prefill = tuple(tokens for tokens in DEFAULT_PREFILL if tokens <= positions) or (positions,)
    return SpeechConfig(
        PoolConfig(sessions, buckets),
        positions,
        options.read_lengths or lengths,
        options.prefill or prefill,
        DEFAULT_STEPS if options.steps is None else options.steps,
        tokenizer=tokenizer is not None,
    )


def recognised_speech(folder: Path, preset: str | None) -> SpeechModel:
    """Return the model of a folder, named after the preset with the same sizes. Raise an error if a preset was
    requested and the model has other sizes than the preset.
    """
    recognised = (family.recognise(folder) for family in speech_families().values())
    model = next((model for model in recognised if model is not None), None)
    if model is None:  # its config.json said so before
        raise NotACheckpointError(f"{folder} holds no speech model of a known family")
    known = speech_presets()
    if preset is None:
        same = (name for name, other in known.items() if replace(model, name=name) == other)
        return replace(model, name=next(same, model.name))
    pairs = (
        (field.name, getattr(model, field.name), getattr(known[preset], field.name))
        for field in fields(model)
        if field.name != "name"
    )
    odd = [
        f"{name} is {ours} by config.json, {its} by the preset" for name, ours, its in pairs if ours != its
    ]
    if odd:
        raise CheckpointError(f"{folder} contradicts --preset {preset}: {'; '.join(odd)}; leave --preset out")
    return known[preset]


def _tokenizer(folder: Path | None, model: SpeechModel, named: Path | None) -> Path | None:
    """Return the tokenizer's file: the file that the user named; otherwise the model's. None for random weights."""
    if named is not None:
        file = next((file for file in (named, named / TOKENIZER) if file.is_file()), None)
        if file is None:
            raise CheckpointNotFoundError(f"--tokenizer {named} holds no {TOKENIZER}")
        return file
    return None if folder is None else speech_family_of(model).tokenizer(folder)
