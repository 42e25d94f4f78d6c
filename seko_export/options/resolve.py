"""From command-line options to a build's configuration, with every contradiction refused by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from seko_export.backends import export_backend
from seko_export.backends.base import refuse_uncarried
from seko_export.checkpoints.dimensions import text_config_of, vae_config_of
from seko_export.config.build import BuildConfig
from seko_export.config.media import TextEncoderConfig, VaeConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.engines.kernel_table import attention_tiles, bf16_is_faster
from seko_export.errors import UsageError
from seko_export.families.base import Preset
from seko_export.families.registry import presets as all_presets
from seko_export.host.environment import Target, has_fp8, resolve_target
from seko_export.options.declaration import BuildOptions
from seko_export.options.model import preset_model, read_model
from seko_export.options.sample import SAMPLE_FOLDER, Sample, read_sample
from seko_export.options.sources import MediaSources, find_tokenizer
from seko_kernels import hopper_attention_bf16
from seko_kernels.errors import KernelsError, KvSchemeError
from seko_kernels.formats import NUMBER_FORMATS
from seko_kernels.kv_schemes import KvScheme, scheme_names

SAMPLE, RANDOM = "sample", "tiny"  # what is built where no checkpoint is named: the first, if it is there
EXACT = "bf16"  # as options spell the exact scheme of any device
KERNELS = ("auto", "plain", "fused")  # auto: fused where the GPU, the backend and the model allow it
ATTENTIONS = ("auto", "torch", "bf16", "fp8")


@dataclass(frozen=True)
class ResolvedBuild:
    """What the options of a build mean.

    Parameters
    ----------
    config : BuildConfig
        The build.
    checkpoint : Path or None
        The transformer's weights; None: random ones are to be made.
    media : MediaSources
        The files of all else.
    notes : tuple of str
        Sentences on what the checkpoint does not tell and nobody said.
    """

    config: BuildConfig
    checkpoint: Path | None
    media: MediaSources
    notes: tuple[str, ...] = ()


def resolve_build(
    options: BuildOptions, *, machine: Target | None = None, sample_folder: Path = SAMPLE_FOLDER
) -> ResolvedBuild:
    """Return what the options of a build mean.

    Parameters
    ----------
    options : BuildOptions
        What `seko-export build` takes.
    machine : Target, optional
        In place of what ``--target`` says: for an estimate of what another machine would do.
    sample_folder : Path
        Where the preset ``sample`` lies.

    Raises
    ------
    UsageError
        If a name is unknown or options contradict each other.
    CheckpointError
        If the sample, or a checkpoint, VAE or text encoder that was named, cannot be read or contradicts itself.
    MachineError
        If this machine cannot build for the target.
    """
    preset, checkpoint = options.preset, options.checkpoint
    known = all_presets()
    names = (SAMPLE, *known)
    if preset is None and checkpoint is None:
        preset = SAMPLE if sample_folder.is_dir() else RANDOM
    if preset is not None and preset not in names:
        raise UsageError(f"--preset {preset!r} is not known: expected one of {', '.join(names)}")
    wanted = _kv_scheme("fp4" if options.fp4_kv else options.kv or EXACT)
    machine = machine or resolve_target(options.target)
    device = machine.device
    sample = read_sample(sample_folder) if preset == SAMPLE else None
    if preset is None and checkpoint is not None:
        chosen = read_model(options, checkpoint, known)
    else:
        named = Preset(sample.model, sample.stream) if sample else known[preset or RANDOM]
        chosen = preset_model(preset or RANDOM, named, sample.schedule if sample else None, options)
    _check_sink(chosen.stream)
    files, vae, text = _media(options, sample)
    exact = "bf16" if device == "cuda" else "fp32"
    keys, values = (exact if name == EXACT else name for name in (wanted.keys, wanted.values))
    config = BuildConfig(
        chosen.model,
        chosen.stream,
        chosen.schedule or Schedule.warped(),
        str(replace(wanted, keys=keys, values=values)),
        device,
        text,
        vae,
        options.pool,
    )
    try:
        _ = config.kv
    except KernelsError as error:
        raise UsageError(f"--kv {config.kv_scheme}: {error}") from None
    config = replace(
        config, fused=_fused(config, options), fp8=options.fp8, fp8_except=options.fp8_except or ()
    )
    config = replace(
        config,
        attention=_attention(config, options.attention, machine),
        resident_window=options.resident_window,
    )
    if config.device == "cuda" and (config.fp8 or config.attention == "fp8") and not has_fp8(machine):
        raise UsageError(
            f"{'--fp8' if config.fp8 else '--attention fp8'}: this GPU has no fp8 numbers, which begin with sm_89; "
            "leave it out"
        )
    refuse_uncarried(export_backend(options.backend), config)
    weights = sample.checkpoint if sample and checkpoint is None else checkpoint
    return ResolvedBuild(config, weights, files, chosen.notes)


def _kv_scheme(text: str) -> KvScheme:
    """Return what ``--kv`` says, or refuse it."""
    known, asked = (EXACT, *NUMBER_FORMATS), scheme_names(text)
    if len(asked) > 2 or not {*asked} <= {*known}:
        raise UsageError(
            f"--kv {text!r} is not known: expected one of {', '.join(known)}, or KEYS-VALUES of them as int8-fp4; with "
            "-sink behind it the sink stays exact"
        )
    try:
        return KvScheme.parse(text)
    except KvSchemeError as error:
        raise UsageError(f"--kv {text}: {error}") from None


def _fused(config: BuildConfig, options: BuildOptions) -> bool:
    """Return whether a build's layers take the fused kernels; whether the backend has them is its own to say."""
    kernels = options.kernels
    if kernels not in KERNELS:
        raise UsageError(f"--kernels {kernels!r} is not known: expected one of {', '.join(KERNELS)}")
    if kernels == "auto":
        return config.device == "cuda" and export_backend(options.backend).capabilities.fused_kernels
    return kernels == "fused"


