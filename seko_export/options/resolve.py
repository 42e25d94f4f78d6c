"""From command-line options to a build's configuration, with every contradiction refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seko_export.backends import export_backend
from seko_export.checkpoints.dimensions import text_config_of, vae_config_of
from seko_export.config.build import BuildConfig
from seko_export.config.media import TextEncoderConfig, VaeConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import PoolConfig, StreamConfig
from seko_export.engines.kernel_table import attention_tiles, bf16_is_faster
from seko_export.errors import UsageError
from seko_export.families.base import Preset
from seko_export.families.registry import presets as all_presets
from seko_export.host.environment import Target, has_fp8, resolve_target
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
DEFAULT_BUCKETS = (1, 2, 4)  # each costs the build two block engines


@dataclass(frozen=True)
class MediaOptions:
    """What the options say of VAE and text encoder.

    Parameters
    ----------
    vae, text_encoder, tokenizer : Path or None
        ``--vae``, ``--text-encoder``, ``--tokenizer``.
    no_vae, no_text : bool
        ``--no-vae``, ``--no-text``.

    Raises
    ------
    UsageError
        If two of them contradict each other.
    """

    vae: Path | None = None
    text_encoder: Path | None = None
    tokenizer: Path | None = None
    no_vae: bool = False
    no_text: bool = False

    def __post_init__(self) -> None:
        for option, given, refusal, refused in (
            ("--vae", self.vae, "--no-vae", self.no_vae),
            ("--text-encoder", self.text_encoder, "--no-text", self.no_text),
            ("--tokenizer", self.tokenizer, "--no-text", self.no_text),
        ):
            if refused and given is not None:
                raise UsageError(f"{option} {given} contradicts {refusal}: give one of them")


@dataclass(frozen=True)
class RowOptions:
    """What the options say of streams side by side.

    Parameters
    ----------
    batch : str or None
        ``--batch``: one number, or with ``--sessions`` rising ones, with commas.
    sessions : int or None
        ``--sessions``.

    Raises
    ------
    UsageError
        If ``batch`` holds something else than numbers, or several without ``sessions``.
    """

    batch: str | None = None
    sessions: int | None = None

    def __post_init__(self) -> None:
        if self.batch is not None and not all(size.isdecimal() for size in self.batch.split(",")):
            raise UsageError(
                f"--batch {self.batch!r}: expected a number, or with --sessions sizes of calls like 1,2,4"
            )
        if self.sessions is None and len(self._sizes) > 1:
            raise UsageError(
                f"--batch {self.batch}: sizes of calls belong to a pool; give --sessions N beside them"
            )

    @property
    def stream_batch(self) -> int | None:
        """Rows of every call, where there is no pool; None for the preset's."""
        return self._sizes[0] if self._sizes and self.sessions is None else None

    @property
    def pool(self) -> PoolConfig | None:
        """The pool, if there is one."""
        if self.sessions is None:
            return None
        return PoolConfig(
            self.sessions, self._sizes or tuple(b for b in DEFAULT_BUCKETS if b <= self.sessions)
        )

    @property
    def _sizes(self) -> tuple[int, ...]:
        return () if self.batch is None else tuple(map(int, self.batch.split(",")))


@dataclass(frozen=True)
class BuildPlan:
    """What the options mean.

    Parameters
    ----------
    config : BuildConfig
        The build.
    checkpoint : Path or None
        The transformer's weights; None: random ones are to be made.
    media : MediaSources
        The files of all else.
    """

    config: BuildConfig
    checkpoint: Path | None
    media: MediaSources


