"""The manifest as frozen dataclasses: everything that an artifact says about itself. The module `records` reads a
manifest from JSON by the types of these dataclasses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from seko_runtime.errors import ManifestError
from seko_runtime.format.json_fields import MAX_INTEGER, as_integer, as_name, as_text
from seko_runtime.format.paths import as_path
from seko_runtime.format.records import Limit, Mark, OneOf, Within

FORMAT_VERSION = 1  # the only format version so far
GPU_SEPARATOR = "-"  # separator between the GPUs of a `Target.arch`
MANIFEST_FILE = "manifest.json"
ENGINES_FOLDER = "engines"
# file beside the manifest, which the manifest cannot list because it signs the manifest
SIGNATURE_FILE = "manifest.sig"
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
PLUGINS_KEY = "tensorrt_plugins"  # key in `Manifest.extra`: the native library with which plans are loaded
CACHE_KEY = "compiler_cache"  # key in `Manifest.extra`: the file of `torch.compiler.save_cache_artifacts`
ROLES = ("cache", "session", "host", "state", "lane")
SOURCES = ("host", "caller")
DEFAULTS = ("zeros", "required", "hold")
# Names of the process groups in engines of several ranks: of calls, and of lanes, which run beside them.
CALL_GROUP, LANE_GROUP = "seko.calls", "seko.lanes"
MAX_RANK = 16
MAX_PIXELS = 1 << 26  # most pixels of a picture: 64 megapixels, 200 MB decoded
MAX_SEED = (1 << 62) - 1  # largest seed of a session
UNKNOWN_WORD = "this runtime knows {}; update it"


def as_shape(value: object, where: str) -> tuple[int, ...]:
    """Read a tensor's shape from JSON: up to 16 positive sizes."""
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise ManifestError(f"{where} is no shape: expected an array of at most {MAX_RANK} integers")
    # type() excludes bool, which is a subclass of int
    if all(type(size) is int and 1 <= size <= MAX_INTEGER for size in value):
        return tuple(value)
    return tuple(as_integer(size, f"{where}[{axis}]", minimum=1) for axis, size in enumerate(value))


def as_device(value: object, where: str) -> str:
    """Read the name of a kind of device (CPU or CUDA) from JSON."""
    device = as_text(value, where)
    if device not in ("cpu", "cuda"):
        raise ManifestError(f"{where} is {device[:40]!r}, expected 'cpu' or 'cuda'")
    return device


def as_sha256(value: object, where: str) -> str:
    """Read a SHA-256 in hexadecimal digits from JSON."""
    digits = as_text(value, where)
    if len(digits) != 64 or set(digits) - set("0123456789abcdef"):
        raise ManifestError(f"{where} is {digits[:80]!r}, expected 64 lower-case hexadecimal digits")
    return digits


Name = Annotated[str, as_name]
FilePath = Annotated[str, as_path]
Shape = Annotated[tuple[int, ...], as_shape]
Dtype = Annotated[str, OneOf(tuple(DTYPE_BYTES))]
Count = Annotated[int, Within(1, 1 << 31)]
Layers = Annotated[int, Within(0, 4096)]

