"""The manifest as frozen dataclasses: everything an artifact says about itself. `records` reads it by their types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from seko_runtime.errors import ManifestError
from seko_runtime.format.json_fields import MAX_INTEGER, as_integer, as_name, as_text
from seko_runtime.format.paths import as_path
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.format.records import Limit, Mark, one_of, within

FORMAT_VERSION = 1  # the only one: no format was released before
GPU_SEPARATOR = "-"  # between the GPUs of a `Target.arch`
MANIFEST_FILE = "manifest.json"
SIGNATURE_FILE = "manifest.sig"  # may lie beside it; no table lists it, since it signs the table
DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
PLUGINS_KEY = "tensorrt_plugins"  # there: the library of native code that plans are loaded with
CACHE_KEY = "compiler_cache"  # in `Manifest.extra`: the file of `torch.compiler.save_cache_artifacts`
ROLES = ("cache", "prompt", "chunk", "state", "decode")
WORKLOADS = ("video",)  # what a row, a chunk and a pass are; a runtime refuses one that it does not know
PERIODS = ("session", "prompt", "chunk", "pass")  # how often an input may change
SOURCES = ("host", "caller")
DEFAULTS = ("zeros", "required", "hold")
CLEANINGS = ("wan",)  # how a prompt is cleaned before it is cut into tokens; `text` does it
# Names of the process groups in engines of several ranks: of a chunk, and of decoding, which runs beside the next one.
RANK_GROUP, DECODE_GROUP = "seko.ranks", "seko.ranks.decode"
MAX_RANK = 16
MAX_SEED = (1 << 62) - 1  # as a session takes them
_UNKNOWN_WORD = "this runtime knows {}; update it"


def _as_shape(value: object, where: str) -> tuple[int, ...]:
    """Read a shape: up to 16 positive sizes."""
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise ManifestError(f"{where} is no shape: expected an array of at most {MAX_RANK} integers")
    if all(type(size) is int and 1 <= size <= MAX_INTEGER for size in value):  # no bool is of type int
        return tuple(value)
    return tuple(as_integer(size, f"{where}[{axis}]", minimum=1) for axis, size in enumerate(value))


def _as_latent_shape(value: object, where: str) -> tuple[int, ...]:
    shape = _as_shape(value, where)
    if len(shape) != 3:
        raise ManifestError(f"{where} has {len(shape)} sizes, expected channels, rows, columns")
    return shape


def _as_device(value: object, where: str) -> str:
    device = as_text(value, where)
    if device not in ("cpu", "cuda"):
        raise ManifestError(f"{where} is {device[:40]!r}, expected 'cpu' or 'cuda'")
    return device


def _as_sha256(value: object, where: str) -> str:
    digits = as_text(value, where)
    if len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise ManifestError(f"{where} is {digits[:80]!r}, expected 64 lower-case hexadecimal digits")
    return digits


Name = Annotated[str, as_name]
FilePath = Annotated[str, as_path]
Shape = Annotated[tuple[int, ...], _as_shape]
Dtype = Annotated[str, one_of(tuple(DTYPE_BYTES))]
Count = Annotated[int, within(1, 1 << 31)]
Layers = Annotated[int, within(0, 4096)]

_TENSORS = Limit("MAX_SIGNATURE_TENSORS", "tensors of engine signatures")
_REFERENCES = Limit("MAX_REFERENCES", "references")
_CALLS = Limit("MAX_CALLS", "calls")


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one tensor."""

    name: Name
    shape: Shape
    dtype: Dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, contiguous."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Buffer(TensorSpec):
    """A tensor that the runtime allocates and keeps for the life of a session.

    Parameters
    ----------
    role : str
        ``cache`` (the KV pool), ``prompt``, ``chunk`` (written by the host), ``state``, or ``decode`` (decoding of
        finished latents).
    layered : bool
        Whether the leading axis counts layers; the next axis then holds the rows of the batch.
    device_layers : int
        0: all layers lie on the device. n: the buffer lies on the host, and the device holds n layers at a time.
    rank_axis : int
        Of a ``decode`` buffer: the axis of which each of several ranks has a share, in their order; 0: each has all.
    """

    role: Annotated[str, one_of(ROLES), Mark.REQUIRED] = "state"
    layered: bool = False
    device_layers: Layers = 0
    rank_axis: Annotated[int, within(0, MAX_RANK)] = 0

    @property
    def on_device(self) -> Buffer:
        """The part of it that lies on the device."""
        if not self.device_layers:
            return self
        return replace(self, shape=(self.device_layers, *self.shape[1:]), device_layers=0)


