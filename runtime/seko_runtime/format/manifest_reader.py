"""Strict reading of `manifest.json`: types, bounds, names, paths. What programs may do is checked apart."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise

from seko_runtime.errors import FormatVersionError, ManifestError, ModuleFileError, PathEscapeError
from seko_runtime.format import budgets
from seko_runtime.format.budgets import Budget
from seko_runtime.format.json_fields import (
    MAX_INTEGER,
    Fields,
    as_flag,
    as_free_object,
    as_integer,
    as_items,
    as_name,
    as_number,
    as_text,
    parse_json,
)
from seko_runtime.format.manifest import (
    CLEANINGS,
    DEFAULTS,
    DTYPE_BYTES,
    FIRST_LAYER_VERSION,
    FORMAT_VERSION,
    INPUT_VERSION,
    MANIFEST_FILE,
    OFFLOADED_VERSION,
    PERIODS,
    POOL_VERSION,
    ROLES,
    SIGNATURE_FILE,
    SOURCES,
    WORKLOADS,
    Buffer,
    Call,
    EngineSpec,
    FileEntry,
    Golden,
    GoldenBound,
    InputSpec,
    KvPool,
    Manifest,
    Pool,
    Schedule,
    Stream,
    Target,
    TensorSpec,
    Text,
    Video,
    Weight,
)

MAX_RANK = 16
MAX_SEED = (1 << 62) - 1  # as a session takes them
MAX_TENSOR_BYTES = 1 << 48
_MODULE_PATH = re.compile(r"[^/]*\.(?:py|pyc|so|pth)|[^/]+/__init__\.(?:[^/]+\.)?(?:py|pyc|so)")


def parse_manifest(document: bytes) -> Manifest:
    """Read a manifest; unknown fields of a known format version are ignored.

    Parameters
    ----------
    document : bytes
        Content of `manifest.json`, untrusted.

    Returns
    -------
    Manifest
        With every field's type, name, path and reference to a file checked. Programs are checked apart,
        by `programs_check.resolve_programs`.

    Raises
    ------
    FormatVersionError
        If the format is newer than this runtime.
    PathEscapeError
        If a file name is no plain relative path.
    ManifestError
        If anything else is wrong.
    """
    fields = Fields(parse_json(document, MANIFEST_FILE), MANIFEST_FILE)
    version = fields.integer("format_version", minimum=1)
    if version > FORMAT_VERSION:  # before any other field: a newer format may have changed them all
        raise FormatVersionError(
            f"artifact has format version {version}, this runtime reads up to {FORMAT_VERSION}; "
            "install a newer seko-runtime"
        )
    tensors = Budget(budgets.MAX_SIGNATURE_TENSORS, "tensors of engine signatures")
    calls, references = Budget(budgets.MAX_CALLS, "calls"), Budget(budgets.MAX_REFERENCES, "references")
    manifest = Manifest(
        format_version=version,
        name=fields.name("name"),
        backend=fields.name("backend"),
        target=_read_target(Fields(fields.value("target"), "target")),
        producer=fields.entries("producer", as_text, Budget(budgets.MAX_ENTRIES, "entries")),
        model=as_free_object(fields.value("model"), "model"),
        stream=_read_stream(Fields(fields.value("stream"), "stream")),
        kv=_read_kv(Fields(fields.value("kv"), "kv")),
        schedule=_read_schedule(Fields(fields.value("schedule"), "schedule")),
        buffers=fields.items(
            "buffers", partial(_read_buffer, version), Budget(budgets.MAX_BUFFERS, "buffers")
        ),
        weights=fields.items("weights", _read_weight, Budget(budgets.MAX_WEIGHTS, "weights")),
        engines=fields.items(
            "engines", partial(_read_engine, tensors), Budget(budgets.MAX_ENGINES, "engines")
        ),
        programs=fields.entries("programs", partial(_read_calls, version, calls, references)),
        output=fields.name("output"),
        golden=fields.optional("golden", _read_golden),
        text=fields.optional("text", _read_text),
        video=fields.optional("video", _read_video),
        pool=fields.optional("pool", _read_pool) if version >= POOL_VERSION else None,
        workload=_one_of(fields, "workload", WORKLOADS) if version >= INPUT_VERSION else WORKLOADS[0],
        inputs=fields.items("inputs", _read_input, Budget(budgets.MAX_INPUTS, "inputs"))
        if version >= INPUT_VERSION
        else (),
        files=fields.entries("files", _read_file_entry, Budget(budgets.MAX_FILES, "files")),
        extra=fields.entries("extra", as_text, Budget(budgets.MAX_ENTRIES, "entries")),
    )
    Budget(budgets.MAX_BUFFER_BYTES, "bytes").take(sum(one.nbytes for one in manifest.buffers), "buffers")
    Budget(budgets.MAX_FILE_BYTES, "bytes").take(sum(one.size for one in manifest.files.values()), "files")
    _check_files(manifest)
    return manifest


def check_relative_path(path: str, where: str) -> str:
    """Return ``path`` if it is a plain relative path inside the artifact.

    Raises
    ------
    PathEscapeError
        If it is absolute, empty, too long or too deep, holds a backslash, a control character, or an empty, ``.`` or
        ``..`` part.
    """
    parts = path.split("/")
    bad = len(path) > 1024 or len(parts) > budgets.MAX_PATH_PARTS
    bad = bad or any(part in ("", ".", "..") or len(part) > 255 for part in parts)
    if bad or "\\" in path or any(ord(letter) < 32 or ord(letter) == 127 for letter in path):
        raise PathEscapeError(
            f"{where} names the file {path[:80]!r}, expected a relative path inside the artifact "
            f"(at most {budgets.MAX_PATH_PARTS} parts joined by '/', none empty or '..'); do not open artifacts from "
            "this source"
        )
    return path


def check_no_module(path: str) -> None:
    """Refuse a file of an artifact that Python would import if it were started in the artifact's folder.

    Raises
    ------
    ModuleFileError
        If ``path``, relative to the folder, is a module, a path file (`.pth`) or the face of a package there.
    """
    if _MODULE_PATH.fullmatch(path):
        raise ModuleFileError(
            f"the artifact holds {path[:80]!r}, which Python would import if it were started there, and no artifact "
            "needs; do not open artifacts from this source"
        )


def as_path(value: object, where: str) -> str:
    """Read a file name of the artifact."""
    if not isinstance(value, str):
        return as_text(value, where)  # raises with the type that was found
    return as_text(check_relative_path(value, where), where)


def as_shape(value: object, where: str) -> tuple[int, ...]:
    """Read a shape: up to 16 positive sizes."""
    if not isinstance(value, list) or len(value) > MAX_RANK:
        raise ManifestError(f"{where} is no shape: expected an array of at most {MAX_RANK} integers")
    if all(type(size) is int and 1 <= size <= MAX_INTEGER for size in value):  # no bool is of type int
        return tuple(value)
    return tuple(as_integer(size, f"{where}[{axis}]", minimum=1) for axis, size in enumerate(value))


def as_dtype(value: object, where: str) -> str:
    """Read the name of a dtype."""
    text = as_text(value, where)
    if text not in DTYPE_BYTES:
        raise ManifestError(f"{where} is {text[:40]!r}, expected one of {', '.join(DTYPE_BYTES)}")
    return text


def _check_files(manifest: Manifest) -> None:
    """Every file that a table names is in `files`; `files` may list more, which is hashed and left alone."""
    used = {weight.file for weight in manifest.weights} | {engine.file for engine in manifest.engines}
    if manifest.golden is not None:
        used.add(manifest.golden.file)
    if manifest.text is not None:
        used.add(manifest.text.tokenizer)
    for path in sorted(used - set(manifest.files)):
        raise ManifestError(f"{path!r} is used but has no entry in files; rebuild the artifact")
    for path in manifest.files:
        if check_relative_path(path, "files") in (MANIFEST_FILE, SIGNATURE_FILE):
            raise ManifestError(f"files lists {path}, which cannot hold its own hash; rebuild the artifact")
        check_no_module(path)


def _read_tensor(value: object, where: str) -> TensorSpec:
    fields = Fields(value, where)
    spec = TensorSpec(
        fields.name("name"),
        as_shape(fields.value("shape"), f"{where}.shape"),
        as_dtype(fields.value("dtype"), f"{where}.dtype"),
    )
    if spec.nbytes > MAX_TENSOR_BYTES:
        raise ManifestError(
            f"{where} ({spec.name}) would take {spec.nbytes} bytes, at most {MAX_TENSOR_BYTES} may be"
        )
    return spec


def _read_input(value: object, where: str) -> InputSpec:
    fields, spec = Fields(value, where), _read_tensor(value, where)
    return InputSpec(
        spec.name,
        spec.shape,
        spec.dtype,
        fields.name("buffer"),
        _one_of(fields, "per", PERIODS),
        _one_of(fields, "source", SOURCES),
        _one_of(fields, "default", DEFAULTS),
        fields.optional("kind", as_name),
    )


def _one_of(fields: Fields, key: str, known: tuple[str, ...]) -> str:
    """Read a word that this runtime must know: what it means is the reader's to do."""
    text = fields.text(key)
    if text not in known:
        raise ManifestError(
            f"{fields.where}.{key} is {text[:40]!r}, this runtime knows {', '.join(known)}; update it"
        )
    return text


