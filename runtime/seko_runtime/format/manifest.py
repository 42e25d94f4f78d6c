"""The manifest as frozen dataclasses: everything an artifact says about itself. `records` reads it by their types."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from seko_runtime.errors import ManifestError
from seko_runtime.format.json_fields import MAX_INTEGER, as_integer, as_name, as_text
from seko_runtime.format.paths import as_path
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
HOST_ROLE = "chunk"  # of a buffer that the host fills before each call
PERIODS = ("session", "prompt", "chunk", "pass")  # how often an input may change
SOURCES = ("host", "caller")
DEFAULTS = ("zeros", "required", "hold")
# Names of the process groups in engines of several ranks: of a chunk, and of decoding, which runs beside the next one.
RANK_GROUP, DECODE_GROUP = "seko.ranks", "seko.ranks.decode"
MAX_RANK = 16
UNKNOWN_WORD = "this runtime knows {}; update it"


def as_shape(value: object, where: str) -> tuple[int, ...]:
    """Read a shape: up to 16 positive sizes."""
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise ManifestError(f"{where} is no shape: expected an array of at most {MAX_RANK} integers")
    if all(type(size) is int and 1 <= size <= MAX_INTEGER for size in value):  # no bool is of type int
        return tuple(value)
    return tuple(as_integer(size, f"{where}[{axis}]", minimum=1) for axis, size in enumerate(value))


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
Shape = Annotated[tuple[int, ...], as_shape]
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
    per: Annotated[str, one_of(PERIODS, complaint=UNKNOWN_WORD), Mark.REQUIRED] = "chunk"
    source: Annotated[str, one_of(SOURCES, complaint=UNKNOWN_WORD), Mark.REQUIRED] = "caller"
    default: Annotated[str, one_of(DEFAULTS, complaint=UNKNOWN_WORD), Mark.REQUIRED] = "required"
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

    ``first_place`` is the index of that layer among the layers of its buffers.
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
class Pool:
    """Rows that are separate sessions; a call carries some of them, in any order.

    Parameters
    ----------
    buckets : tuple of int
        Row counts of calls, ascending. Each bucket has its own programs, named ``....{bucket}``. The last of the
        manifest's ``state_rows`` is the spare row, to which batch indices without a session write.
    """

    buckets: Annotated[tuple[int, ...], Limit("MAX_BUCKETS", "buckets")]

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket with at least this many rows."""
        return next(bucket for bucket in self.buckets if bucket >= rows)


@dataclass(frozen=True)
class FileEntry:
    """Hash and size of one file of the artifact."""

    sha256: Annotated[str, _as_sha256]
    size: int


@dataclass(frozen=True)
class Workload:
    """Base class of the manifest's object ``workload``: what only one kind of model has. Each workload derives its own.

    Parameters
    ----------
    kind : str
        The workload's name.
    """

    kind: Name

    @property
    def files(self) -> tuple[str, ...]:
        """Files of the artifact that the workload reads."""
        return ()


@dataclass(frozen=True)
class Manifest:
    """Everything an artifact says about itself; see `docs/engine-format.md` for each field.

    ``state_rows`` counts the rows for which buffers hold state; without a `Pool` every call carries all of them. Each
    workload has a subclass, whose ``workload`` is its own.
    """

    name: Name
    backend: Name
    target: Target
    workload: Workload
    state_rows: Count
    buffers: Annotated[tuple[Buffer, ...], Limit("MAX_BUFFERS", "buffers")]
    weights: Annotated[tuple[Weight, ...], Limit("MAX_WEIGHTS", "weights")]
    engines: Annotated[tuple[EngineSpec, ...], Limit("MAX_ENGINES", "engines")]
    programs: Mapping[str, Annotated[tuple[Call, ...], _CALLS]]
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
    inputs: Annotated[tuple[InputSpec, ...], Limit("MAX_INPUTS", "inputs"), Mark.REQUIRED] = ()

    @property
    def caller_inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that the caller supplies."""
        return tuple(one for one in self.inputs if one.source == "caller")

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
        return self.state_rows - (self.pool is not None)

    @property
    def call_rows(self) -> int:
        """Rows of the largest call."""
        return self.state_rows if self.pool is None else self.pool.buckets[-1]