_TENSORS = Limit("MAX_SIGNATURE_TENSORS", "tensors of engine signatures")
_REFERENCES = Limit("MAX_REFERENCES", "references")
_CALLS = Limit("MAX_CALLS", "calls")


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one tensor.

    Parameters
    ----------
    name, dtype : str
        Name and dtype. Engines take their tensors by position.
    shape : tuple of int
        Sizes of the axes, the last axis fastest.
    """

    name: Name
    shape: Shape
    dtype: Dtype

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensor, contiguous."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Buffer(TensorSpec):
    """A tensor that the runtime allocates and keeps for the life of a session.

    Parameters
    ----------
    role : str
        Who writes the buffer, and when. Engine calls write a ``cache`` buffer, which has state of the rows. The runtime
        writes a ``session`` buffer, which has state of the rows, between calls. The host fills a ``host`` buffer before
        a call. A ``state`` buffer is scratch of a call. Programs that run at the same time as calls use a ``lane``
        buffer.
    row_axis : int
        The axis that holds the rows: a multiple of ``state_rows`` long in the role ``cache`` and, in a pool,
        ``session``. Calls index the axes before the row axis, such as passes and layers. The product of the sizes of
        these axes is the buffer's number of layers.
    device_layers : int
        If 0, all layers are on the device. If n, the device holds n layers at a time, and the host holds all layers
        except the `resident_layers`.
    rank_axis : int
        The axis along which ranks split the buffer, in the order of ranks; 0: each rank has the whole buffer.
    """

    role: Annotated[str, OneOf(ROLES), Mark.REQUIRED] = "state"
    row_axis: Annotated[int, Within(0, MAX_RANK)] = 0
    device_layers: Layers = 0
    rank_axis: Annotated[int, Within(0, MAX_RANK)] = 0

    @property
    def layers(self) -> int:
        """Number of layers that the buffer holds; 1 if no axis comes before the rows."""
        return math.prod(self.shape[: self.row_axis])

    @property
    def resident_layers(self) -> int:
        """Number of an offloaded buffer's first layers that are on the device at all times: the number of layer places
        on the device, minus three."""
        return max(0, self.device_layers - 3)

    @property
    def on_host(self) -> Buffer:
        """The layers of an offloaded buffer that are in host memory, on one axis."""
        shape = (self.layers - self.resident_layers, *self.shape[self.row_axis :])
        return replace(self, shape=shape, row_axis=1, device_layers=0)

    @property
    def on_device(self) -> Buffer:
        """The part of the buffer that is on the device; for an offloaded buffer its places for layers, on one axis."""
        if not self.device_layers:
            return self
        shape = (self.device_layers, *self.shape[self.row_axis :])
        return replace(self, shape=shape, row_axis=1, device_layers=0)


@dataclass(frozen=True)
class InputSpec(TensorSpec):
    """An input of the model that changes while a session runs.

    Parameters
    ----------
    shape : tuple of int
        Shape of the array of one row; of an input per ``pass`` it begins with the number of passes.
    buffer : str
        Name of the buffer from which the programs read the input. With b rows of a call, its shape is [state_rows, ...]
        in the role ``session`` for an input per ``session`` or ``prompt``, otherwise [b, ...] per ``chunk`` and
        [passes, b, ...] per ``pass`` in the role ``host``.
    per : str
        How often the input may change, as a word defined by the workload: of video ``session``, ``prompt`` (the program
        ``prompt`` then runs again), ``chunk`` or ``pass``.
    source : str
        Who supplies the input. ``host``: the runtime fills the input; the name of its buffer decides with which values.
        ``caller``: the caller of the session supplies the input.
    default : str
        What happens if the caller supplies no value for a row. ``zeros``: the value is zeros. ``hold``: the row keeps
        the last supplied value, zeros before the first. ``required``: an error is raised.
    kind : str or None
        Meaning of the input, for helpers that compute its array from a user's input.
    """

    buffer: Name
    per: Name
    source: Annotated[str, OneOf(SOURCES, complaint=UNKNOWN_WORD), Mark.REQUIRED] = "caller"
    default: Annotated[str, OneOf(DEFAULTS, complaint=UNKNOWN_WORD), Mark.REQUIRED] = "required"
    kind: Name | None = None


@dataclass(frozen=True)
class ControlSpec:
    """A control of the model: what a person steers a session with. The control of this kind computes inputs from a
    person's events; see `seko_runtime.controls`.

    Parameters
    ----------
    kind : str
        The kind of the control, by which its class is found.
    name : str
        The control's name in this artifact.
    inputs : mapping of str to str
        Names of the model's inputs that the control fills, by the words of its kind.
    parameters : mapping of str to object
        Bindings, units and sizes, as the kind defines them.
    """

    kind: Name
    name: Name
    inputs: Annotated[Mapping[str, Name], Limit("MAX_ENTRIES", "entries")] = field(default_factory=dict)
    parameters: Annotated[Mapping[str, object], Limit("MAX_ENTRIES", "entries")] = field(default_factory=dict)


@dataclass(frozen=True)
class Weight(TensorSpec):
    """A tensor in a safetensors file of the artifact.

    Parameters
    ----------
    file : str
        Path of the safetensors file.
    on_host : bool
        Whether the tensor stays in host memory, from where each call that takes it has it copied to the device. Whoever
        has the memory may ignore it.
    """

    file: Annotated[FilePath, Mark.REQUIRED] = ""
    on_host: bool = False


@dataclass(frozen=True)
class EngineSpec:
    """An engine's file and signature.

    Parameters
    ----------
    name : str
        Name by which programs call the engine.
    file : str
        Path of the engine's file, which is of the kind that ``backend`` says.
    inputs, outputs : tuple of TensorSpec
        The tensors that the engine takes and returns, in order.
    mutates : tuple of str
        Names of the inputs that the engine writes in place.
    """

    name: Name
    file: FilePath
    inputs: Annotated[tuple[TensorSpec, ...], _TENSORS]
    outputs: Annotated[tuple[TensorSpec, ...], _TENSORS]
    mutates: Annotated[tuple[Name, ...], Mark.REQUIRED] = ()


@dataclass(frozen=True)
class Call:
    """One call of an engine in a program.

    Parameters
    ----------
    engine : str
        Name of the engine.
    inputs, outputs : tuple of str
        A reference to a tensor for each tensor of the engine's signature.
    """

    engine: Name
    inputs: Annotated[tuple[str, ...], _REFERENCES]
    outputs: Annotated[tuple[str, ...], _REFERENCES]


@dataclass(frozen=True)
class Target:
    """The kind of machine for which the engines were built.

    Parameters
    ----------
    device, arch : str
        Kind of device and its architecture. For ``cpu``, ``arch`` is Linux's name of the architecture, such as
        ``x86_64``. For ``cuda``, ``arch`` is the compute capability ``sm_NN``, or several of them joined by hyphens.
    torch, cuda : str
        Versions of torch and CUDA with which the engines were built. The installed torch must be equal up to the first
        ``+``; CUDA must be equal on ``cuda``.
    cpu_flags : tuple of str
        CPU features that the engines' compiled host code may use.
    host_arch : str or None
        Linux's name of the host processor's architecture, such as ``x86_64``, which must be equal on ``cuda``; not
        checked if None.
    """

    device: Annotated[str, as_device]
    arch: Name
    torch: str
    cuda: str | None = None
    cpu_flags: tuple[Name, ...] = ()
    host_arch: Name | None = None

    @property
    def archs(self) -> tuple[str, ...]:
        """The GPU or CPU architectures on which the engines run."""
        return tuple(self.arch.split(GPU_SEPARATOR))


@dataclass(frozen=True)
class Pool:
    """The rows of a pool, each of which is a separate session. An engine call carries some of the rows, in any order.

    Parameters
    ----------
    buckets : tuple of int
        Numbers of rows that a call can have, ascending. Each number (bucket) has its own programs, named
        ``....{bucket}``. The last of the manifest's ``state_rows`` is the spare row, to which batch indices without a
        session write.
    """

    buckets: Annotated[tuple[int, ...], Limit("MAX_BUCKETS", "buckets")]

    def bucket(self, rows: int) -> int:
        """Return the smallest number of rows, at least ``rows``, that a call can have."""
        return next(bucket for bucket in self.buckets if bucket >= rows)


@dataclass(frozen=True)
class KvPool:
    """The format of the KV caches and their size, for tools.

    Parameters
    ----------
    scheme : str
        What the bytes of the caches mean; see ``docs/kv-quality.md``.
    pool_bytes, bf16_pool_bytes : int
        Number of bytes of the caches, and the number that they would have in bf16.
    bits_per_number : float
        Bits that a cached number takes, with its share of the scales.
    """

    scheme: Name
    pool_bytes: int
    bf16_pool_bytes: int
    bits_per_number: float


@dataclass(frozen=True)
class FileEntry:
    """Hash and size of one file of the artifact.

    Parameters
    ----------
    sha256 : str
        The SHA-256 in hexadecimal digits.
    size : int
        Number of bytes.
    """

    sha256: Annotated[str, as_sha256]
    size: int


@dataclass(frozen=True)
class Workload:
    """Base class of the manifest's object ``workload``, with the tables of one kind of model. Each workload derives
    its own class.

    Parameters
    ----------
    kind : str
        Name of the workload, such as ``speech``.
    """

    kind: Name

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the artifact's files that the workload reads."""
        return ()


