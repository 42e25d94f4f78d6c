"""The options of a build, declared once. The command line, `plan`, the Python API and the table in the docs are made
from the declarations of the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from seko_export.checkpoints.sources import LoraFile
from seko_export.config.attention import ATTENTIONS as BY_NAME
from seko_export.config.pool import PoolConfig, with_commas
from seko_export.config.schedule import SAMPLERS
from seko_export.config.stream import StreamConfig
from seko_export.errors import UsageError
from seko_export.media.vaes import vae_files

SAMPLE, RANDOM = "sample", "tiny"  # what is built where no checkpoint is named: the first, if it is there
KV_FORMATS = (
    "bf16",
    "fp8",
    "int8",
    "int4",
    "int4-hadamard",
    "fp4",
)  # the first is the exact cache of any device
KERNELS = ("auto", "plain", "fused")  # auto: fused where the GPU, the backend and the model allow it
ATTENTIONS = ("auto", *BY_NAME)
MOST = 65_535  # of pixels, frames, streams: far above what memory holds, and below what overflows
MOST_DIGITS = 9  # of a number in a list
DEFAULT_BUCKETS = (1, 2, 4)  # each costs the build two block engines
DEFAULT_POSITIONS, DEFAULT_STEPS = 2048, 10  # of speech
DEFAULT_READ_LENGTHS, DEFAULT_PREFILL = (256, 1024, 4096, 16_384), (64, 256, 1024)
SPEECH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
_OF_STREAM = {
    stream_field.name for stream_field in fields(StreamConfig)
}  # options that replace a field of the preset's


class Group(StrEnum):
    """The subject of an option. The help, and the table of options in the docs, have the subjects as headings, in this
    order."""

    MODEL = "Model (weights and their settings)"
    MEDIA = "Media (text, pictures and sound in, video out)"
    LAYOUT = "Layout (picture size, frames, streams)"
    PASSES = "Passes (times and noise levels of a chunk's denoise passes)"
    SPEECH = "Speech (sizes of its sessions and calls)"
    CACHE = "KV cache (precision and place)"
    SPEED = "Speed (precision, kernels, GPUs)"
    OUTPUT = "Output (the artifact and its machine)"


@dataclass(frozen=True)
class Option:
    """The command-line option of a field of `BuildOptions`.

    Parameters
    ----------
    help : str
        Help text of one or two sentences.
    group : Group
        The heading of the option's group in help and docs.
    common : bool
        Whether `build --help` shows the option; ``--help-all`` shows all options.
    off : str, optional
        Spelling of the negative flag, such as ``--resident-cache``, if the option is a flag with a negative.
    plan : bool
        Whether `seko-export plan` has the option, too.
    any_workload : bool
        Whether the option applies to both video models and speech models. Other options apply to speech models alone if
        they are of `Group.SPEECH`, otherwise to video models alone.
    numbers : bool
        Whether the option's value is a comma-separated list of integers.
    decimals : bool
        Whether the option's value is a comma-separated list of numbers with decimals.
    repeated : bool
        Whether the option may be given several times.
    values : callable, optional
        Function that returns the option's possible values, for shell completion.
    """

    help: str
    group: Group
    common: bool = False
    off: str | None = None
    plan: bool = False
    any_workload: bool = False
    numbers: bool = False
    decimals: bool = False
    repeated: bool = False
    values: Callable[[], Sequence[str]] | None = None


def _presets() -> Sequence[str]:
    # when a shell asks: all else of this file knows no family
    from seko_export.families.registry import all_presets

    return (SAMPLE, *all_presets())


def _backends() -> Sequence[str]:
    from seko_export.backends import BACKENDS

    return BACKENDS.names()


def _option(help: str, group: Group, default: Any = None, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(help, group, **more)})


@dataclass(frozen=True)
class BuildOptions:
    """All options of a build. The command line spells a field of `BuildOptions` as ``--like-this``.

    Raises
    ------
    UsageError
        If two options contradict each other.
    """

    checkpoint: Path | None = None
    """Self-Forcing ``.pt``, Wan or diffusers safetensors; None: the sample, or random weights of a preset."""

    preset: str | None = _option(
        "Name of a model whose sizes are known, such as sample or self-forcing-1.3b; for an unknown name the "
        "error lists all names. Default: the model in the checkpoint; without a checkpoint, sample.",
        Group.MODEL,
        plan=True,
        values=_presets,
        common=True,
        any_workload=True,
    )
    model_folder: Path | None = _option(
        "A folder with all files of a model; the build finds each file by its content. Options that name a file "
        "take precedence.",
        Group.MODEL,
        common=True,
        any_workload=True,
    )
    variant: str | None = _option(
        "Variant of the files in diffusers' folders, such as fp16, for the transformer, --vae and --text-encoder.",
        Group.MODEL,
    )
    random_weights: int | None = _option(
        "Build a preset without a checkpoint, with random weights from this seed: for tests of speed, not for video.",
        Group.MODEL,
        any_workload=True,
    )
    audio_adapter: Path | None = _option(
        "Seko-Talk's audio adapter (safetensors, .pt), if it is not in the transformer's folder.",
        Group.MODEL,
    )
    run_config: Path | None = _option(
        "A JSON file in which the model's own code states picture size, passes, windows and positions: for Seko-Talk, "
        "LightX2V's run configuration. Other options take precedence over the file.",
        Group.MODEL,
    )
    heads: int | None = _option(
        "Number of attention heads, if no config.json beside the weights states it.", Group.MODEL
    )
    entry: str | None = _option(
        "The entry of a .pt that holds the weights, such as generator (as trained) or generator_ema (averaged). "
        "Default: the preset's entry, else the first of generator_ema, generator, model, state_dict. The build "
        "prints the entry.",
        Group.MODEL,
    )
    lora: tuple[str, ...] = _option(
        "FILE or FILE:WEIGHT, a LoRA (safetensors, .pt, PEFT's folder) to merge into the weights; may be repeated.",
        Group.MODEL,
        (),
        repeated=True,
    )
    lora_partial: bool = _option(
        "Leave out keys of a LoRA that belong to no weight of the model, instead of refusing the LoRA.",
        Group.MODEL,
        False,
    )
    camera: str | None = _option(
        "For models with a camera. chunk: each layer's scale and shift for the camera are computed once a chunk "
        "and kept; pass: scale and shift are computed in every pass, which needs less memory; none: layers "
        "without a camera.",
        Group.MODEL,
        plan=True,
    )
    speakers: int | None = _option(
        "For models with audio input: number of voices of a session; each of several voices has a mask. Default: "
        "the number in config.json (speakers), else 1.",
        Group.MODEL,
        plan=True,
    )

    vae: Path | None = _option(
        f"{vae_files()[:1].upper()}{vae_files()[1:]}: the artifact then makes video and takes start pictures.",
        Group.MEDIA,
        common=True,
    )
    vae_kind: str | None = _option(
        "The kind of the file of --vae, if only the file's name shows the kind: taehv or lighttae. Default: "
        "lighttae for a file with this word in its name. The build prints the kind.",
        Group.MEDIA,
    )
    vae_encoder: Path | None = _option(
        "A Wan VAE that encodes pictures, if --vae only decodes. Without an encoder, pictures are given as "
        "latents.",
        Group.MEDIA,
    )
    vae_fp8: bool = _option(
        "Compute convolutions of the VAE's decoder in fp8 where the GPU has measured tile sizes for convolutions "
        "in fp8.",
        Group.MEDIA,
        False,
    )
    text_encoder: Path | None = _option(
        "A UMT5 encoder (.pth, safetensors, transformers folder): the artifact then takes prompts as sentences.",
        Group.MEDIA,
        common=True,
    )
    tokenizer: Path | None = _option(
        "tokenizer.json of the text encoder, if this file is not beside the encoder.",
        Group.MEDIA,
        any_workload=True,
    )
    audio_encoder: Path | None = _option(
        "For models that take sound: a HuBERT folder. With an audio encoder the caller passes samples instead of "
        "features.",
        Group.MEDIA,
    )
    image_encoder: Path | None = _option(
        "For models that take a picture beside the text: Wan's CLIP, as a .pth file or a transformers folder. "
        "With an image encoder the caller passes the picture instead of features.",
        Group.MEDIA,
    )
    viewer: Path | None = _option(
        "A JSON file with a sentence of help, prompts and pictures that the artifact brings for the person who meets "
        "it. Default: viewer.json beside the checkpoint, if it is there.",
        Group.MEDIA,
    )
    no_vae: bool = _option("Leave out the VAE: the artifact returns latents.", Group.MEDIA, False, plan=True)
    no_text: bool = _option(
        "Leave out the text encoder: the artifact takes text embeddings.", Group.MEDIA, False, plan=True
    )

    height: int | None = _option(
        "Video height in pixels, a multiple of 16 (twice the VAE's stride).",
        Group.LAYOUT,
        plan=True,
        common=True,
    )
    width: int | None = _option(
        "Video width in pixels, a multiple of 16 (twice the VAE's stride).",
        Group.LAYOUT,
        plan=True,
        common=True,
    )
    aspect: str | None = _option(
        "Aspect ratio of the start pictures, such as 16:9 or 1920:1080. The video gets this aspect ratio and the "
        "preset's area.",
        Group.LAYOUT,
        plan=True,
    )
    chunk_frames: int | None = _option(
        "Number of latent frames that are denoised together.", Group.LAYOUT, plan=True
    )
    sink_frames: int | None = _option(
        "Number of latent frames at the start of the stream that stay in the cache.", Group.LAYOUT, plan=True
    )
    ring_frames: int | None = _option(
        "Number of latent frames in the cache behind the sink; a new frame replaces the oldest frame.",
        Group.LAYOUT,
        plan=True,
    )
    layer_rings: tuple[int, ...] | None = _option(
        "Ring sizes of the layers, repeated from the first layer on: 2,2,2,2,21. The largest ring size is "
        "--ring-frames.",
        Group.LAYOUT,
        plan=True,
        numbers=True,
    )
    reference_frames: int | None = _option(
        "Number of latent frames for reference pictures, which a session supplies and the cache keeps.",
        Group.LAYOUT,
        plan=True,
    )
    window_positions: bool | None = _option(
        "RoPE counts frames from the oldest frame in the cache (--window-positions), or from the start of the "
        "stream (--stream-positions).",
        Group.LAYOUT,
        off="--stream-positions",
        plan=True,
    )
    rope_max_frames: int | None = _option(
        "With --window-positions: RoPE counts frames from the start of the stream, but shifts frames behind the "
        "sink so that the newest frame has at most this number. 0: RoPE counts the frames in the cache.",
        Group.LAYOUT,
        plan=True,
    )
    references_apart: bool | None = _option(
        "With --window-positions: RoPE leaves the reference frame out of the count, so that the reference frame "
        "and the first frame of the stream have position 0 (--references-apart); or RoPE also counts the "
        "reference frame (--references-counted).",
        Group.LAYOUT,
        off="--references-counted",
        plan=True,
    )
    batch: tuple[int, ...] | None = _option(
        "Number of streams in one engine call; with --sessions, several numbers may be given: 1,2,4.",
        Group.LAYOUT,
        plan=True,
        numbers=True,
        any_workload=True,
    )
    sessions: int | None = _option(
        "Build a pool for this number of sessions, each of which may start and end at any time.",
        Group.LAYOUT,
        plan=True,
        common=True,
        any_workload=True,
    )

    timesteps: tuple[float, ...] | None = _option(
        "Timesteps of a chunk's passes, falling from 1000: 1000,757,522. Default: the timesteps of the preset or "
        "checkpoint.",
        Group.PASSES,
        plan=True,
        decimals=True,
    )
    first_timesteps: tuple[float, ...] | None = _option(
        "Timesteps of the first chunk's passes, if the first chunk has other timesteps than later chunks.",
        Group.PASSES,
        plan=True,
        decimals=True,
    )
    shift: float | None = _option(
        "Warp --timesteps and --first-timesteps towards noise; Self-Forcing: timesteps 1000,750,500,250 and shift "
        "5. Default: timesteps are taken as given.",
        Group.PASSES,
        plan=True,
    )
    sigmas: tuple[float, ...] | None = _option(
        "Noise levels, one for each of --timesteps, above 0 and at most 1. Default: timestep / 1000.",
        Group.PASSES,
        plan=True,
        decimals=True,
    )
    renoise_sigmas: tuple[float, ...] | None = _option(
        "Noise level to which the result of each pass except the last is renoised. Default: the noise level of "
        "the next pass.",
        Group.PASSES,
        plan=True,
        decimals=True,
    )
    context_timestep: float | None = _option(
        "Timestep of the context pass, which writes a finished chunk to the cache: 0 to 1000.",
        Group.PASSES,
        plan=True,
    )
    sampler: str | None = _option(
        f"Rule between two passes: {', '.join(SAMPLERS)}.",
        Group.PASSES,
        plan=True,
        values=lambda: SAMPLERS,
    )

    positions: int | None = _option(
        "Largest number of positions of a speech session: tokens of the prompt and patches of sound together. "
        f"Default: {DEFAULT_POSITIONS}.",
        Group.SPEECH,
        plan=True,
        common=True,
    )
    read_lengths: tuple[int, ...] | None = _option(
        "Numbers of cache positions that an engine call of speech can read; each number needs engines of its own. "
        f"The last number is --positions. Default: --positions and those of {with_commas(DEFAULT_READ_LENGTHS)} "
        "that are below --positions; with fused kernels, whose steps read only filled positions, --positions and "
        f"those of {with_commas(DEFAULT_READ_LENGTHS[-2:])} that are below --positions.",
        Group.SPEECH,
        plan=True,
        numbers=True,
    )
    prefill: tuple[int, ...] | None = _option(
        "Numbers of prompt tokens that an engine call of speech can take; each number needs engines of its own, "
        f"and longer prompts take several calls. Default: those of {with_commas(DEFAULT_PREFILL)} that are at most "
        "--positions.",
        Group.SPEECH,
        plan=True,
        numbers=True,
    )
    steps: int | None = _option(
        f"Number of solver steps for a patch of sound. Default: {DEFAULT_STEPS}.",
        Group.SPEECH,
    )

    kv: str | None = _option(
        f"KV cache: {KV_FORMATS[0]} (exact; fp32 on a CPU), {', '.join(KV_FORMATS[1:-1])} or {KV_FORMATS[-1]}. "
        "Two formats for keys and values: int8-fp4. With exact sink frames: fp4-sink.",
        Group.CACHE,
        plan=True,
        values=lambda: KV_FORMATS,
        common=True,
        any_workload=True,
    )
    fp4_kv: bool = _option(
        "The same as --kv fp4: the cache takes 0.28 of the memory of a bf16 cache.",
        Group.CACHE,
        False,
        plan=True,
        any_workload=True,
    )
    resident_window: bool = _option(
        "Convert cached frames to 8 bits once a chunk instead of in every pass, which is faster and needs more memory.",
        Group.CACHE,
        False,
        plan=True,
    )
    pass_caches: bool | None = _option(
        "Use a KV cache for each denoise pass (--pass-caches), or one KV cache that a context pass writes "
        "(--context-pass).",
        Group.CACHE,
        off="--context-pass",
        plan=True,
    )
    offload_cache: bool | None = _option(
        "Keep the KV cache on the host and copy the cache to the device layer by layer (--offload-cache), or keep "
        "the KV cache on the device (--resident-cache).",
        Group.CACHE,
        off="--resident-cache",
        plan=True,
    )

    fp8: bool = _option(
        "Compute the layers' matmuls in fp8 (weights and activations); needs fused kernels.",
        Group.SPEED,
        False,
        plan=True,
        common=True,
        any_workload=True,
    )
    fp8_except: tuple[int, ...] | None = _option(
        "Layers that --fp8 leaves out: numbers from 0, separated by commas.", Group.SPEED, numbers=True
    )
    attention: str = _option(
        "; ".join(
            f"{attention.name}: {attention.help}" if attention.help else attention.name
            for attention in BY_NAME.values()
        )
        + "; auto: the attention that was measured to be fastest.",
        Group.SPEED,
        "auto",
        plan=True,
        values=lambda: ATTENTIONS,
    )
    kernels: str = _option(
        "Kernels of the layers: plain (torch's), fused (Seko's own, around the matmuls), or auto.",
        Group.SPEED,
        "auto",
        plan=True,
        values=lambda: KERNELS,
        any_workload=True,
    )
    ranks: int = _option(
        "Number of GPUs of one machine that make each chunk together: at most 8, and a divisor of the model's heads.",
        Group.SPEED,
        1,
        plan=True,
        any_workload=True,
    )

    backend: str = _option(
        "The library that runs the engines: aoti, compile, onnx, tensorrt or tensorrt-rtx.",
        Group.OUTPUT,
        "aoti",
        plan=True,
        values=_backends,
        common=True,
        any_workload=True,
    )
    target: str = _option(
        "The machine that runs the engines: auto, cpu, or sm_NN of this machine's GPU. tensorrt-rtx also "
        "builds for other GPUs: sm_89,sm_120.",
        Group.OUTPUT,
        "auto",
        values=lambda: ("auto", "cpu"),
        common=True,
        any_workload=True,
    )
    no_goldens: bool = _option(
        "Do not record the chunks with which `verify` compares; only for GPUs that are not in this machine.",
        Group.OUTPUT,
        False,
        any_workload=True,
    )

    def __post_init__(self) -> None:
        for option, value, refusal, refused in (
            ("--vae", self.vae, "--no-vae", self.no_vae),
            ("--text-encoder", self.text_encoder, "--no-text", self.no_text),
            ("--tokenizer", self.tokenizer, "--no-text", self.no_text),
        ):
            if refused and value is not None:
                raise UsageError(f"{option} {value} contradicts {refusal}: give one of them")
        beside = {"--vae-kind": self.vae_kind, "--vae-encoder": self.vae_encoder}
        for option, of_vae in beside.items():
            if of_vae is not None and self.vae is None:
                raise UsageError(f"{option} {of_vae} needs --vae: name its file, or leave it out")
        if self.random_weights is not None:
            self._check_random_weights(self.random_weights)
        if self.heads is not None and self.checkpoint is None and self.model_folder is None:
            raise UsageError(f"--heads {self.heads} needs a checkpoint: name one")
        if self.audio_adapter is not None and self.checkpoint is None and self.model_folder is None:
            raise UsageError(f"--audio-adapter {self.audio_adapter} belongs to a checkpoint: name one")
        if self.lora_partial and not self.lora:
            raise UsageError("--lora-partial needs a --lora: name one, or leave it out")
        if self.heads is not None and self.heads < 1:
            raise UsageError(f"--heads {self.heads}: expected at least 1")
        if self.fp4_kv and self.kv not in (None, "fp4"):
            raise UsageError(f"--fp4-kv contradicts --kv {self.kv}: give one of them")
        if self.aspect is not None and (self.height or self.width):
            raise UsageError(
                f"--aspect {self.aspect} contradicts --height and --width: give one or the other"
            )
        for option_field, _ in declared():
            value = getattr(self, option_field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if (
                    option_field.name in {*_OF_STREAM, "sessions"}
                    and isinstance(number, int)
                    and number > MOST
                ):
                    raise UsageError(f"{flag(option_field.name)} {number}: expected at most {MOST}")
        if self.sessions is None and self.batch is not None and len(self.batch) > 1:
            raise UsageError(
                f"--batch {with_commas(self.batch)}: sizes of calls belong to a pool; give --sessions N beside them"
            )

    def _check_random_weights(self, seed: int) -> None:
        option, named = f"--random-weights {seed}", self.checkpoint or self.model_folder
        if named is not None:
            raise UsageError(f"{option} contradicts the checkpoint {named}: give one of them")
        if self.preset in (None, SAMPLE):
            raise UsageError(f"{option} needs a --preset other than sample, which has weights: name one")

    @property
    def layout(self) -> Mapping[str, Any]:
        """Fields of `StreamConfig` that the options set, which override the fields of the preset."""
        asked = {
            option_field.name: getattr(self, option_field.name)
            for option_field, _ in declared()
            if option_field.name in _OF_STREAM
        }
        del asked["batch"]  # which is a tuple, and sizes of calls with --sessions
        if self.layer_rings and self.ring_frames is None:
            asked["ring_frames"] = max(self.layer_rings)
        if self.batch and self.sessions is None:
            asked["batch"] = self.batch[0]
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def lora_files(self) -> tuple[LoraFile, ...]:
        """The LoRAs that ``--lora`` names, with their weights."""
        return tuple(map(LoraFile.parse, self.lora))

    @property
    def pool(self) -> PoolConfig | None:
        """The pool for which ``--sessions`` asks; None without this option."""
        if self.sessions is None:
            return None
        sizes = self.batch or tuple(size for size in DEFAULT_BUCKETS if size <= self.sessions)
        return PoolConfig(self.sessions, sizes)


def declared() -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of `BuildOptions` that are options, in order."""
    for option_field in fields(BuildOptions):
        if "option" in option_field.metadata:
            yield option_field, option_field.metadata["option"]


