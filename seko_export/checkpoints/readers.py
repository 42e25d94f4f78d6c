"""Opening of checkpoint files, whose format the content decides. Opening a checkpoint lists its tensors, and checks no
key and no value."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from seko_export.checkpoints import gguf_files
from seko_export.checkpoints.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    MissingEntryError,
    NotACheckpointError,
)
from seko_export.checkpoints.json_files import read_json
from seko_export.checkpoints.quantised import with_quantised
from seko_export.checkpoints.sources import Companion, Layout, OpenedFiles, TensorSource, shown
from seko_export.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# The index of shards, diffusers' variant behind it; a shard's number; a variant at the end of a file's stem.
_INDEX = re.compile(r"(.+)\.safetensors\.index(?:\.([\w-]+))?\.json", re.ASCII)
_SHARD = re.compile(r"-\d{5}-of-\d{5}$", re.ASCII)
_VARIANT = re.compile(r".\.(fp32|fp16|bf16|fp8|int8|ema|non_ema)$", re.ASCII)
_NAMED_ITSELF = (".pt", ".pth", ".gguf")  # suffixes of files that are never looked for in a folder
_MAX_SAFETENSORS_HEADER = 100_000_000  # bytes; the format's own limit
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def open_files(path: Path, layout: Layout, companion: Path | None = None) -> OpenedFiles:
    """Open the checkpoint at ``path``; its first bytes decide which format it has.

    Parameters
    ----------
    path : Path
        A file, or a folder with one checkpoint (directly, or in one of the layout's subfolders).
    layout : Layout
        File layout of this kind of model's weights.
    companion : Path, optional
        A further file with weights of the model (the layout's companion); default: the companion file in the
        checkpoint's folder, if it exists. For a layout without companions ``companion`` is ignored.

    Returns
    -------
    OpenedFiles
        The tensors of the checkpoint, whose numbers are not read yet.

    Raises
    ------
    CheckpointError
        If the files cannot be read; the subclass tells the cause, see `seko_export.checkpoints.errors`.
    """
    if companion is not None:  # in the same folder it is not the checkpoint itself
        named = (
            replace(layout_of_part, names=(*layout_of_part.names, companion.name))
            for layout_of_part in layout.companions
        )
        layout = replace(layout, companions=tuple(named))
    opened = _open_one(path, layout)
    if layout.entry is not None and opened.container != "pt":
        raise MissingEntryError(
            f"--entry {layout.entry}: {path} is a {opened.container} file, which has no entries; leave the option out"
        )
    for part in layout.companions:
        file = companion or companion_file(path, layout, part)
        if file is not None:
            try:
                extra = _open_one(file, Layout(layout.formats, (), part.entries))
            except NotACheckpointError as fault:
                raise CheckpointError(f"{fault}; {path} is read together with it") from fault
            opened = replace(
                opened,
                file_bytes=opened.file_bytes + extra.file_bytes,
                sources=(*opened.sources, *extra.sources),
                files=(*opened.files, *extra.files),
            )
    try:
        return with_quantised(opened)
    except CheckpointError as fault:
        fault.args = (f"{path}: {fault}",)
        raise


def companion_file(path: Path, layout: Layout, companion: Companion) -> Path | None:
    """Return the companion file in the folder of the checkpoint at ``path``, or None."""
    homes = (path, *(path / name for name in layout.subfolders)) if path.is_dir() else (path.parent,)
    files = (home / name for home in homes for name in companion.names)
    return next((file for file in files if file.is_file()), None)


def _open_one(path: Path, layout: Layout) -> OpenedFiles:
    try:
        if path.is_dir():
            return _open_folder(path, layout)
        if not path.exists():
            raise CheckpointNotFoundError(f"no checkpoint at {path}: give the path of {layout.formats}")
        if not path.is_file():
            raise NotACheckpointError(f"{path} is neither a file nor a folder; expected {layout.formats}")
        if _INDEX.fullmatch(path.name):
            return _open_sharded(path, layout)
        with path.open("rb") as file:
            head = file.read(64)
        file_bytes = path.stat().st_size
        if _looks_like_safetensors(head):
            stored, metadata = _open_safetensors(path, layout)
            return OpenedFiles("safetensors", "all", file_bytes, stored, metadata, files=(path,))
        if head.startswith(b"PK\x03\x04"):
            from seko_export.checkpoints.pickles import open_pt  # imports torch

            return replace(open_pt(path, layout), files=(path,))
        if head.startswith(gguf_files.MAGIC):
            return replace(gguf_files.open_gguf(path, layout), files=(path,))
    except OSError as fault:
        raise CheckpointNotFoundError(f"{path} cannot be read: {fault.strerror or fault}") from fault
    raise _refused_content(path, head, layout)


def variant_file(folder: Path, layout: Layout, variant: str) -> Path:
    """Return the index of a variant such as ``fp16`` in a folder; without an index, the file of the variant.

    Raises
    ------
    CheckpointError
        If the folder has no file of the variant, or several; the message names ``--variant``.
    """
    home, extra = _home_of(folder, layout), _companion_names(layout)
    files = [file for file in (*_indices(home), *_files(home, extra)) if not _SHARD.search(_stem(file))]
    own = [file for file in files if _variant_of(file, variant) == variant]
    if len(own) != 1:
        there = ", ".join(sorted({_variant_of(file) or "none" for file in files})) or "no weights"
        raise CheckpointError(
            f"--variant {variant}: {home} has {len(own) or 'no'} checkpoints of that variant; its variants: {there}; "
            "name one that every folder of the model has, or leave the option out"
        )
    return own[0]


def _home_of(folder: Path, layout: Layout) -> Path:
    """Return the folder itself if it holds weights, otherwise the subfolder that holds them."""
    extra = _companion_names(layout)
    if any(file.name not in extra for file in folder.glob("*.safetensors*")):
        return folder
    inner = (folder / name for name in layout.subfolders)
    return next((entry for entry in inner if entry.is_dir()), folder)


def _companion_names(layout: Layout) -> set[str]:
    return {name for companion in layout.companions for name in companion.names}


def _indices(home: Path) -> list[Path]:
    return sorted(file for file in home.glob("*.safetensors.index*.json") if _INDEX.fullmatch(file.name))


def _files(home: Path, extra: set[str]) -> list[Path]:
    # A shard of nobody's index stays in the list: without its index it is one file among several.
    return sorted(file for file in home.glob("*.safetensors") if file.name not in extra)


def _stem(file: Path) -> str:
    match = _INDEX.fullmatch(file.name)
    return match[1] if match else file.name.removesuffix(".safetensors")


def _variant_of(file: Path, asked: str = "") -> str | None:
    """Return the variant in which the name of a file or index ends, or None."""
    match, stem = _INDEX.fullmatch(file.name), _SHARD.sub("", _stem(file))
    if match and match[2]:
        return match[2]
    if asked and stem.endswith(f".{asked}"):
        return asked
    known = _VARIANT.search(stem)
    return known[1] if known else None


def _open_folder(folder: Path, layout: Layout) -> OpenedFiles:
    home, extra = _home_of(folder, layout), _companion_names(layout)
    indices, files = _indices(home), _files(home, extra)
    if indices:  # shards belong to an index
        files = [file for file in files if not _SHARD.search(_stem(file))]
    # Files without a variant, as everywhere, an index first; a variant if there is no other.
    plain = [[file for file in group if _variant_of(file) is None] for group in (indices, files)]
    choices = plain[0] or plain[1] or [*indices, *files]
    if not choices:
        others = [
            file for depth in ("*", "*/*") for file in folder.glob(depth) if file.suffix in _NAMED_ITSELF
        ]
        listed = ", ".join(str(file) for file in sorted(others)[:5])
        raise NotACheckpointError(
            f"the folder {folder} holds no *.safetensors and no *.safetensors.index.json; expected {layout.formats} "
            f"(a {' or '.join(_NAMED_ITSELF)} is named itself, not its folder{': ' if listed else ''}{listed})"
        )
    if len(choices) > 1:
        names = ", ".join(choice.name for choice in choices[:20])
        variants = any(map(_variant_of, choices))
        raise AmbiguousCheckpointError(
            f"{home} holds {len(choices)} checkpoints and no single index: {names}; name the file, or "
            + ("the variant with --variant" if variants else "keep one index in the folder")
        )
    return _open_one(choices[0], layout)


def _open_sharded(index: Path, layout: Layout) -> OpenedFiles:
    weight_map = _read_weight_map(index)
    sources: list[TensorSource] = []
    metadata: dict[str, str] = {}
    file_bytes = 0
    variants = {_variant_of(Path(shard)) for shard in weight_map.values()}
    if len(variants) > 1:
        raise DamagedCheckpointError(
            f"{index} mixes the variants {', '.join(sorted(variant or 'none' for variant in variants))}; fetch it again"
        )
    files = [index]
    for shard in sorted(set(weight_map.values())):
        path = index.parent / shard
        if not path.is_file():
            raise DamagedCheckpointError(
                f"{index} names the shard {shown(repr(shard))}, which is not there; fetch it again"
            )
        files.append(path)
        file_bytes += path.stat().st_size
        inside, about = _open_safetensors(path, layout)
        metadata |= about
        listed = {key for key, name in weight_map.items() if name == shard}
        stored = {source.file_key for source in inside}
        if listed != stored:
            raise DamagedCheckpointError(
                f"{index} and the shard {shown(repr(shard))} disagree: {len(listed - stored)} keys are listed and not "
                f"stored, {len(stored - listed)} stored and not listed "
                f"(first: {shown(repr(min(listed ^ stored)))}); they are of different checkpoints, fetch them again"
            )
        sources.extend(inside)
    return OpenedFiles("safetensors", "all", file_bytes, tuple(sources), metadata, files=tuple(files))


def _read_weight_map(index: Path) -> Mapping[str, str]:
    try:
        content = read_json(index)
    except ValueError as fault:
        raise DamagedCheckpointError(f"{index} is no JSON: {shown(str(fault))}; fetch it again") from fault
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedCheckpointError(f"{index} has no 'weight_map' of keys to shard names; fetch it again")
    for shard in weight_map.values():
        # Shards lie beside their index. Symlinks are followed: the Hugging Face cache is made of them.
        if not isinstance(shard, str) or shard in ("", ".", "..") or any(sign in shard for sign in "/\\\0"):
            raise DamagedCheckpointError(
                f"{index} names the shard {shown(repr(shard))}; expected a plain file name in the same folder: "
                "an index that leaves its folder is not followed"
            )
    return weight_map


def _looks_like_safetensors(head: bytes) -> bool:
    return (
        len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER
    )


def _open_safetensors(path: Path, layout: Layout) -> tuple[tuple[TensorSource, ...], Mapping[str, str]]:
    """Return the tensors of a safetensors file, and the metadata of its header."""
    try:
        file = safe_open(str(path), framework="np")  # the header alone, without torch
        mapped = cache(partial(_mapped, path))
        places = cache(partial(_places_in, path))  # read if a tensor is copied
        sources = []
        for key in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - the handle is no mapping
            stored = file.get_slice(key)  # type: ignore[no-untyped-call]
            kind = stored.get_dtype()
            shape = tuple(stored.get_shape())
            dtype, read = _SAFETENSORS_DTYPES.get(kind), partial(_read, mapped, key)
            copy = None if dtype is None else partial(_copied, path, key, places, dtype, shape)
            sources.append(TensorSource(layout.bare(key), key, shape, kind, dtype, read, copy))
        return tuple(sources), file.metadata() or {}  # type: ignore[no-untyped-call]
    except SafetensorError as fault:
        raise DamagedCheckpointError(
            f"{path} is no whole safetensors file: cut short or damaged "
            f"({path.stat().st_size} bytes found; {shown(str(fault))}); fetch it again"
        ) from fault
    except RuntimeError as fault:
        raise _unmapped(path, fault) from fault


def _mapped(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except SafetensorError as fault:  # of a name that torch does not take; the header was read
        raise CheckpointNotFoundError(f"{path} cannot be mapped: {shown(str(fault))}; rename it") from fault
    except RuntimeError as fault:
        raise _unmapped(path, fault) from fault


def _unmapped(path: Path, fault: Exception) -> Exception:
    """Return the error of mmap where the kernel promises no more memory than there is."""
    from seko_export.checkpoints.pickles import unmapped

    return unmapped(path, fault)


def _read(mapped: Callable[[], Any], key: str) -> torch.Tensor:
    tensor: torch.Tensor = mapped().get_tensor(key)
    return tensor


def _places_in(path: Path) -> dict[str, int]:
    """Return the offset of each tensor's bytes in a file whose header the library has checked."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        key: 8 + size + entry["data_offsets"][0] for key, entry in header.items() if key != "__metadata__"
    }


def _copied(
    path: Path, key: str, places: Callable[[], dict[str, int]], dtype: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor that is read into memory of its own: the pages of a memory map would stay in memory beside the
    tensors that are made from them."""
    import torch

    stored: torch.dtype = getattr(torch, dtype)
    count = math.prod(shape) * stored.itemsize
    content = torch.from_numpy(np.fromfile(path, np.uint8, count, offset=places()[key]))
    if content.numel() != count:
        raise DamagedCheckpointError(f"{path} became shorter while it was read; fetch it again")
    return content.view(stored).reshape(shape)


def _refused_content(path: Path, head: bytes, layout: Layout) -> Exception:
    if not head:
        return DamagedCheckpointError(f"{path} is empty; fetch it again")
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= pickle.HIGHEST_PROTOCOL:
        from seko_export.checkpoints.pickles import SCANNED_BYTES, globals_of_pickle, unsafe_pickle

        with path.open("rb") as file:
            globals_named = globals_of_pickle(file.read(SCANNED_BYTES))
        if globals_named:
            return unsafe_pickle(path, globals_named)
        return NotACheckpointError(
            f"{path} is a bare pickle or a .pt of torch before 1.6, which cannot be mapped; save it again "
            "with today's torch.save"
        )
    advice = (
        "; it is a Git LFS pointer: fetch the file itself"
        if head.startswith(b"version https://git-lfs")
        else ""
    )
    return NotACheckpointError(f"{path} is of no kind that is read: expected {layout.formats}{advice}")