def _read_buffer(version: int, value: object, where: str) -> Buffer:
    fields, spec = Fields(value, where), _read_tensor(value, where)
    role = fields.text("role")
    if role not in ROLES:
        raise ManifestError(f"{where}.role is {role[:40]!r}, expected one of {', '.join(ROLES)}")
    layered = fields.flag("layered", default=False)
    device_layers = 0
    if version >= OFFLOADED_VERSION and "device_layers" in fields:
        device_layers = fields.integer("device_layers", maximum=4096)
    return Buffer(spec.name, spec.shape, spec.dtype, role, layered, device_layers)


def _read_weight(value: object, where: str) -> Weight:
    spec = _read_tensor(value, where)
    return Weight(
        spec.name, spec.shape, spec.dtype, as_path(Fields(value, where).value("file"), f"{where}.file")
    )


def _read_engine(tensors: Budget, value: object, where: str) -> EngineSpec:
    fields = Fields(value, where)
    return EngineSpec(
        name=fields.name("name"),
        file=as_path(fields.value("file"), f"{where}.file"),
        inputs=fields.items("inputs", _read_tensor, tensors),
        outputs=fields.items("outputs", _read_tensor, tensors),
        mutates=fields.items("mutates", as_name),
    )


def _read_calls(
    version: int, calls: Budget, references: Budget, value: object, where: str
) -> tuple[Call, ...]:
    return as_items(value, where, partial(_read_call, version, references), calls)