def plan_build(
    checkpoint: Path | None,
    preset: str | None,
    kv_scheme: str | None,
    fp4_kv: bool,
    target: str,
    layout: Mapping[str, Any],
    media: MediaOptions | None = None,
    sample_folder: Path = SAMPLE_FOLDER,
    device: str | None = None,
    rows: RowOptions | None = None,
    kernels: str = "auto",
    backend: str = "aoti",
    arch: str | None = None,
    fp8: bool = False,
    fp8_except: str | None = None,
    attention: str = "auto",
    resident_window: bool = False,
) -> BuildPlan:
    """Return what the options of `seko-export build` mean.

    Parameters
    ----------
    checkpoint : Path or None
        Where one was named, the preset must be too, because shapes alone do not tell heads.
    preset : str or None
        Name of a preset.
    kv_scheme : str or None
        ``--kv``: as `KvScheme` spells it, ``bf16`` for what is exact on any device.
    fp4_kv : bool
        ``--fp4-kv``.
    target : str
        ``auto``, ``cpu`` or ``sm_NN``.
    layout : mapping of str to int, bool or None
        Fields of `StreamConfig` that replace the preset's where not None.
    media : MediaOptions, optional
        VAE and text encoder. The preset ``sample`` brings its own, all others none.
    sample_folder : Path
        Where the preset ``sample`` lies.
    device : str, optional
        ``cpu`` or ``cuda``, in place of ``target``'s, for a plan of what another machine would do.
    rows : RowOptions, optional
        Batch or pool; without it the batch is the layout's.
    kernels : str
        ``--kernels``: one of `KERNELS`.
    backend : str
        ``--backend``: fused kernels are in AOTInductor's packages alone.
    arch : str, optional
        Beside ``device``: of that machine's GPU, ``sm_NN``.
    fp8 : bool
        ``--fp8``.
    fp8_except : str, optional
        ``--fp8-except``: numbers of layers, with commas.
    attention : str
        ``--attention``: one of `ATTENTIONS`.
    resident_window : bool
        ``--resident-window``.

    Returns
    -------
    BuildPlan

    Raises
    ------
    UsageError
        If a name is unknown or options contradict each other.
    CheckpointError
        If the sample, or a VAE or text encoder that was named, cannot be read.
    MachineError
        If this machine cannot build for the target.
    """
    media, rows = media or MediaOptions(), rows or RowOptions()
    if rows.stream_batch is not None:
        layout = {**layout, "batch": rows.stream_batch}
    known = all_presets()
    names = (SAMPLE, *known)
    if preset is None:
        if checkpoint is not None:
            raise UsageError(f"name the checkpoint's model with --preset: one of {', '.join(names)}")
        preset = SAMPLE if sample_folder.is_dir() else RANDOM
    if preset not in names:
        raise UsageError(f"--preset {preset!r} is not known: expected one of {', '.join(names)}")
    if fp4_kv and kv_scheme not in (None, "fp4"):
        raise UsageError(f"--fp4-kv contradicts --kv {kv_scheme}: give one of them")
    wanted = _kv_scheme("fp4" if fp4_kv else kv_scheme or EXACT)
    machine = resolve_target(target) if device is None else Target(device, arch or "")
    device = machine.device
    sample = read_sample(sample_folder) if preset == SAMPLE else None
    chosen = Preset(sample.model, sample.stream) if sample else known[preset]
    if layout.get("layer_rings") and layout.get("ring_frames") is None:
        layout = {**layout, "ring_frames": max(layout["layer_rings"])}
    stream = replace(chosen.stream, **{name: size for name, size in layout.items() if size is not None})
    _check_sink(stream)
    files, vae, text = _media(media, sample)
    exact = "bf16" if device == "cuda" else "fp32"
    keys, values = (exact if name == EXACT else name for name in (wanted.keys, wanted.values))
    config = BuildConfig(
        chosen.model,
        stream,
        sample.schedule if sample else Schedule.warped(),
        str(replace(wanted, keys=keys, values=values)),
        device,
        text,
        vae,
        rows.pool,
    )
    try:
        _ = config.kv
    except KernelsError as error:
        raise UsageError(f"--kv {config.kv_scheme}: {error}") from None
    fused = _fused(config, kernels, backend)
    config = replace(config, fused=fused, fp8=fp8, fp8_except=_layers(fp8_except))
    config = replace(
        config, attention=_attention(config, attention, machine), resident_window=resident_window
    )
    if config.device == "cuda" and (config.fp8 or config.attention == "fp8") and not has_fp8(machine):
        raise UsageError(
            f"{'--fp8' if config.fp8 else '--attention fp8'}: this GPU has no fp8 numbers, which begin with sm_89; "
            "leave it out"
        )
    return BuildPlan(config, sample.checkpoint if sample and checkpoint is None else checkpoint, files)


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


def build_config(
    has_checkpoint: bool,
    preset: str | None,
    kv_scheme: str | None,
    fp4_kv: bool,
    target: str,
    layout: Mapping[str, Any],
) -> BuildConfig:
    """Return the configuration alone, as `plan_build` makes it, of a build without VAE and text encoder."""
    checkpoint = Path("checkpoint") if has_checkpoint else None
    media = MediaOptions(no_vae=True, no_text=True)
    return plan_build(checkpoint, preset, kv_scheme, fp4_kv, target, layout, media).config


def _layers(text: str | None) -> tuple[int, ...]:
    """Return the numbers of layers that ``--fp8-except`` says."""
    if text is None:
        return ()
    if not all(number.isdecimal() for number in text.split(",")):
        raise UsageError(f"--fp8-except {text!r}: expected numbers of layers, with commas, such as 0,29")
    return tuple(map(int, text.split(",")))


def _fused(config: BuildConfig, kernels: str, backend: str) -> bool:
    """Return whether a build's layers take the fused kernels; refuse the wish where they cannot."""
    if kernels not in KERNELS:
        raise UsageError(f"--kernels {kernels!r} is not known: expected one of {', '.join(KERNELS)}")
    if kernels == "auto":
        return config.device == "cuda" and export_backend(backend).capabilities.fused_kernels
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
    options: MediaOptions, sample: Sample | None
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