def _attention(config: BuildConfig, wish: str, machine: Target) -> str:
    """Return the attention of a build: unasked the fastest that was measured on such a GPU (docs/adr/0006, 0013)."""
    if wish not in ATTENTIONS:
        raise UsageError(f"--attention {wish!r} is not known: expected one of {', '.join(ATTENTIONS)}")
    if wish == "bf16" and machine.device == "cuda" and machine.arch != hopper_attention_bf16.ARCH:
        raise UsageError(
            f"--attention bf16: its kernel is for {hopper_attention_bf16.ARCH}, this GPU is {machine.arch}; take "
            "--attention torch"
        )
    if wish != "auto":
        return wish
    if config.device != "cuda":
        return "torch"
    if config.no_fp8_attention is None and all(one["measured"] for one in attention_tiles(config, machine)):
        return "fp8"
    return "bf16" if config.no_bf16_attention is None and bf16_is_faster(config, machine) else "torch"


def _media(
    options: BuildOptions, sample: Sample | None
) -> tuple[MediaSources, VaeConfig | None, TextEncoderConfig | None]:
    """Return the files of VAE and text encoder and what they are: those that were named, else the sample's."""
    own = sample.media if sample else MediaSources()
    vae_file, vae = (None, None) if options.no_vae or sample is None else (own.vae, sample.vae)
    text_file, text = (None, None) if options.no_text or sample is None else (own.text_encoder, sample.text)
    tokenizer = None if text_file is None else own.tokenizer
    if options.vae is not None:
        vae_file, vae = options.vae, vae_config_of(options.vae)
    if options.text_encoder is not None:
        text_file, text = options.text_encoder, text_config_of(options.text_encoder)
        tokenizer = find_tokenizer(options.text_encoder, options.tokenizer)
    elif options.tokenizer is not None:
        raise UsageError(
            f"--tokenizer {options.tokenizer} is one of a text encoder: name that with --text-encoder"
        )
    return MediaSources(vae_file, text_file, tokenizer), vae, text


def _check_sink(stream: StreamConfig) -> None:
    """Refuse a sink larger than the ring: a Wan-derived window, which includes the sink, given as a ring."""
    if stream.sink_frames > stream.ring_frames:
        raise UsageError(
            f"--sink-frames {stream.sink_frames} is larger than --ring-frames {stream.ring_frames}: the ring stands "
            f"behind the sink, so the cache would hold {stream.cache_frames} latent frames and keep most of them "
            "for ever; for a window of N frames that includes the sink (Wan's local_attn_size) give --ring-frames "
            "N minus the sink"
        )