def _read_call(version: int, references: Budget, value: object, where: str) -> Call:
    fields = Fields(value, where)
    layers = fields.integer("layers", maximum=4096) if "layers" in fields else 0
    first = place = 0
    if version >= FIRST_LAYER_VERSION:
        first, place = (
            fields.integer(key, maximum=4096) if key in fields else 0
            for key in ("first_layer", "first_place")
        )
    if (first or place) and not layers:
        raise ManifestError(f"{where} begins with layer {max(first, place)}, but has no layers")
    return Call(
        fields.name("engine"),
        fields.items("inputs", as_text, references),
        fields.items("outputs", as_text, references),
        layers,
        first,
        place,
    )


def _read_target(fields: Fields) -> Target:
    device = fields.text("device")
    if device not in ("cpu", "cuda"):
        raise ManifestError(f"target.device is {device[:40]!r}, expected 'cpu' or 'cuda'")
    return Target(
        device=device,
        arch=fields.name("arch"),
        torch=fields.text("torch"),
        cuda=fields.optional("cuda", as_text),
        cpu_flags=fields.items("cpu_flags", as_name) if "cpu_flags" in fields else (),
        host_arch=fields.optional("host_arch", as_name),
    )


def _read_stream(fields: Fields) -> Stream:
    latent = as_shape(fields.value("latent_shape"), "stream.latent_shape")
    if len(latent) != 3:
        raise ManifestError(f"stream.latent_shape has {len(latent)} sizes, expected channels, rows, columns")
    size = {
        key: fields.integer(key, minimum=1, maximum=1 << 31)
        for key in ("batch", "chunk_frames", "ring_frames", "frame_tokens", "height", "width", "fps")
    }
    stream = Stream(
        latent_shape=(latent[0], latent[1], latent[2]),
        sink_frames=fields.integer("sink_frames", maximum=1 << 31),
        video_frames_per_latent=fields.integer("video_frames_per_latent", minimum=1, maximum=1 << 16),
        rings=fields.entries("rings", as_integer, Budget(budgets.MAX_ENTRIES, "entries"))
        if "rings" in fields
        else {},
        reference_frames=fields.optional("reference_frames", _read_frames) or 0,
        **size,
    )
    Budget(budgets.MAX_PIXELS, "pixels").take(stream.height * stream.width, "stream")
    if stream.chunk_frames > stream.ring_frames:
        raise ManifestError(
            f"stream.chunk_frames {stream.chunk_frames} is larger than ring_frames {stream.ring_frames}: "
            "two frames of one chunk would share a slot"
        )
    for kind, ring_frames in stream.rings.items():
        if not stream.chunk_frames <= ring_frames <= stream.ring_frames:
            raise ManifestError(
                f"stream.rings.{kind} is {ring_frames}, expected {stream.chunk_frames} (chunk_frames) to "
                f"{stream.ring_frames} (ring_frames)"
            )
    return stream


