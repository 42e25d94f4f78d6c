"""Opens checkpoint files by their content and lists the tensors inside; judges no key and no value."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from seko_export.checkpoints.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    MissingGeneratorError,
    NotACheckpointError,
    ShardIndexError,
    TruncatedCheckpointError,
    UnsafePickleError,
)

KNOWN_FORMATS = (
    "a Self-Forcing .pt, Wan safetensors (a file, or a folder with an index), "
    "or diffusers safetensors (a file, or a folder)"
)

_MAX_SAFETENSORS_HEADER = 100_000_000  # bytes; the format's own limit
_SCANNED_BYTES = 10_000_000  # of a pickle, for the message that refuses it
_SAFETENSORS_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HARMLESS_GLOBALS = frozenset(
    {"collections.OrderedDict", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"}
)


@dataclass(frozen=True)
class TensorSource:
    """One stored tensor, not read yet.

    Parameters
    ----------
    key : str
        The key, free of wrappers that only say how the trainer held the model.
    file_key : str
        The key as the file spells it.
    shape : tuple[int, ...]
        Stored shape.
    dtype_name : str
        Stored dtype, in the file's own words.
    dtype : torch.dtype or None
        The same for torch; None where the loader does not read that kind.
    read : Callable[[], torch.Tensor]
        Gives the tensor on the CPU, mapped from the file.
    """

    key: str
    file_key: str
    shape: tuple[int, ...]
    dtype_name: str
    dtype: torch.dtype | None
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class OpenedFiles:
    """What lies at a path: the container, the part chosen in it, its size, its tensors."""

    container: str  # "pt" or "safetensors"
    part: str  # "generator", "generator_ema", or "all" where the container has no parts
    file_bytes: int
    sources: tuple[TensorSource, ...]


def open_files(path: Path, *, use_ema: bool) -> OpenedFiles:
    """Open the checkpoint at ``path``, whatever container its bytes are.

    Parameters
    ----------
    path : Path
        A file, or a folder that holds one checkpoint (its own or in ``transformer/``).
    use_ema : bool
        Which part of a `.pt` to take: ``generator_ema`` or ``generator``.

    Returns
    -------
    OpenedFiles
        The tensors inside, unread.

    Raises
    ------
    CheckpointError
        Its subclass for the cause; see `seko_export.checkpoints.errors`.
    """
    try:
        if path.is_dir():
            return _open_folder(path)
        if not path.exists():
            raise CheckpointNotFoundError(f"no checkpoint at {path}: give the path of {KNOWN_FORMATS}")
        if not path.is_file():
            raise NotACheckpointError(f"{path} is neither a file nor a folder; expected {KNOWN_FORMATS}")
        with path.open("rb") as file:
            head = file.read(64)
        file_bytes = path.stat().st_size
        if _looks_like_safetensors(head):
            return OpenedFiles("safetensors", "all", file_bytes, _open_safetensors(path))
        if head.startswith(b"PK\x03\x04"):
            part = "generator_ema" if use_ema else "generator"
            return OpenedFiles("pt", part, file_bytes, _open_pt(path, part))
    except OSError as fault:
        raise CheckpointNotFoundError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    raise _refused_content(path, head)


def _open_folder(folder: Path) -> OpenedFiles:
    home = folder
    if not any(folder.glob("*.safetensors*")) and (folder / "transformer").is_dir():
        home = folder / "transformer"  # a diffusers pipeline keeps the DiT there
    indices = sorted(home.glob("*.safetensors.index.json"))
    # A shard of nobody's index stays in the list: without its index it is one file among several.
    files = sorted(home.glob("*.safetensors"))
    choices = indices or files
    if not choices:
        raise NotACheckpointError(
            f"the folder {folder} holds no *.safetensors and no *.safetensors.index.json; "
            f"expected {KNOWN_FORMATS} (a .pt is named itself, not its folder)"
        )
    if len(choices) > 1:
        names = ", ".join(choice.name for choice in choices[:20])
        raise AmbiguousCheckpointError(
            f"{home} holds {len(choices)} checkpoints and no single index: {names}; "
            "name the file, or keep one index in the folder"
        )
    if indices:
        return _open_sharded(indices[0])
    with files[0].open("rb") as file:
        head = file.read(64)
    if not _looks_like_safetensors(head):
        raise _refused_content(files[0], head)
    return OpenedFiles("safetensors", "all", files[0].stat().st_size, _open_safetensors(files[0]))


def _open_sharded(index: Path) -> OpenedFiles:
    weight_map = _read_weight_map(index)
    sources: list[TensorSource] = []
    file_bytes = 0
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            raise ShardIndexError(f"{index} names the shard {shard!r}, which is not there; fetch it again")
        file_bytes += path.stat().st_size
        inside = _open_safetensors(path)
        listed = {key for key, name in weight_map.items() if name == shard}
        stored = {source.file_key for source in inside}
        if listed != stored:
            raise ShardIndexError(
                f"{index} and the shard {shard!r} disagree: {len(listed - stored)} keys are listed and not "
                f"stored, {len(stored - listed)} stored and not listed "
                f"(first: {min(listed ^ stored)!r}); they are of different checkpoints, fetch them again"
            )
        sources.extend(inside)
    return OpenedFiles("safetensors", "all", file_bytes, tuple(sources))


def _read_weight_map(index: Path) -> Mapping[str, str]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as fault:
        raise ShardIndexError(f"{index} is no JSON: {fault}; fetch it again") from fault
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ShardIndexError(f"{index} has no 'weight_map' of keys to shard names; fetch it again")
    for shard in weight_map.values():
        # Shards lie beside their index. Symlinks are followed: the Hugging Face cache is made of them.
        if not isinstance(shard, str) or shard in ("", ".", "..") or any(sign in shard for sign in "/\\\0"):
            raise ShardIndexError(
                f"{index} names the shard {shard!r}; expected a plain file name in the same folder: "
                "an index that leaves its folder is not followed"
            )
    return weight_map


def _looks_like_safetensors(head: bytes) -> bool:
    return (
        len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER
    )


def _open_safetensors(path: Path) -> tuple[TensorSource, ...]:
    try:
        file = safe_open(str(path), framework="pt", device="cpu")
        sources = []
        for key in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - the handle is no mapping
            stored = file.get_slice(key)  # type: ignore[no-untyped-call]
            kind = stored.get_dtype()
            shape = tuple(stored.get_shape())
            read = partial(file.get_tensor, key)
            sources.append(TensorSource(key, key, shape, kind, _SAFETENSORS_DTYPES.get(kind), read))
        return tuple(sources)
    except SafetensorError as fault:
        raise TruncatedCheckpointError(
            f"{path} is no whole safetensors file: cut short or damaged "
            f"({path.stat().st_size} bytes found; {fault}); fetch it again"
        ) from fault


def _open_pt(path: Path, part: str) -> tuple[TensorSource, ...]:
    content = _load_pt(path)
    if not isinstance(content, dict):
        raise NotACheckpointError(f"{path} holds a {type(content).__name__}, expected a dict with {part!r}")
    if part not in content:
        tops = ", ".join(repr(key)[:80] for key in list(content)[:20])
        other = "generator" if part == "generator_ema" else "generator_ema"
        advice = (
            f"it does hold {other!r}: ask for that with use_ema={other == 'generator_ema'}"
            if other in content
            else "a Self-Forcing .pt holds 'generator' and 'generator_ema'; save bare weights as safetensors"
        )
        raise MissingGeneratorError(f"{path} has no {part!r}; found {len(content)} keys: {tops}; {advice}")
    state = content[part]
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise NotACheckpointError(f"{part!r} in {path} is no dict of named tensors: {type(state).__name__}")
    strangers = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if strangers:
        raise NotACheckpointError(
            f"{part!r} in {path} holds {len(strangers)} entries that are no tensors: "
            f"{', '.join(strangers[:20])}"
        )
    return tuple(_pt_source(key, tensor) for key, tensor in state.items())


def _pt_source(file_key: str, tensor: torch.Tensor) -> TensorSource:
    # FSDP names its wrapper wherever it wrapped; Self-Forcing's generator holds the DiT as `model`.
    key = file_key.replace("_fsdp_wrapped_module.", "").removeprefix("model.")
    plain = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    kind = str(tensor.dtype).removeprefix("torch.")
    dtype = tensor.dtype if plain and tensor.dtype in _SAFETENSORS_DTYPES.values() else None
    kind = kind if plain else f"{kind}, {tensor.layout} on {tensor.device.type}"
    return TensorSource(key, file_key, tuple(tensor.shape), kind, dtype, lambda: tensor.detach().contiguous())


def _load_pt(path: Path) -> object:
    pickled = _read_pickle_of_zip(path)
    try:
        with warnings.catch_warnings():
            # torch warns of an unusual pickle protocol; whatever comes out is checked strictly anyway.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as fault:
        # A damaged file makes the unpickler raise anything at all; all of it is the file's fault.
        globals_named = _globals_of_pickle(pickled)
        if isinstance(fault, pickle.UnpicklingError) and globals_named:
            raise _unsafe(path, globals_named) from fault
        first = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        raise TruncatedCheckpointError(f"{path} is a damaged .pt ({first[:200]}); fetch it again") from fault


def _read_pickle_of_zip(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                # A mapped read takes the bytes as they lie: compressed ones would be read as weights.
                raise NotACheckpointError(
                    f"{path} is a compressed zip; torch.save stores plainly: save it again"
                )
            pickles = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
            if len(pickles) != 1 or any(name.endswith("/constants.pkl") for name in names):
                raise NotACheckpointError(
                    f"{path} is a zip archive, but not one that torch.save wrote "
                    f"(entries: {', '.join(names[:5])}); expected {KNOWN_FORMATS}"
                )
            return archive.read(pickles[0])
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as fault:
        raise TruncatedCheckpointError(
            f"{path} begins as a .pt and is cut short or damaged "
            f"({path.stat().st_size} bytes found; {fault}); fetch it again"
        ) from fault


def _refused_content(path: Path, head: bytes) -> Exception:
    if not head:
        return TruncatedCheckpointError(f"{path} is empty; fetch it again")
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= pickle.HIGHEST_PROTOCOL:
        with path.open("rb") as file:
            globals_named = _globals_of_pickle(file.read(_SCANNED_BYTES))
        if globals_named:
            return _unsafe(path, globals_named)
        return NotACheckpointError(
            f"{path} is a bare pickle or a .pt of torch before 1.6, which cannot be mapped; save it again "
            "with today's torch.save"
        )
    advice = (
        "; it is a Git LFS pointer: fetch the file itself"
        if head.startswith(b"version https://git-lfs")
        else ""
    )
    return NotACheckpointError(f"{path} begins with {head[:16]!r}; expected {KNOWN_FORMATS}{advice}")


def _unsafe(path: Path, globals_named: list[str]) -> UnsafePickleError:
    return UnsafePickleError(
        f"{path} is a pickle that asks for {', '.join(globals_named[:20])}: loading it would run code, "
        "so it was not loaded; expected tensors alone: get safetensors, or let its author save the state dict only"
    )


def _globals_of_pickle(pickled: bytes) -> list[str]:
    """List what pickles, one behind another, would import beyond tensors' own needs; runs none of it."""
    found: set[str] = set()
    strings: list[str] = []
    stream = io.BytesIO(pickled[:_SCANNED_BYTES])
    try:
        while stream.tell() < len(pickled):
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name in ("GLOBAL", "INST"):
                    found.add(str(argument).replace(" ", "."))
                elif opcode.name == "STACK_GLOBAL" and len(strings) >= 2:
                    found.add(".".join(strings[-2:]))  # a memo may stand between; good enough for a message
                elif isinstance(argument, str):
                    strings.append(argument)
    except Exception as fault:
        # Bytes that are no pickle, or no more: genops has errors of many kinds. What was seen until here counts.
        _ = fault
    harmless = {name for name in found if name.startswith("torch.") and name.endswith("Storage")}
    return sorted(shown(name) for name in found - harmless - _HARMLESS_GLOBALS)
