"""Checks of a build's options that need no torch, so that a typo is reported within a second. The module `resolve`
makes the checks that need torch.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from seko_export.backends import BACKENDS
from seko_export.checkpoints.errors import check_exists
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.errors import UsageError
from seko_export.families.registry import all_presets, presets
from seko_export.media.layouts import CLIP_LAYOUT, HUBERT_LAYOUT, TEXT_LAYOUT
from seko_export.media.vaes import vae_files
from seko_export.options.asked import check_workload, config_in, workload_asked
from seko_export.options.declaration import (
    ATTENTIONS,
    KERNELS,
    KV_FORMATS,
    RANDOM,
    SAMPLE,
    BuildOptions,
    declared,
)
from seko_runtime.format.whole_files import check_alone, check_folder_place, check_writable

SAMPLE_FOLDER = Path(__file__).parents[1] / "sample"
TARGET = re.compile(r"auto|cpu|sm_\d{2,3}(?:,sm_\d{2,3})*")


def check_options(options: BuildOptions) -> None:
    """Refuse unknown names, options of other models, and whatever else the model's workload can refuse without a
    checkpoint.

    Raises
    ------
    UsageError
        If an option is invalid.
    """
    workload = workload_asked(options)
    for field, option in declared(type(options)):
        if getattr(options, field.name) != field.default:
            check_workload(field.name, option, workload)
    workload.check_options(options)


def check_video_options(options: BuildOptions, *, sample_folder: Path = SAMPLE_FOLDER) -> None:
    """Refuse unknown names and impossible layouts of a video build, as far as they can be found without a checkpoint.

    Raises
    ------
    UsageError
        If an option is invalid.
    """
    options, sample_folder = with_sample(options, sample_folder)
    kv = "|".join(map(re.escape, KV_FORMATS))
    if options.kv is not None and not re.fullmatch(rf"(?:{kv})(?:-(?:{kv}))?(?:-sink)?", options.kv):
        raise UsageError(
            f"--kv {options.kv!r} is not known: expected one of {', '.join(KV_FORMATS)}, or KEYS-VALUES of them as "
            "int8-fp4; with -sink behind it the sink stays exact"
        )
    known = presets()
    check_names(options)
    nameless = options.checkpoint is None and options.model_folder is None
    if options.tokenizer is not None and options.text_encoder is None:
        raise UsageError(
            f"--tokenizer {options.tokenizer} belongs to a text encoder: name that with --text-encoder"
        )
    _ = options.pool  # checks itself
    preset = preset_of(options, sample_folder)
    stream = known[preset].stream if preset in known else _sample_stream(sample_folder)
    if stream is not None and (options.preset is not None or nameless):
        check_sink(replace(stream, **options.layout))


def check_no_goldens(options: BuildOptions, target: TargetConfig) -> None:
    """Refuse --no-goldens for a build that runs on this machine."""
    if options.no_goldens and not target.archs:
        raise UsageError(
            "--no-goldens is only for GPUs that are not here, as goldens verify a build for this machine: leave it out"
        )


def check_names(options: BuildOptions) -> None:
    """Refuse names of presets, kernels, backends and targets that are not known."""
    for option, name, names in (
        ("--preset", options.preset, (SAMPLE, *all_presets())),
        ("--kernels", options.kernels, KERNELS),
        ("--attention", options.attention, ATTENTIONS),
        ("--backend", options.backend, BACKENDS.names()),
    ):
        if name is not None and name not in names:
            raise UsageError(f"{option} {name!r} is not known: expected one of {', '.join(names)}")
    if not TARGET.fullmatch(options.target):
        raise UsageError(
            f"--target {options.target!r} is not known: expected auto, cpu or sm_NN such as sm_90"
        )


def check_build(options: BuildOptions, output_path: Path, *, force: bool) -> None:
    """Refuse a build with invalid options, missing files or an unusable output folder. The content of files is not read
    by these checks.

    Parameters
    ----------
    options : BuildOptions
        The options of `seko-export build`.
    output_path : Path
        Folder of the new artifact.
    force : bool
        Whether to replace an artifact that is already there.

    Raises
    ------
    UsageError
        If options contradict each other, a large preset has no checkpoint, or the output path exists or is being made.
    CheckpointNotFoundError
        If a named file does not exist.
    DiskError
        If the output path cannot be written.
    """
    check_options(options)
    nameless = options.random_weights is None and options.checkpoint is None and options.model_folder is None
    if nameless and options.preset not in (None, SAMPLE, RANDOM):
        raise UsageError(
            f"--preset {options.preset} says how large the model is and has no weights: name a checkpoint, or give "
            f"--random-weights 0 for a test of speed and memory, whose output is noise; {SAMPLE} and {RANDOM} are "
            "built without one"
        )
    check_files(options)
    check_folder_place(output_path, replace=force)
    check_alone(output_path)
    check_writable(output_path)


def check_files(options: BuildOptions) -> None:
    """Refuse options that name a file that does not exist.

    Raises
    ------
    CheckpointNotFoundError
        If a named file does not exist.
    """
    for what, path, expected in (
        ("checkpoint", options.checkpoint, "one, or of a folder that holds one"),
        ("--model-folder", options.model_folder, "a folder that holds all files of a model"),
        ("--run-config", options.run_config, "the JSON by which the model's own code runs it"),
        ("--vae", options.vae, vae_files()),
        ("--vae-encoder", options.vae_encoder, vae_files(but=("taehv",))),
        ("--text-encoder", options.text_encoder, TEXT_LAYOUT.formats),
        ("--audio-adapter", options.audio_adapter, "an audio adapter"),
        ("--audio-encoder", options.audio_encoder, HUBERT_LAYOUT.formats),
        ("--image-encoder", options.image_encoder, CLIP_LAYOUT.formats),
        ("--tokenizer", options.tokenizer, "a tokenizer.json, or of its folder"),
        ("--viewer", options.viewer, "a JSON file with help, prompts and pictures"),
        *(("--lora", lora.path, "a LoRA: FILE or FILE:WEIGHT") for lora in options.lora_files),
    ):
        if path is not None:
            known = what == "checkpoint" and str(path) in (SAMPLE, *all_presets())
            hint = f"; the model of that name is --preset {path}" if known else ""
            check_exists(f"{what} {path}", path, f"give the path of {expected}{hint}")


def preset_of(options: BuildOptions, sample_folder: Path = SAMPLE_FOLDER) -> str:
    """Return the preset of a build: the preset that the user named; otherwise the sample, if it is installed."""
    return options.preset or (SAMPLE if sample_folder.is_dir() else RANDOM)


def with_sample(options: BuildOptions, sample_folder: Path = SAMPLE_FOLDER) -> tuple[BuildOptions, Path]:
    """Return the options, and the folder of the sample model if the build is of a sample. A checkpoint or model folder
    in a sample's layout counts as a sample.
    """
    folder = options.checkpoint or options.model_folder
    if folder is None or options.preset not in (None, SAMPLE) or not is_sample(folder):
        return options, sample_folder
    return replace(options, checkpoint=None, model_folder=None, preset=SAMPLE), folder


def is_sample(folder: Path) -> bool:
    """Return whether a folder has a sample's layout: a whole model, whose config.json also describes VAE and text
    encoder.
    """
    return {"format_version", "model", "stream"} <= set(config_in(folder))


def check_sink(stream: StreamConfig) -> None:
    """Refuse a sink that is larger than the ring. Such a sink is likely a mistake: the user passed the size of Wan's
    window, which includes the sink, as the ring."""
    if stream.sink_frames > stream.ring_frames:
        raise UsageError(
            f"--sink-frames {stream.sink_frames} is larger than --ring-frames {stream.ring_frames}: the ring stands "
            f"behind the sink, so the cache would hold {stream.cache_frames} latent frames and keep most of them "
            "for ever; for a window of N frames that includes the sink (Wan's local_attn_size) give --ring-frames "
            "N minus the sink"
        )


def _sample_stream(folder: Path) -> StreamConfig | None:
    """Return the sample's layout; None if its config.json cannot be read, which the build will report."""
    try:
        return StreamConfig(**config_in(folder)["stream"])
    except (KeyError, TypeError):
        return None