@dataclass(frozen=True)
class Manifest:
    """The manifest of an artifact. Each workload has a subclass of `Manifest`, whose field ``workload`` has the
    workload's own class.

    Parameters
    ----------
    name : str
        Name of the artifact, for people.
    backend : str
        What loads the engines' files.
    target : Target
        The kind of machine on which the artifact can be opened.
    workload : Workload
        The part of one kind of model.
    state_rows : int
        Number of rows for which buffers hold state. In a pool the last row is spare; without one every engine call
        carries all rows.
    buffers : tuple of Buffer
        The tensors of a session, or of a pool.
    weights : tuple of Weight
        The tensors that files of the artifact hold.
    engines : tuple of EngineSpec
        The engines.
    programs : mapping of str to tuple of Call
        The calls of each program in their order, by the program's name.
    producer : mapping of str to str
        Versions of what built the artifact.
    model : mapping of str to object
        Sizes of the model. Snapshots are of one model.
    files : mapping of str to FileEntry
        Size and hash of every file but ``manifest.json`` and ``manifest.sig``, by path.
    extra : mapping of str to str
        What the backend needs besides.
    format_version : int
        Version of the format.
    pool : Pool or None
        The pool, if the rows are separate sessions.
    ranks : int
        Number of processes, each with a GPU of its own, that run the artifact together.
    inputs : tuple of InputSpec
        What a caller or the host writes while a session runs.
    controls : tuple of ControlSpec or None
        What makes inputs of a person's events.
    least_bytes : int or None
        Number of bytes of the first rank's GPU without which the artifact cannot run, with a session or its pool.
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
    format_version: Annotated[int, Within(FORMAT_VERSION, FORMAT_VERSION), Mark.REQUIRED] = FORMAT_VERSION
    pool: Pool | None = None
    ranks: Annotated[int, Within(1, 64)] = 1
    inputs: Annotated[tuple[InputSpec, ...], Limit("MAX_INPUTS", "inputs"), Mark.REQUIRED] = ()
    controls: Annotated[tuple[ControlSpec, ...], Limit("MAX_INPUTS", "controls")] | None = None
    least_bytes: Annotated[int, Within(1, MAX_INTEGER)] | None = None

    @property
    def caller_inputs(self) -> tuple[InputSpec, ...]:
        """The model inputs that the caller of a session supplies."""
        return tuple(spec for spec in self.inputs if spec.source == "caller")

    @property
    def control_specs(self) -> tuple[ControlSpec, ...]:
        """The controls of the artifact; a workload may add those that an older manifest does not list."""
        return self.controls or ()

    @property
    def offloads_cache(self) -> bool:
        """Whether the KV cache is in host memory and its layers are copied to the device in every pass."""
        return any(buffer.device_layers for buffer in self.buffers)

    @property
    def host_weights(self) -> frozenset[str]:
        """The names of the weights that stay in host memory."""
        return frozenset(weight.name for weight in self.weights if weight.on_host)

    @property
    def device_pool_bytes(self) -> int:
        """Number of bytes of the KV caches on the device."""
        return sum(buffer.on_device.nbytes for buffer in self.buffers if buffer.role == "cache")

    @property
    def rows(self) -> int:
        """Number of rows that can hold a session: all except a pool's spare row."""
        return self.state_rows - (self.pool is not None)

    @property
    def call_rows(self) -> int:
        """Number of rows of the largest engine call."""
        return self.state_rows if self.pool is None else self.pool.buckets[-1]
