"""Resolving of command-line options to the configuration of a video build. Contradictions between options are refused,
with the names of the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from seko_export.backends import export_backend
from seko_export.backends.base import check_capabilities
from seko_export.checkpoints.errors import NotACheckpointError, naming_option
from seko_export.checkpoints.sources import LoadOptions
from seko_export.config.attention import ATTENTIONS, BF16, FP8, TORCH
from seko_export.config.media import ClipConfig, HubertConfig, TextEncoderConfig, VaeConfig
from seko_export.config.model import ModelConfig
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.kernel_table import attention_tiles, bf16_is_faster
from seko_export.errors import UsageError
from seko_export.families.registry import presets as all_presets
from seko_export.families.registry import video_family_of
from seko_export.families.video import Preset
from seko_export.host.environment import Target, archs_elsewhere, has_fp8, resolve_target
from seko_export.media.clip.files import clip_config_of
from seko_export.media.hubert.files import hubert_config_of
from seko_export.media.sources import MediaSources
from seko_export.media.umt5.dimensions import text_config_of
from seko_export.media.vaes import vae_config_of, vae_of, vae_of_kind
from seko_export.media.viewer import VIEWER_FILE, read_viewer
from seko_export.options.build_files import find_tokenizer
from seko_export.options.checks import (
    SAMPLE_FOLDER,
    check_no_goldens,
    check_sink,
    check_video_options,
    preset_of,
    with_sample,
)
from seko_export.options.declaration import KV_FORMATS, RANDOM, SAMPLE, BuildOptions
from seko_export.options.model import (
    ChosenModel,
    preset_model,
    read_model,
    with_aspect,
    with_model_options,
    with_run_config,
)
from seko_export.options.model_folder import with_model_folder, with_pipeline, with_variant
from seko_export.options.passes import asked_schedule
from seko_export.options.resolved import ResolvedBuild
from seko_export.options.sample import Sample, read_sample
from seko_kernels.errors import KernelsError, KvSchemeError
from seko_kernels.kv_schemes import KvScheme
from seko_kernels.tuned_conv import has_fp8_convolutions

_Config = TypeVar("_Config")
EXACT = KV_FORMATS[0]  # as options spell the exact scheme of any device


def resolve_build(
    options: BuildOptions, *, machine: Target | None = None, sample_folder: Path = SAMPLE_FOLDER
) -> ResolvedBuild[VideoBuild]:
    """Return the configuration and input files of a video build; see `ExportWorkload.resolve_options`.
    ``sample_folder`` is that of the preset ``sample``."""
    named = options.checkpoint or options.model_folder
    options, sample_folder = with_sample(options, sample_folder)
    check_video_options(options, sample_folder=sample_folder)
    named_image_encoder, named_text_encoder = options.image_encoder, options.text_encoder
    options, notes_of_folder = with_model_folder(with_pipeline(options))
    options = with_variant(options)
    preset = options.preset
    if preset is None and options.checkpoint is None:
        preset = preset_of(options, sample_folder)
    wanted = _kv_scheme("fp4" if options.fp4_kv else options.kv or EXACT)
    backend = export_backend(options.backend)
    machine = machine or resolve_target(options.target, backend.capabilities.cross_targets)
    sample = read_sample(sample_folder) if preset == SAMPLE else None
    known = all_presets()
    chosen = _chosen_model(options, preset, sample, known)
    notes = list(notes_of_folder)
    if named_image_encoder is None and options.image_encoder and chosen.model.picture_features is None:
        notes.append(f"{options.image_encoder.name} is not used: {chosen.model.name} has no picture branch")
        options = replace(options, image_encoder=None)
    if named_text_encoder is None and options.text_encoder and not chosen.model.takes_text:
        notes.append(f"{options.text_encoder.name} is not used: {chosen.model.name} takes no text")
        options = replace(options, text_encoder=None, tokenizer=None)
    media = _media(options, sample, chosen.model, machine)
    viewer_file = options.viewer or _viewer_of(sample.folder if sample else named)
    media = replace(media, files=replace(media.files, viewer=viewer_file))
    config = _with_kernels(_video_build(options, chosen, media, wanted, machine), options, machine)
    check_capabilities(backend, config)
    check_no_goldens(options, config.target)
    notes += chosen.notes
    if media.vae is not None and vae_of(media.vae).alternatives(media.vae):
        notes.append(
            f"{media.files.vae} is taken as a {media.vae.title}; if it is another one, say so with --vae-kind"
        )
    if options.no_goldens:
        notes += _notes_without_goldens(config, options)
    chosen_preset = known.get(preset or chosen.model.name)
    if chosen_preset is not None and chosen_preset.missing:
        raise UsageError(
            f"{chosen.model.name} is not built yet: it needs {chosen_preset.missing}; `seko-export presets` "
            "lists the others"
        )
    load_options = LoadOptions(
        entry=options.entry,
        first_entry=None if chosen_preset is None else chosen_preset.entry,
        companion=options.audio_adapter,
        loras=options.lora_files,
        lora_partial=options.lora_partial,
    )
    weights = sample.checkpoint if sample and options.checkpoint is None else options.checkpoint
    if weights is None and options.entry is not None:
        raise UsageError(f"--entry {options.entry}: random weights have no entries; leave it out")
    return ResolvedBuild(config, weights, media.files, tuple(notes), load_options)


def _chosen_model(
    options: BuildOptions, preset: str | None, sample: Sample | None, known: Mapping[str, Preset]
) -> ChosenModel:
    """Return the model, stream and passes of a build: those of the preset, or without one those that the checkpoint
    states, changed by the options."""
    if preset is None and options.checkpoint is not None:
        chosen = read_model(options, options.checkpoint, known)
    else:
        named = sample.preset if sample else known[preset or RANDOM]
        chosen = preset_model(preset or RANDOM, named, options)
    chosen = with_run_config(chosen, options)
    chosen = with_model_options(chosen, options)
    chosen = with_aspect(chosen, options.aspect)
    check_sink(chosen.stream)
    return chosen


def _video_build(
    options: BuildOptions, chosen: ChosenModel, media: _Media, wanted: KvScheme, machine: Target
) -> VideoBuild:
    """Return the configuration of a build with plain kernels; refuse layouts, ranks and caches that the model cannot
    have."""
    device, can = machine.device, export_backend(options.backend).capabilities
    target = TargetConfig(
        device,
        archs=archs_elsewhere(machine, can.cross_targets),
        ranks=options.ranks,
        convolutions=machine.arch if can.convolutions and device == "cuda" else "",
        offload_text=options.offload_text,
        offload_layers=options.offload_layers,
        decode_frames=options.decode_frames or 0,
    )
    keys, values = (target.exact_scheme if name == EXACT else name for name in (wanted.keys, wanted.values))
    schedule = asked_schedule(options, chosen.schedule or Schedule.warped())
    apart = schedule.first_timesteps or chosen.model.front_tokens
    if apart and options.pool is None and chosen.stream.batch > 1:
        raise UsageError(
            f"--batch {chosen.stream.batch}: the first chunk has passes of its own, and streams of one call may be at "
            "different chunks, which only a pool runs apart; give --sessions, too"
        )
    config = VideoBuild(
        chosen.model,
        VideoConfig(
            chosen.stream,
            schedule,
            str(replace(wanted, keys=keys, values=values)),
            text=media.text,
            vae=media.vae,
            pool=options.pool,
            audio=media.audio,
            image=media.image,
            vae_encoder=media.vae_encoder,
            viewer=None if media.files.viewer is None else read_viewer(media.files.viewer).viewer,
        ),
        target,
    )
    if config.target.ranks > 1 and not video_family_of(config).splits_over_ranks:
        raise UsageError(
            f"--ranks {options.ranks}: models of the family {config.model.family!r} run on one GPU so far; leave it out"
        )
    if config.workload.stream.strength is not None and not video_family_of(config).takes_video:
        raise UsageError(
            f"--strength {config.workload.stream.strength}: chunks of {config.model.name!r} start from noise and from "
            "what the model takes itself; an input video is for text-to-video models of Wan's layout; leave it out"
        )
    try:
        _ = config.kv
    except KernelsError as error:
        raise UsageError(f"--kv {config.workload.kv_scheme}: {error}") from None
    return config


def _with_kernels(config: VideoBuild, options: BuildOptions, machine: Target) -> VideoBuild:
    """Return the build with the kernels, fp8 and attention of its options; refuse fp8 on a GPU that has none."""
    config = config.changed(
        fused=_fused(config, options), fp8=options.fp8, fp8_except=options.fp8_except or ()
    )
    config = config.changed(
        attention=_attention(config, options.attention, machine),
        resident_window=options.resident_window,
        past_share=1.0 if options.past_share is None else options.past_share,
    )
    in_fp8 = config.target.fp8 or config.target.attention_kind.fp8_numbers
    if config.target.device == "cuda" and in_fp8 and not has_fp8(machine):
        option = "--fp8" if config.target.fp8 else f"--attention {config.target.attention}"
        raise UsageError(f"{option}: this GPU has no fp8 numbers, which need sm_89 or newer; leave it out")
    return config


def _notes_without_goldens(config: VideoBuild, options: BuildOptions) -> list[str]:
    """Return a sentence on the scales of a build with --no-goldens; refuse the option where scales are calibrated on
    goldens."""
    if config.lossless:
        return []
    if options.random_weights is None:
        raise UsageError(
            f"--no-goldens: the scales of --kv {config.workload.kv_scheme} are calibrated on the recorded chunks; "
            "give --kv bf16, leave it out, or take --random-weights, whose video is noise anyway"
        )
    return [f"the scales of --kv {config.workload.kv_scheme} are not calibrated: the weights are random"]


def _with_fp8(vae: VaeConfig | None, machine: Target, ranks: int) -> VaeConfig:
    """Return the VAE with fp8 convolutions in its decoder; refuse --vae-fp8 where nothing would be computed in fp8."""
    if vae is None or (in_fp8 := vae.with_fp8()) is None:
        what = "this build has no VAE" if vae is None else f"a {vae.title} has none"
        raise UsageError(
            f"--vae-fp8 is for the convolutions of a Wan VAE's decoder, and {what}: leave it out"
        )
    if ranks > 1:
        raise UsageError(
            f"--vae-fp8 contradicts --ranks {ranks}: ranks that share a picture convolve in "
            "the compute dtype; leave one of them out"
        )
    if not has_fp8_convolutions(machine.arch, in_fp8.fp8_channels):
        raise UsageError(
            f"--vae-fp8: no fp8 convolution of a {vae.title} was measured on {machine.arch}, so "
            "none would be used; leave it out, or measure (python -m scripts.bench vae_kernels)"
        )
    return in_fp8


def _kv_scheme(text: str) -> KvScheme:
    """Return the KV scheme that ``--kv`` names; refuse an exact sink of an exact cache."""
    try:
        return KvScheme.parse(text)
    except KvSchemeError as error:
        raise UsageError(f"--kv {text}: {error}") from None


def _fused(config: VideoBuild, options: BuildOptions) -> bool:
    """Return whether a build's layers use fused kernels. The backend checks whether it supports them.

    By default layers are fused where such layers were measured: not over several ranks, nor where no engine of the
    backend has run, unless the attention needs fused layers.
    """
    if options.kernels == "auto":
        can = export_backend(options.backend).capabilities
        attention = ATTENTIONS.get(options.attention)
        wanted = not can.unmeasured or (attention is not None and attention.own_kernel)
        plain = config.target.device != "cuda" or config.target.ranks > 1 or config.workload.stream.rolling
        return not plain and can.fused_kernels and wanted
    return options.kernels == "fused"


def _attention(config: VideoBuild, requested: str, machine: Target) -> str:
    """Return the attention of a build; by default the attention that was measured fastest on such a GPU (docs/adr/0006,
    0013).
    """
    kind = ATTENTIONS.get(requested)
    if kind is not None and machine.device == "cuda" and kind.arch not in (None, machine.arch):
        raise UsageError(
            f"--attention {requested}: its kernel is for {kind.arch}, this GPU is {machine.arch}; "
            "take --attention torch"
        )
    if kind is not None:
        return requested
    if config.target.device != "cuda":
        return TORCH.name
    if config.no_attention(FP8) is None and all(
        tile["measured"] for tile in attention_tiles(config, machine)
    ):
        return FP8.name
    faster = config.no_attention(BF16) is None and bf16_is_faster(config, machine)
    return BF16.name if faster else TORCH.name


@dataclass(frozen=True)
class _Media:
    """The files of VAE and encoders, and the config of each model."""

    files: MediaSources
    vae: VaeConfig | None
    text: TextEncoderConfig | None
    audio: HubertConfig | None
    image: ClipConfig | None
    vae_encoder: VaeConfig | None


def _media(options: BuildOptions, sample: Sample | None, model: ModelConfig, machine: Target) -> _Media:
    """Return the VAE and the encoders of text, audio and picture: those that the user named; otherwise the sample's.
    Refuse a VAE or an encoder that does not fit the model.
    """
    own = sample.media if sample else MediaSources()
    vae_file, vae = (None, None) if options.no_vae or sample is None else (own.vae, sample.vae)
    text_file, text = (None, None) if options.no_text or sample is None else (own.text_encoder, sample.text)
    tokenizer = None if text_file is None else own.tokenizer
    if options.vae is not None:
        vae_file, vae = options.vae, _read(vae_config_of, options.vae, "--vae")
        if vae is not None and options.vae_kind is not None:
            vae = vae_of_kind(vae, options.vae_kind, options.vae)
    if options.text_encoder is not None:
        text_file, text = options.text_encoder, _read(text_config_of, options.text_encoder, "--text-encoder")
        tokenizer = find_tokenizer(options.text_encoder, options.tokenizer)
    audio = _read(hubert_config_of, options.audio_encoder, "--audio-encoder")
    image = _read(clip_config_of, options.image_encoder, "--image-encoder")
    if options.vae_fp8:
        vae = _with_fp8(vae, machine, options.ranks)
    vae_encoder = _read(vae_config_of, options.vae_encoder, "--vae-encoder")
    if options.vae is not None:
        _check_latents(vae, options.vae, "--vae", model)
    if vae_encoder is not None and not vae_encoder.encodes:
        raise NotACheckpointError(
            f"--vae-encoder {options.vae_encoder}: a {vae_encoder.title} encodes no pictures; give a whole VAE"
        )
    _check_latents(vae_encoder, options.vae_encoder, "--vae-encoder", model)
    features = model.picture_features
    for option, path, encoder, taken in (
        ("--text-encoder", options.text_encoder, text, model.text_dim or None),
        ("--audio-encoder", options.audio_encoder, audio, model.sound_width),
        ("--image-encoder", options.image_encoder, image, None if features is None else features[1]),
    ):
        if path is not None and encoder is not None and taken is not None and encoder.dim != taken:
            raise NotACheckpointError(
                f"{option} {path} is {encoder.dim} wide, {model.name!r} takes {taken}: they are not of one model; take "
                "this model's encoder"
            )
    files = MediaSources(
        vae_file, text_file, tokenizer, options.audio_encoder, options.image_encoder, options.vae_encoder
    )
    return _Media(files, vae, text, audio, image, vae_encoder)


def _viewer_of(checkpoint: Path | None) -> Path | None:
    """Return the viewer's file in the checkpoint's folder, if there is one."""
    if checkpoint is None:
        return None
    file = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / VIEWER_FILE
    return file if file.is_file() else None


def _check_latents(vae: VaeConfig | None, path: Path | None, option: str, model: ModelConfig) -> None:
    """Refuse a VAE whose latents have another number of channels than the model's."""
    if vae is not None and vae.latent_channels != model.out_channels:
        raise NotACheckpointError(
            f"{option} {path} has {vae.latent_channels} latent channels, {model.name!r} gives "
            f"{model.out_channels}: they are not of one model; take this model's VAE"
        )


def _read(config_of: Callable[[Path], _Config], path: Path | None, option: str) -> _Config | None:
    """Return the facts that a model's files state about it, None without files; the files are at fault if their sizes
    contradict each other."""
    if path is None:
        return None
    with naming_option(option, path):
        try:
            return config_of(path)
        except UsageError as fault:
            raise NotACheckpointError(f"{path} is of a model that cannot be built: {fault}") from fault