@dataclass(frozen=True)
class InputSpec(TensorSpec):
    """An input of the model that changes while a stream runs; ``shape`` is one row's.

    Parameters
    ----------
    buffer : str
        The buffer from which the programs read it.
    per : str
        How often it may change: one of `PERIODS`. For ``pass``, axis 0 of the shape counts the passes of a chunk.
    source : str
        ``host``: the runtime fills it, as the buffer's name says. ``caller``: the caller of the session supplies it.
    default : str
        The value of a row if the caller supplies none: ``zeros``, ``hold`` (the last value supplied; zeros before the
        first), or ``required``: an error.
    kind : str or None
        What it is, for helpers that make the array from a user's input.
    """

    buffer: Annotated[Name, Mark.REQUIRED] = ""
    per: Annotated[str, one_of(PERIODS, complaint=_UNKNOWN_WORD), Mark.REQUIRED] = "chunk"
    source: Annotated[str, one_of(SOURCES, complaint=_UNKNOWN_WORD), Mark.REQUIRED] = "caller"
    default: Annotated[str, one_of(DEFAULTS, complaint=_UNKNOWN_WORD), Mark.REQUIRED] = "required"
    kind: Name | None = None


@dataclass(frozen=True)
class Weight(TensorSpec):
    """A tensor in a safetensors file of the artifact."""

    file: Annotated[FilePath, Mark.REQUIRED] = ""


@dataclass(frozen=True)
class EngineSpec:
    """An engine's file and signature; ``mutates`` names the inputs that it writes in place."""

    name: Name
    file: FilePath
    inputs: Annotated[tuple[TensorSpec, ...], _TENSORS]
    outputs: Annotated[tuple[TensorSpec, ...], _TENSORS]
    mutates: Annotated[tuple[Name, ...], Mark.REQUIRED] = ()


@dataclass(frozen=True)
class Call:
    """One call of a program. With ``layers`` 0 the engine is called once, with n for n layers from ``first_layer``
    on.

    ``first_place`` is the index of that layer within its layer group (`Stream.rings`).
    """

    engine: Name
    inputs: Annotated[tuple[str, ...], _REFERENCES]
    outputs: Annotated[tuple[str, ...], _REFERENCES]
    layers: Layers = 0
    first_layer: Layers = 0
    first_place: Layers = 0


@dataclass(frozen=True)
class Target:
    """The machine that the engines were built for.

    Parameters
    ----------
    device, arch : str
        ``cpu`` and the kernel's name of the architecture, or ``cuda`` and ``sm_NN``; several GPUs with a hyphen
        between two.
    torch, cuda : str
        Versions.
    cpu_flags : tuple of str
        CPU features that compiled host code may use.
    host_arch : str or None
        The kernel's name of the host's architecture; not checked if missing.
    """

    device: Annotated[str, _as_device]
    arch: Name
    torch: str
    cuda: str | None = None
    cpu_flags: tuple[Name, ...] = ()
    host_arch: Name | None = None

    @property
    def archs(self) -> tuple[str, ...]:
        """Each machine that the engines run on."""
        return tuple(self.arch.split(GPU_SEPARATOR))


