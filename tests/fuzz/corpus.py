"""Named cases: what was once found, or is too rare to be drawn. Each must be refused, by an error of ours."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from seko_export.checkpoints.sources import LoraFile
from seko_export.families.model_files import load_checkpoint
from seko_export.media.umt5.dimensions import text_config_of
from seko_runtime.format.manifest import MANIFEST_FILE
from seko_runtime.format.safetensors_map import map_safetensors
from seko_runtime.format.tar_format import member_header, padding
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.opening.checked_artifact import read_manifest

from .bases import MODEL, SNAPSHOT_KEY, Base, Bases, linked, put
from .cases import (
    ARTIFACT,
    CHECKPOINT,
    ENVIRONMENT,
    FACTS,
    list_anew,
    mend_pool_bytes,
    merge,
    replay,
    restore,
    snapshot_of,
    snapshot_parts,
    trusted,
)
from .child import Limits

SPARSE_BYTES = 3 << 30
HASHING = Limits(cpu_s=30.0, memory_bytes=128 << 20)  # long enough for a gigabyte, which must not be held
MOST_JSON = 16 << 20

Tree = dict[str, Any]
Work = Callable[[Bases, Path], object]


@dataclass(frozen=True)
class Named:
    """A named case, the exit codes of the errors that it may end in, and its limits."""

    work: Work
    codes: tuple[int, ...] = (ARTIFACT,)
    limits: Limits | None = None

    def refused(self, bases: Bases, folder: Path) -> None:
        """Run it; AssertionError if it is taken."""
        self.work(bases, folder)
        raise AssertionError("it was taken, expected a refusal")


def _many_references(tree: Tree) -> None:
    names = [{"name": f"x{number}", "shape": [1, 4], "dtype": "float32"} for number in range(500)]
    wide = {"name": "wide", "file": "engines/copy.pt2", "inputs": names, "outputs": [], "mutates": []}
    tree["engines"].append(wide)
    call = {"engine": "wide", "inputs": ["buffer:prompt.mean"] * 500, "outputs": []}
    tree["programs"]["denoise"] += [call] * 600


def _many_layer_groups(tree: Tree) -> None:
    tree["workload"]["stream"]["rings"] = {f"k{number}" + "x" * 200: 4 for number in range(60_000)}
    tree["buffers"].append({"name": "odd", "shape": [1], "dtype": "int64", "role": "host"})


def _many_folders(tree: Tree) -> None:
    some = next(iter(tree["files"].values()))
    tree["files"] |= {f"{number:x}" + "/a" * 500: some for number in range(13_000)}


def _files_swapped(one: str, other: str) -> Callable[[Tree], None]:
    def swap(tree: Tree) -> None:
        first, second = (engine for engine in tree["engines"] if engine["name"] in (one, other))
        first["file"], second["file"] = second["file"], first["file"]

    return swap


def _stream(**changes: int) -> Callable[[Tree], None]:
    return lambda tree: tree["workload"]["stream"].update(changes)


def _opened(base: Base, folder: Path, change: Callable[[Tree], object]) -> None:
    """Change a manifest, mend the sum of its caches, and use the artifact."""
    place, tree = linked(base, folder / base.name), copy.deepcopy(base.tree)
    change(tree)
    mend_pool_bytes(tree)
    put(place / MANIFEST_FILE, json.dumps(tree).encode())
    with open_artifact(place) as artifact:
        replay(artifact)


# Manifests: the artifact, and the change. Where many things are listed, a message that names them all, or the names
# together, would be millions of letters.
MANIFESTS: dict[str, tuple[str, Callable[[Tree], object]]] = {
    "many_calls_of_many_references": ("whole", _many_references),
    "many_layer_groups": ("whole", _many_layer_groups),
    "many_buckets": ("pool", lambda tree: tree["pool"].update(buckets=[*range(1, 1_000_000)])),
    "buckets_that_fall": ("pool", lambda tree: tree["pool"].update(buckets=[10**17] * 500_000)),
    "long_paths_of_many_folders": ("whole", _many_folders),
    "ring_of_18_frames_over_a_cache_of_12": ("sample", _stream(ring_frames=18)),
    "ring_of_2_31_frames": ("sample", _stream(ring_frames=1 << 31)),
    "sink_of_2_31_frames": ("whole", _stream(sink_frames=1 << 31)),
    "references_of_65536_frames": ("reference", _stream(reference_frames=1 << 16)),
    "pad_id_behind_the_table": ("whole", lambda tree: tree["workload"]["text"].update(pad_id=1 << 31)),
    "engines_files_swapped": ("streamed", _files_swapped("step", "prompt")),
    "engines_files_of_the_sample_swapped": ("sample", _files_swapped("head", "noise")),
}


def _sparse_file(name: str, size: int) -> Work:
    """An artifact that lists a file of holes: to hold it would take memory that its sender never had."""

    def work(bases: Bases, folder: Path) -> None:
        base = bases.artifacts["whole"]
        place = linked(base, folder / base.name)
        put(place / name, b"")
        os.truncate(place / name, size)
        files = {**base.tree["files"], name: {"sha256": "0" * 64, "size": size}}
        put(place / MANIFEST_FILE, json.dumps({**base.tree, "files": files}).encode())
        with open_artifact(place):
            pass

    return work


def _manifest_text(text: bytes) -> Work:
    """A manifest of 16 MiB that would be many times as many bytes of objects."""

    def work(bases: Bases, folder: Path) -> None:
        place = linked(bases.artifacts["whole"], folder / "whole")
        put(place / MANIFEST_FILE, text)
        read_manifest(place)

    return work


def _tar_of_long_paths(bases: Bases, folder: Path) -> None:
    tree = copy.deepcopy(bases.artifacts["whole"].tree)
    _many_folders(tree)
    document = json.dumps(tree).encode()
    head = member_header(MANIFEST_FILE, len(document))
    put(folder / "packed.tar", head + document + padding(len(document)) + bytes(4096))
    unpack_artifact(folder / "packed.tar", folder / "made")


def _planted_module(*, listed: bool) -> Work:
    def work(bases: Bases, folder: Path) -> None:
        base = bases.artifacts["whole"]
        place = linked(base, folder / "whole")
        put(place / "numpy.py", b"raise SystemExit('planted code ran')")
        if listed:
            list_anew(base, place, "numpy.py")
        with open_artifact(place):
            pass

    return work


def _many_tensors() -> bytes:
    """A safetensors file of a quarter of a million empty tensors, and a byte too many."""
    entry = '"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % number for number in range(250_000)) + "}").encode()
    return len(header).to_bytes(8, "little") + header + b"x"


def _snapshot(
    content: Callable[[Bases], bytes], *, size: int | None = None, key: bytes | None = None
) -> Work:
    def work(bases: Bases, folder: Path) -> None:
        put(folder / "saved", content(bases))
        if size is not None:
            os.truncate(folder / "saved", size)
        restore(bases, folder / "saved", key)

    return work


def _facts(change: Callable[[Tree], object]) -> Work:
    """A snapshot whose numbers say something else, hashed anew."""

    def content(bases: Bases) -> bytes:
        parts = snapshot_parts(bases.snapshot)
        facts = json.loads(parts[FACTS])
        change(facts["numbers"])
        return snapshot_of({**parts, FACTS: json.dumps(facts).encode()})

    return _snapshot(content)


def _pipe(place: Path) -> Path:
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    os.mkfifo(place)
    return place


def _spaces_in_trust(bases: Bases, folder: Path) -> None:
    """A pattern that tries each space again would take days."""
    trusted(bases, folder, b"ed25519 " + b"0" * 64 + b" a" + b" " * 900_000 + b"b\n", b"{}")


def _checkpoint(pattern: str, change: Callable[[Path], object], form: str = "wan-sharded") -> Work:
    """A checkpoint with one file changed."""

    def work(bases: Bases, folder: Path) -> None:
        place = Path(shutil.copytree(bases.checkpoints[form], folder / "checkpoint"))
        change(next(place.rglob(pattern)))
        load_checkpoint(place, MODEL)

    return work


def _sparse_config(bases: Bases, folder: Path) -> None:
    place = Path(shutil.copytree(bases.checkpoints["diffusers"], folder / "checkpoint"))
    config = next(place.rglob("*.safetensors")).parent / "config.json"
    put(config, b"{")
    os.truncate(config, SPARSE_BYTES)
    text_config_of(config.parent)


def _checkpoint_file(name: str, content: bytes, size: int | None = None) -> Work:
    def work(_: Bases, folder: Path) -> None:
        put(folder / name, content)
        if size is not None:
            os.truncate(folder / name, size)
        load_checkpoint(folder / name, MODEL)

    return work


def _sparse_pickle() -> bytes:
    """A `.pt` whose pickle is 3 GiB of a hole."""
    directory = io.BytesIO()
    with zipfile.ZipFile(directory, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
        archive.writestr("archive/version", b"3")
        archive.filelist[0].file_size = archive.filelist[0].compress_size = SPARSE_BYTES
    return directory.getvalue()


def _lora_config(**changes: Any) -> Work:
    """A LoRA whose PEFT config was changed."""

    def work(bases: Bases, folder: Path) -> None:
        place = Path(shutil.copytree(bases.loras["peft"], folder / "lora"))
        config = json.loads((place / "adapter_config.json").read_bytes())
        put(place / "adapter_config.json", json.dumps(config | changes).encode())
        merge(bases, LoraFile(place))

    return work


def _lora_of_many_tensors(bases: Bases, folder: Path) -> None:
    put(folder / "many.safetensors", _many_tensors())
    merge(bases, LoraFile(folder / "many.safetensors"))


def _nested_format(bases: Bases, folder: Path) -> None:
    tensors = load_file(bases.checkpoints["comfyui-quant"])
    key = next(key for key in tensors if key.endswith(".comfy_quant"))
    tensors[key] = torch.full((4000,), ord("["), dtype=torch.uint8)
    save_file(tensors, folder / "deep.safetensors")
    load_checkpoint(folder / "deep.safetensors", MODEL)


_END = 1 << 62
_GGUF_ARRAY = struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 5, 1 << 60)
CORPUS: dict[str, Named] = {
    name: Named(
        lambda bases, folder, base=base, change=change: _opened(bases.artifacts[base], folder, change)
    )
    for name, (base, change) in MANIFESTS.items()
}
CORPUS |= {
    name: Named(work)
    for name, work in {
        "sparse_engine_of_a_tebibyte": _sparse_file("engines/step.pt2", 1 << 40),
        "long_paths_of_many_folders_in_a_tar": _tar_of_long_paths,
        "manifest_of_empty_lists": _manifest_text(b'{"x":[' + b"[]," * (MOST_JSON // 3 - 40) + b"[]]}"),
        "manifest_of_small_tables": _manifest_text(b'{"x":[' + b'{"":{}},' * (MOST_JSON // 8 - 20) + b"{}]}"),
        "manifest_of_one_long_number": _manifest_text(b'{"x":0.' + b"1" * (MOST_JSON - 100) + b"}"),
        "header_of_very_many_tensors": lambda *_: map_safetensors(memoryview(_many_tensors()), "many"),
        "planted_module": _planted_module(listed=False),
        "planted_module_that_is_listed": _planted_module(listed=True),
        "pipe_as_a_snapshot": lambda bases, folder: restore(bases, _pipe(folder / "saved")),
        "folder_as_a_snapshot": lambda bases, folder: restore(bases, folder),
        "device_as_a_snapshot": lambda bases, _: restore(bases, Path("/dev/zero")),
        "snapshot_without_the_key_of_its_pool": _snapshot(lambda bases: bases.snapshot, key=SNAPSHOT_KEY),
        "snapshot_with_a_key_in_a_pool_without_one": _snapshot(lambda bases: bases.keyed_snapshot),
        "sparse_snapshot_of_3_gib": _snapshot(lambda bases: bases.snapshot, size=SPARSE_BYTES),
        "clock_of_another_length": _facts(lambda numbers: numbers["clock"].update(first_frames=[0])),
        "clock_at_the_end_of_time": _facts(
            lambda numbers: numbers["clock"].update(first=_END, slot_first=_END, made=_END)
        ),
        "more_conditioning_frames_than_a_chunk_has": _facts(
            lambda numbers: numbers.update(conditioning_frames=_END)
        ),
    }.items()
}
CORPUS |= {
    "sparse_weights_of_a_gib": Named(_sparse_file("weights/0.safetensors", 1 << 30), limits=HASHING),
    "sparse_file_that_nobody_uses": Named(_sparse_file("notes.bin", 1 << 30), limits=HASHING),
    "trust_file_with_a_name_of_spaces": Named(_spaces_in_trust, (ARTIFACT, ENVIRONMENT)),
}
CORPUS |= {
    name: Named(work, (CHECKPOINT,))
    for name, work in {
        "sparse_index": _checkpoint("*.index.json", lambda path: os.truncate(path, SPARSE_BYTES)),
        "sparse_config_of_a_checkpoint": _sparse_config,
        "sparse_pickle": _checkpoint_file("sparse.pt", _sparse_pickle()),
        "header_of_very_many_tensors_in_a_checkpoint": _checkpoint_file("many.safetensors", _many_tensors()),
        "pipe_as_the_only_weights": lambda _, folder: load_checkpoint(
            _pipe(folder / "checkpoint/model.safetensors").parent, MODEL
        ),
        "pipe_as_an_index": _checkpoint("*.index.json", _pipe),
        "pipe_as_a_shard": _checkpoint("*.safetensors", _pipe),
        # fields without end: every length in a hole is 0
        "sparse_header_of_a_gguf": _checkpoint_file(
            "sparse.gguf", b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60), SPARSE_BYTES
        ),
        "gguf_with_an_array_of_2_60_numbers": _checkpoint_file(
            "array.gguf", b"GGUF" + _GGUF_ARRAY + bytes(100)
        ),
        # a regular expression that takes a second for each 25 letters of a name
        "lora_pattern_that_backtracks": _lora_config(rank_pattern={"(a|.)*(.|a)*(.*)*x": 4}),
        "lora_pattern_of_many_repetitions": _lora_config(rank_pattern={".*" * 60 + "x": 4}),
        "lora_of_a_rank_of_2_62": _lora_config(r=1 << 62),
        "lora_of_very_many_tensors": _lora_of_many_tensors,
        "format_of_a_matrix_that_is_nested_deeply": _nested_format,
    }.items()
}