def _read_frames(value: object, where: str) -> int:
    return as_integer(value, where, minimum=1, maximum=1 << 16)


def _read_kv(fields: Fields) -> KvPool:
    return KvPool(
        fields.name("scheme"),
        fields.integer("pool_bytes"),
        fields.integer("bf16_pool_bytes"),
        fields.number("bits_per_number"),
    )


def _read_schedule(fields: Fields) -> Schedule:
    schedule = Schedule(
        denoise_passes=fields.integer("denoise_passes", minimum=1, maximum=1024),
        timesteps=fields.items("timesteps", as_number),
        sigmas=fields.items("sigmas", as_number),
        context_timestep=fields.number("context_timestep"),
        sampler=fields.name("sampler"),
        shift=fields.optional("shift", as_number),
    )
    if {len(schedule.timesteps), len(schedule.sigmas)} != {schedule.denoise_passes}:
        raise ManifestError(
            f"schedule has {len(schedule.timesteps)} timesteps and {len(schedule.sigmas)} sigmas, "
            f"expected {schedule.denoise_passes} of each"
        )
    if schedule.shift is not None and schedule.shift <= 0:
        raise ManifestError(f"schedule.shift is {schedule.shift}, expected a positive number")
    return schedule


def _read_golden(value: object, where: str) -> Golden:
    fields = Fields(value, where)
    chunks = fields.items("chunks", lambda item, place: as_integer(item, place, maximum=100_000))
    golden = Golden(
        file=as_path(fields.value("file"), f"{where}.file"),
        seeds=fields.items(
            "seeds", lambda item, place: as_integer(item, place, minimum=-MAX_SEED, maximum=MAX_SEED)
        ),
        chunks=chunks,
        tolerance=fields.number("tolerance"),
        text=fields.optional("text", as_name),
        cache_step=fields.optional("cache_step", as_integer) or 0,
        video_step=fields.optional("video_step", as_integer) or 0,
        prompt=fields.optional("prompt", as_text),
        reference=fields.optional("reference", as_name),
        bounds=fields.items("bounds", _read_bound) if "bounds" in fields else (),
    )
    if not chunks or list(chunks) != sorted(set(chunks)):
        raise ManifestError(f"{where}.chunks is {list(chunks)[:8]}, expected rising chunk numbers")
    if golden.bounds and len(golden.bounds) != len(chunks):
        raise ManifestError(
            f"{where}.bounds has {len(golden.bounds)} entries, expected one for each of the {len(chunks)} chunks"
        )
    return golden


def _read_bound(value: object, where: str) -> GoldenBound:
    fields = Fields(value, where)
    return GoldenBound(fields.number("latents"), fields.number("cache"), fields.number("video"))


def _read_text(value: object, where: str) -> Text:
    fields = Fields(value, where)
    text = Text(
        tokenizer=as_path(fields.value("tokenizer"), f"{where}.tokenizer"),
        tokens=fields.integer("tokens", minimum=1, maximum=1 << 20),
        pad_id=fields.integer("pad_id", maximum=1 << 31),
        truncate=as_flag(fields.value("truncate"), f"{where}.truncate"),
        cleaning=fields.text("cleaning"),
    )
    if text.cleaning not in CLEANINGS:
        raise ManifestError(
            f"{where}.cleaning is {text.cleaning[:40]!r}, this runtime knows {', '.join(CLEANINGS)}; update it"
        )
    return text


def _read_video(value: object, where: str) -> Video:
    fields = Fields(value, where)
    size = {
        key: fields.integer(key, minimum=1, maximum=1 << 31)
        for key in ("first_frames", "chunk_frames", "height", "width")
    }
    Budget(budgets.MAX_PIXELS, "pixels").take(size["height"] * size["width"], where)
    return Video(**size)


def _read_pool(value: object, where: str) -> Pool:
    fields = Fields(value, where)
    buckets = fields.items("buckets", as_integer, Budget(budgets.MAX_BUCKETS, "buckets"))
    if not buckets or any(low >= high for low, high in pairwise((0, *buckets))):
        raise ManifestError(f"{where}.buckets are {list(buckets)}, expected rising numbers from 1 on")
    return Pool(buckets)


def _read_file_entry(value: object, where: str) -> FileEntry:
    fields = Fields(value, where)
    sha256 = fields.text("sha256")
    if len(sha256) != 64 or set(sha256) - set("0123456789abcdef"):
        raise ManifestError(f"{where}.sha256 is {sha256[:80]!r}, expected 64 lower-case hexadecimal digits")
    return FileEntry(sha256, fields.integer("size"))