def flag(name: str) -> str:
    """Return the spelling of a field on the command line."""
    return f"--{name.replace('_', '-')}"


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse comma-separated integers; the UsageError for other text names the option."""
    parts = text.split(",")
    if not all(part.isdecimal() and part.isascii() and len(part) <= MOST_DIGITS for part in parts):
        raise UsageError(f"{option} {text[:80]!r}: expected whole numbers with commas, as 2,2,21")
    return tuple(map(int, parts))


def decimals(option: str, text: str) -> tuple[float, ...]:
    """Parse comma-separated numbers; the UsageError for other text names the option."""
    try:
        parsed = tuple(map(float, text.split(",")))
    except ValueError:
        parsed = (math.nan,)
    if not all(map(math.isfinite, parsed)):
        raise UsageError(f"{option} {text[:80]!r}: expected numbers with commas, as 1000,757.5,522")
    return parsed


def options_table() -> str:
    """Return the table of options for the docs, as Markdown."""
    lines = ["| option | default | what it does |", "|---|---|---|"]
    group: Group | None = None
    for option_field, option in declared():
        if option.group != group:
            group = option.group
            lines.append(f"| **{group}** | | |")
        spelled = f"`{flag(option_field.name)}`" + (f", `{option.off}`" if option.off else "")
        default = "" if option_field.default in (None, False, ()) else f"`{option_field.default}`"
        lines.append(f"| {spelled} | {default} | {option.help} |")
    return "\n".join(lines) + "\n"
