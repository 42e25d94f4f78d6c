"""The options of a build, declared once. The command line, `plan`, the Python API and the table in the docs are made
from the declarations of the options. Options of one workload alone, other than video, are declared by the workload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from seko_export.checkpoints.sources import LoraFile
from seko_export.config.attention import ATTENTIONS as BY_NAME
from seko_export.config.model import ModelConfig
from seko_export.config.pool import PoolConfig, with_commas
from seko_export.config.schedule import SAMPLERS
from seko_export.config.stream import CONTEXTS, REUSE, StreamConfig
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
ANY = ""  # in place of a workload: of models of any
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
    CACHE = "Memory (precision of the KV cache, and what lies on the host)"
    SPEED = "Speed (precision, kernels, GPUs)"
    OUTPUT = "Output (the artifact and its machine)"


@dataclass(frozen=True)
class Option:
    """The command-line option of a field of `BuildOptions`. It takes what the field's type says: an option for a tuple
    of strings may be repeated, one for a tuple of numbers takes a list with commas.

    Parameters
    ----------
    help : str
        Help text of one or two sentences.
    group : str
        The heading of the option's group in help and docs: a `Group`, or one of a workload's own.
    common : bool
        Whether `build --help` shows the option; ``--help-all`` shows all options.
    off : str, optional
        Spelling of the negative flag, such as ``--resident-cache``, if the option is a flag with a negative.
    plan : bool
        Whether `seko-export plan` has the option, too.
    workload : str
        Name of the workload to whose models alone the option belongs, or `ANY`.
    values : callable, optional
        Function that returns the option's possible values, for shell completion.
    """

    help: str
    group: str
    common: bool = False
    off: str | None = None
    plan: bool = False
    workload: str = ModelConfig.workload
    values: Callable[[], Sequence[str]] | None = None


def _presets() -> Sequence[str]:
    # when a shell asks: all else of this file knows no family
    from seko_export.families.registry import all_presets

    return (SAMPLE, *all_presets())


def _backends() -> Sequence[str]:
    from seko_export.backends import BACKENDS

    return BACKENDS.names()


def option(help: str, default: Any = None, **more: Any) -> Any:
    """Return a field of `BuildOptions`, or of a class derived from it, as an `Option`."""
    return field(default=default, metadata={"option": Option(help, **more)})


_model = partial(option, group=Group.MODEL)
_media = partial(option, group=Group.MEDIA)
_layout = partial(option, group=Group.LAYOUT, plan=True)
_passes = partial(option, group=Group.PASSES, plan=True)
_cache = partial(option, group=Group.CACHE, plan=True)
_speed = partial(option, group=Group.SPEED, plan=True)
_output = partial(option, group=Group.OUTPUT)


@dataclass(frozen=True)
class BuildOptions:
    """The options of a build. The command line spells a field of `BuildOptions` as ``--like-this``. A workload with
    options of its own derives a class with their fields. A path may be a string.

    Raises
    ------
    UsageError
        If two options contradict each other.
    """

    checkpoint: Path | None = None
    """Self-Forcing ``.pt``, Wan or diffusers safetensors; None: the sample, or random weights of a preset."""

    preset: str | None = _model(
        "Name of a model whose sizes are known, such as sample or self-forcing-1.3b; for an unknown name the "
        "error lists all names. Default: the model in the checkpoint; without a checkpoint, sample.",
        values=_presets,
        common=True,
        workload=ANY,
        plan=True,
    )
    model_folder: Path | None = _model(
        "A folder with all files of a model; the build finds each file by its content. Options that name a file "
        "take precedence.",
        common=True,
        workload=ANY,
    )
    variant: str | None = _model(
        "Variant of the files in diffusers' folders, such as fp16, for the transformer, --vae and --text-encoder."
    )
    random_weights: int | None = _model(
        "Build a preset without a checkpoint, with random weights from this seed: for tests of speed, not for video.",
        workload=ANY,
    )
    audio_adapter: Path | None = _model(
        "Seko-Talk's audio adapter (safetensors, .pt), if it is not in the transformer's folder."
    )
    run_config: Path | None = _model(
        "A JSON file in which the model's own code states picture size, passes, windows and positions: for Seko-Talk, "
        "LightX2V's run configuration. Other options take precedence over the file."
    )
    heads: int | None = _model("Number of attention heads, if no config.json beside the weights states it.")
    entry: str | None = _model(
        "The entry of a .pt that holds the weights, such as generator (as trained) or generator_ema (averaged). "
        "Default: the preset's entry, else the first of generator_ema, generator, model, state_dict. The build "
        "prints the entry."
    )
    lora: tuple[str, ...] = _model(
        "FILE or FILE:WEIGHT, a LoRA (safetensors, .pt, a trainer's folder) to merge into the weights; may be "
        "repeated.",
        (),
        workload=ANY,
    )
    lora_partial: bool = _model(
        "Leave out keys of a LoRA that belong to no weight of the model, instead of refusing the LoRA.",
        False,
        workload=ANY,
    )
    camera: str | None = _model(
        "For models with a camera. chunk: each layer's scale and shift for the camera are computed once a chunk "
        "and kept; pass: scale and shift are computed in every pass, which needs less memory; none: layers "
        "without a camera.",
        plan=True,
    )
    speakers: int | None = _model(
        "For models with audio input: number of voices of a session; each of several voices has a mask. Default: "
        "the number in config.json (speakers), else 1.",
        plan=True,
    )

    vae: Path | None = _media(
        f"{vae_files()[:1].upper()}{vae_files()[1:]}: the artifact then makes video, and with a Wan VAE takes start "
        "pictures.",
        common=True,
    )
    vae_kind: str | None = _media(
        "The kind of the file of --vae, if only the file's name shows the kind: taehv or lighttae. Default: "
        "lighttae for a file with this word in its name. The build prints the kind."
    )
    vae_encoder: Path | None = _media(
        "A Wan VAE that encodes pictures, if --vae only decodes. Without an encoder, pictures are given as "
        "latents."
    )
    vae_fp8: bool = _media(
        "Compute convolutions of the VAE's decoder in fp8 where the GPU has measured tile sizes for convolutions "
        "in fp8.",
        False,
    )
    text_encoder: Path | None = _media(
        "A UMT5 encoder (.pth, safetensors, transformers folder): the artifact then takes prompts as sentences.",
        common=True,
    )
    tokenizer: Path | None = _media(
        "tokenizer.json of the text encoder, if this file is not beside the encoder.", workload=ANY
    )
    audio_encoder: Path | None = _media(
        "For models that take sound: a HuBERT folder. With an audio encoder the caller passes samples instead of "
        "features."
    )
    image_encoder: Path | None = _media(
        "For models that take a picture beside the text: Wan's CLIP, as a .pth file or a transformers folder. "
        "With an image encoder the caller passes the picture instead of features."
    )
    viewer: Path | None = _media(
        "A JSON file with a sentence of help, prompts and pictures that the artifact brings for the person who meets "
        "it. Default: viewer.json beside the checkpoint, if it is there."
    )
    no_vae: bool = _media("Leave out the VAE: the artifact returns latents.", False, plan=True)
    no_text: bool = _media(
        "Leave out the text encoder: the artifact takes text embeddings.", False, plan=True
    )

    height: int | None = _layout(
        "Video height in pixels, a multiple of 16 (twice the VAE's stride).", common=True
    )
    width: int | None = _layout(
        "Video width in pixels, a multiple of 16 (twice the VAE's stride).", common=True
    )
    aspect: str | None = _layout(
        "Aspect ratio of the start pictures, such as 16:9 or 1920:1080. The video gets this aspect ratio and the "
        "preset's area."
    )
    chunk_frames: int | None = _layout("Number of latent frames that are denoised together.")
    sink_frames: int | None = _layout(
        "Number of latent frames at the start of the stream that stay in the cache."
    )
    ring_frames: int | None = _layout(
        "Number of latent frames in the cache behind the sink; a new frame replaces the oldest frame."
    )
    sink_average: float | None = _layout(
        "Weight with which each chunk that leaves the ring is averaged into the sink: 0.001 for Reward Forcing, 0 for "
        "a sink that stays as it was written. Default: the preset's weight."
    )
    layer_rings: tuple[int, ...] | None = _layout(
        "Ring sizes of the layers, repeated from the first layer on: 2,2,2,2,21. The largest ring size is "
        "--ring-frames."
    )
    reference_frames: int | None = _layout(
        "Number of latent frames for reference pictures, which a session supplies and the cache keeps."
    )
    window_positions: bool | None = _layout(
        "RoPE counts frames from the oldest frame in the cache (--window-positions), or from the start of the "
        "stream (--stream-positions).",
        off="--stream-positions",
    )
    rolling: bool | None = _layout(
        "A pass denoises several chunks, each at its own time (--rolling: Rolling Forcing), or one chunk "
        "(--one-chunk). With --rolling, --first-timesteps are the times of these chunks, and --ring-frames counts all "
        "frames that attention sees.",
        off="--one-chunk",
    )
    rope_max_frames: int | None = _layout(
        "With --window-positions: RoPE counts frames from the start of the stream, but shifts frames behind the "
        "sink so that the newest frame has at most this number. 0: RoPE counts the frames in the cache."
    )
    references_apart: bool | None = _layout(
        "With --window-positions: RoPE leaves the reference frame out of the count, so that the reference frame "
        "and the first frame of the stream have position 0 (--references-apart); or RoPE also counts the "
        "reference frame (--references-counted).",
        off="--references-counted",
    )
    strength: float | None = _layout(
        "Turn an input video into another one: each chunk starts from the video's latents with this share of noise, "
        "from 0 (the video as it came) to 1 (nothing of it). A session may say another. Needs a VAE that encodes."
    )
    batch: tuple[int, ...] | None = _layout(
        "Number of streams in one engine call; with --sessions, several numbers may be given: 1,2,4.",
        workload=ANY,
    )
    sessions: int | None = _layout(
        "Build a pool for this number of sessions, each of which may start and end at any time.",
        common=True,
        workload=ANY,
    )

    timesteps: tuple[float, ...] | None = _passes(
        "Timesteps of a chunk's passes, falling from 1000: 1000,757,522. Default: the timesteps of the preset or "
        "checkpoint."
    )
    first_timesteps: tuple[float, ...] | None = _passes(
        "Timesteps of the first chunk's passes, if the first chunk has other timesteps than later chunks."
    )
    shift: float | None = _passes(
        "Warp --timesteps and --first-timesteps towards noise; Self-Forcing: timesteps 1000,750,500,250 and shift "
        "5. Default: timesteps are taken as given."
    )
    sigmas: tuple[float, ...] | None = _passes(
        "Noise levels, one for each of --timesteps, above 0 and at most 1. Default: timestep / 1000."
    )
    renoise_sigmas: tuple[float, ...] | None = _passes(
        "Noise level to which the result of each pass except the last is renoised. Default: the noise level of "
        "the next pass."
    )
    context_timestep: float | None = _passes(
        "Timestep of the context pass, which writes a finished chunk to the cache: 0 to 1000."
    )
    sampler: str | None = _passes(f"Rule between two passes: {', '.join(SAMPLERS)}.", values=lambda: SAMPLERS)

    kv: str | None = _cache(
        f"KV cache: {KV_FORMATS[0]} (exact; fp32 on a CPU), {', '.join(KV_FORMATS[1:-1])} or {KV_FORMATS[-1]}. "
        "Two formats for keys and values: int8-fp4. With exact sink frames: fp4-sink.",
        values=lambda: KV_FORMATS,
        common=True,
        workload=ANY,
    )
    fp4_kv: bool = _cache(
        "The same as --kv fp4: the cache takes 0.28 of the memory of a bf16 cache.", False, workload=ANY
    )
    resident_window: bool = _cache(
        "Convert cached frames to 8 bits once a chunk instead of in every pass, which is faster and needs more memory.",
        False,
    )
    pass_caches: bool | None = _cache(
        "Use a KV cache for each denoise pass (--pass-caches), or one KV cache that a context pass writes "
        "(--context-pass).",
        off="--context-pass",
    )
    context: str | None = _cache(
        "How a finished chunk gets into the KV cache. pass: a context pass over the chunk writes its keys and values; "
        "reuse: the keys and values of the last denoise pass stay, which saves a pass and changes the video; rebuild: "
        "the cache is made again before each chunk (Krea). Default: the preset's, which is pass for most.",
        values=lambda: CONTEXTS,
    )
    offload_cache: bool | None = _cache(
        "Keep the KV cache on the host and copy the cache to the device layer by layer (--offload-cache), or keep "
        "the KV cache on the device (--resident-cache).",
        off="--resident-cache",
    )

    offload_text: bool = _cache(
        "Keep the text encoder's weights on the host, and copy them to the device layer by layer for each prompt.",
        False,
    )
    offload_layers: bool = _cache(
        "Keep the weights of the transformer's layers on the host, and copy each layer to the device in every pass.",
        False,
    )

    decode_frames: int | None = _cache(
        "Most latent frames that the VAE decodes in one call: 1 needs the least memory, and the server sends the first "
        "video frames of a chunk while it decodes the others. Default: those of a chunk, or as many as torch's kernels "
        "can count."
    )
    fit: str | None = _cache(
        "Memory of the GPU, such as 24GB, or its name, such as rtx4090: the build adds those of --offload-text, "
        "--decode-frames, --fp4-kv, --fp8, --camera pass, --offload-cache and --offload-layers that it takes to fit "
        "there, and says why.",
        common=True,
    )

    fp8: bool = _speed(
        "Compute the layers' matmuls in fp8 (weights and activations); needs fused kernels.",
        False,
        common=True,
        workload=ANY,
    )
    fp8_except: tuple[int, ...] | None = _speed(
        "Layers that --fp8 leaves out: numbers from 0, separated by commas.", plan=False
    )
    attention: str = _speed(
        "; ".join(
            f"{attention.name}: {attention.help}" if attention.help else attention.name
            for attention in BY_NAME.values()
        )
        + "; auto: the attention that was measured to be fastest.",
        "auto",
        values=lambda: ATTENTIONS,
    )
    past_share: float | None = _speed(
        "Attend to this share of the cached keys in tiles, such as 0.4: those that the queries suit best, the sink and "
        "the newest chunk. Faster, but another video; needs 8-bit attention. Default: 1, all cached keys."
    )
    kernels: str = _speed(
        "Kernels of the layers: plain (torch's), fused (Seko's own, around the matmuls), or auto.",
        "auto",
        values=lambda: KERNELS,
        workload=ANY,
    )
    ranks: int = _speed(
        "Number of GPUs of one machine that make each chunk together: at most 8, and a divisor of the model's heads.",
        1,
        workload=ANY,
    )

    backend: str = _output(
        "The library that runs the engines: aoti, compile, onnx, tensorrt or tensorrt-rtx.",
        "aoti",
        values=_backends,
        common=True,
        workload=ANY,
        plan=True,
    )
    target: str = _output(
        "The machine that runs the engines: auto, cpu, or sm_NN of this machine's GPU. tensorrt-rtx also "
        "builds for other GPUs: sm_89,sm_120.",
        "auto",
        values=lambda: ("auto", "cpu"),
        common=True,
        workload=ANY,
    )
    no_goldens: bool = _output(
        "Do not record the chunks with which `verify` compares; only for GPUs that are not in this machine.",
        False,
        workload=ANY,
    )

    def __post_init__(self) -> None:
        for path_field in fields(self):
            value = getattr(self, path_field.name)
            if path_field.type == "Path | None" and isinstance(value, str):
                object.__setattr__(self, path_field.name, Path(value))
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
        if self.decode_frames is not None and self.decode_frames < 1:
            raise UsageError(f"--decode-frames {self.decode_frames}: expected at least 1")
        if self.fp4_kv and self.kv not in (None, "fp4"):
            raise UsageError(f"--fp4-kv contradicts --kv {self.kv}: give one of them")
        if self.pass_caches is False and self.context == REUSE:
            raise UsageError(f"--context {REUSE} contradicts --context-pass: give one of them")
        if self.aspect is not None and (self.height or self.width):
            raise UsageError(
                f"--aspect {self.aspect} contradicts --height and --width: give one or the other"
            )
        for option_field, _ in declared(type(self)):
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


def declared(kind: type[BuildOptions] = BuildOptions) -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of a class of options that are options, in order."""
    for option_field in fields(kind):
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