@dataclass(frozen=True)
class Stream:
    """Layout of the stream that the artifact makes; ``latent_shape`` is (channels, rows, columns).

    ``batch`` counts the rows for which a session holds state; without a `Pool` every call carries all of them.
    ``rings`` has the ring size of each layer group with a ring smaller than ``ring_frames``, by the group's name.
    ``reference_frames`` lie in the cache before the sink, are never evicted, and are not part of the video.
    """

    batch: Count
    chunk_frames: Count
    sink_frames: Annotated[int, within(0, 1 << 31)]
    ring_frames: Count
    frame_tokens: Count
    latent_shape: Annotated[tuple[int, int, int], _as_latent_shape]
    height: Count
    width: Count
    video_frames_per_latent: Annotated[int, within(1, 1 << 16)]
    fps: Count
    rings: Annotated[Mapping[str, int], Limit("MAX_ENTRIES", "entries")] = field(default_factory=dict)
    reference_frames: Annotated[int, within(0, 1 << 16)] = 0

    @property
    def cache_frames(self) -> int:
        """Latent frames that the cache holds."""
        return self.reference_frames + self.sink_frames + self.ring_frames


@dataclass(frozen=True)
class Pool:
    """Rows that are separate sessions; a call carries some of them, in any order.

    Parameters
    ----------
    buckets : tuple of int
        Row counts of calls, ascending. Each bucket has its own programs, named ``....{bucket}``. The last row of
        `Stream.batch` is the spare row, to which batch indices without a session write.
    """

    buckets: Annotated[tuple[int, ...], Limit("MAX_BUCKETS", "buckets")]

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket with at least this many rows."""
        return next(bucket for bucket in self.buckets if bucket >= rows)


@dataclass(frozen=True)
class KvPool:
    """The format of the KV pool, its size, and the size of a bf16 pool."""

    scheme: Name
    pool_bytes: int
    bf16_pool_bytes: int
    bits_per_number: float


@dataclass(frozen=True)
class Schedule:
    """The denoise passes of a chunk. These numbers are for people and tools; engines take theirs from weights.

    ``shift`` is the warp with which the timesteps were made, if any; a session's own ``steps`` use it.
    """

    denoise_passes: Annotated[int, within(1, 1024)]
    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    context_timestep: float
    sampler: Name
    shift: float | None = None


@dataclass(frozen=True)
class Text:
    """How a sentence becomes the token ids for the program ``text``.

    Parameters
    ----------
    tokenizer : str
        A JSON file of the library `tokenizers`, in the artifact.
    tokens : int
        Ids are padded with ``pad_id`` to this number.
    pad_id : int
        The id of the padding token.
    truncate : bool
        Whether a longer prompt is cut, keeping its last id (the end mark), or refused.
    cleaning : str
        One of `CLEANINGS`.
    """

    tokenizer: FilePath
    tokens: Annotated[int, within(1, 1 << 20)]
    pad_id: Annotated[int, within(0, 1 << 31)]
    truncate: bool
    cleaning: Annotated[str, one_of(CLEANINGS, complaint=_UNKNOWN_WORD)]


@dataclass(frozen=True)
class Video:
    """Size of decoded pictures: video frames of the first chunk and of later chunks, height and width in pixels."""

    first_frames: Count
    chunk_frames: Count
    height: Count
    width: Count


@dataclass(frozen=True)
class GoldenBound:
    """How much one recorded chunk may differ: ``latents`` and ``cache`` relative, ``video`` in levels of 255."""

    latents: float
    cache: Annotated[float, Mark.REQUIRED] = 0.0
    video: Annotated[float, Mark.REQUIRED] = 0.0


@dataclass(frozen=True)
class Golden:
    """Recorded chunks: tensors ``latents.{chunk}``, optionally ``exact.{chunk}``, and the text input.

    With ``cache_step`` also ``cache.{buffer}.{chunk}``: every ``cache_step``-th entry of the row axis of each cache
    buffer, after the chunk. With ``video_step`` also ``video.{chunk}``: every ``video_step``-th pixel of both sides of
    its frames, uint8. ``bounds`` has one entry a chunk; without it ``tolerance`` bounds the latents of all of them.
    ``prompt`` is the sentence that the text came from, where it came from one; ``reference`` the tensor that holds the
    latents of the reference frames, where there are any. What the caller gives lies in tensors
    ``input.{name}.{chunk}``, or ``input.{name}`` where it is not given per chunk.
    """

    file: FilePath
    seeds: tuple[Annotated[int, within(-MAX_SEED, MAX_SEED)], ...]
    chunks: tuple[Annotated[int, within(0, 100_000)], ...]
    tolerance: float
    text: Name | None = None
    cache_step: int = 0
    video_step: int = 0
    prompt: str | None = None
    bounds: tuple[GoldenBound, ...] = ()
    reference: Name | None = None

    def bound(self, chunk: int) -> GoldenBound:
        """Return the bound of a recorded chunk."""
        return self.bounds[self.chunks.index(chunk)] if self.bounds else GoldenBound(self.tolerance)


@dataclass(frozen=True)
class FileEntry:
    """Hash and size of one file of the artifact."""

    sha256: Annotated[str, _as_sha256]
    size: int


@dataclass(frozen=True)
class Manifest:
    """Everything an artifact says about itself; see `docs/engine-format.md` for each field."""

    name: Name
    backend: Name
    target: Target
    stream: Stream
    kv: KvPool
    schedule: Schedule
    buffers: Annotated[tuple[Buffer, ...], Limit("MAX_BUFFERS", "buffers")]
    weights: Annotated[tuple[Weight, ...], Limit("MAX_WEIGHTS", "weights")]
    engines: Annotated[tuple[EngineSpec, ...], Limit("MAX_ENGINES", "engines")]
    programs: Mapping[str, Annotated[tuple[Call, ...], _CALLS]]
    output: Name
    golden: Golden | None = None
    text: Text | None = None
    video: Video | None = None
    producer: Annotated[Mapping[str, str], Limit("MAX_ENTRIES", "entries"), Mark.REQUIRED] = field(
        default_factory=dict
    )
    model: Annotated[Mapping[str, object], Mark.REQUIRED] = field(default_factory=dict)
    files: Annotated[Mapping[str, FileEntry], Limit("MAX_FILES", "files"), Mark.REQUIRED] = field(
        default_factory=dict
    )
    extra: Annotated[Mapping[str, str], Limit("MAX_ENTRIES", "entries"), Mark.REQUIRED] = field(
        default_factory=dict
    )
    format_version: Annotated[int, within(FORMAT_VERSION, FORMAT_VERSION), Mark.REQUIRED] = FORMAT_VERSION
    pool: Pool | None = None
    ranks: Annotated[int, within(1, 64)] = 1
    workload: Annotated[str, one_of(WORKLOADS, complaint=_UNKNOWN_WORD), Mark.REQUIRED] = "video"
    inputs: Annotated[tuple[InputSpec, ...], Limit("MAX_INPUTS", "inputs"), Mark.REQUIRED] = ()

    @property
    def caller_inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that the caller supplies."""
        return tuple(one for one in self.inputs if one.source == "caller")

    @property
    def has_context(self) -> bool:
        """Whether a chunk ends with a context pass; otherwise each denoise pass has a cache of its own."""
        return any(ProgramKey.parse(name).role == "context" for name in self.programs)

    @property
    def shares_decoding(self) -> bool:
        """Whether each of several ranks decodes some rows of a picture; otherwise each that is asked decodes all."""
        return any(buffer.rank_axis for buffer in self.buffers)

    @property
    def offloads_cache(self) -> bool:
        """Whether the cache lies on the host and its layers are copied in every pass."""
        return any(buffer.device_layers for buffer in self.buffers)

    @property
    def device_pool_bytes(self) -> int:
        """Bytes of the KV pool on the device."""
        return sum(buffer.on_device.nbytes for buffer in self.buffers if buffer.role == "cache")

    @property
    def rows(self) -> int:
        """Rows that can hold a stream: all but a pool's spare row."""
        return self.stream.batch - (self.pool is not None)

    @property
    def call_rows(self) -> int:
        """Rows of the largest call."""
        return self.stream.batch if self.pool is None else self.pool.buckets[-1]
