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

from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.families.model_files import load_checkpoint
from seko_export.media.umt5.dimensions import text_config_of
from seko_runtime.format.manifest import MANIFEST_FILE, SIGNATURE_FILE
from seko_runtime.format.safetensors_map import map_safetensors
from seko_runtime.format.tar_format import member_header, padding
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.opening.checked_artifact import read_manifest

from .bases import MODEL, SNAPSHOT_KEY, Base, Bases, linked, put
from .file_cases import FACTS, restore, snapshot_of, snapshot_parts
from .guarded import Limits
from .manifest_cases import list_anew, mend_pool_bytes, replay

SPARSE_BYTES = 3 << 30
HASHING = Limits(cpu_s=30.0, memory_bytes=128 << 20)  # long enough for a gigabyte, which must not be held
MOST_JSON = 16 << 20

Tree = dict[str, Any]
Case = Callable[[Bases, Path], object]


@dataclass(frozen=True)
class Named:
    """A named case, the exit codes of the errors that it may end in, and its limits."""

    work: Case
    codes: tuple[int, ...]
    limits: Limits


CORPUS: dict[str, Named] = {}


def named(*codes: int, limits: Limits | None = None) -> Callable[[Case], Case]:
    """Put a case into the corpus."""

    def keep(case: Case) -> Case:
        CORPUS[case.__name__] = Named(case, codes, Limits() if limits is None else limits)
        return case

    return keep


def opened(base: Base, folder: Path, change: Callable[[Tree], object]) -> None:
    """Change a manifest, mend the sum of its caches, and use the artifact."""
    place, tree = linked(base, folder / base.name), copy.deepcopy(base.tree)
    change(tree)
    mend_pool_bytes(tree)
    put(place / MANIFEST_FILE, json.dumps(tree).encode())
    with open_artifact(place) as artifact:
        replay(artifact)


def engine(tree: Tree, name: str) -> Tree:
    """The table of an engine."""
    return next(engine for engine in tree["engines"] if engine["name"] == name)


@named(4)
def many_calls_of_many_references(bases: Bases, folder: Path) -> None:
    """600 calls of 500 references each."""

    def change(tree: Tree) -> None:
        mean = {"name": "x", "shape": [1, 4], "dtype": "float32"}
        names = [{**mean, "name": f"x{number}"} for number in range(500)]
        tree["engines"].append(
            {"name": "wide", "file": "engines/copy.pt2", "inputs": names, "outputs": [], "mutates": []}
        )
        call = {"engine": "wide", "inputs": ["buffer:prompt.mean"] * 500, "outputs": []}
        tree["programs"]["denoise"] += [call] * 600

    opened(bases.artifacts["whole"], folder, change)


@named(4)
def many_kinds_of_layers(bases: Bases, folder: Path) -> None:
    """A message that lists every buffer that could be there would have 50 million letters."""

    def change(tree: Tree) -> None:
        tree["workload"]["stream"]["rings"] = {f"k{number}" + "x" * 200: 4 for number in range(60_000)}
        tree["buffers"].append({"name": "odd", "shape": [1], "dtype": "int64", "role": "host"})

    opened(bases.artifacts["whole"], folder, change)


@named(4)
def many_buckets(bases: Bases, folder: Path) -> None:
    """A message that lists every program that is missing would have millions of letters."""
    opened(bases.artifacts["pool"], folder, lambda tree: tree["pool"].update(buckets=[*range(1, 1_000_000)]))


@named(4)
def buckets_that_fall(bases: Bases, folder: Path) -> None:
    """A message that lists them would have millions of letters."""
    opened(bases.artifacts["pool"], folder, lambda tree: tree["pool"].update(buckets=[10**17] * 500_000))


@named(4)
def ring_of_18_frames_over_a_cache_of_12(bases: Bases, folder: Path) -> None:
    opened(bases.artifacts["sample"], folder, lambda tree: tree["workload"]["stream"].update(ring_frames=18))


@named(4)
def ring_of_2_31_frames(bases: Bases, folder: Path) -> None:
    opened(
        bases.artifacts["sample"], folder, lambda tree: tree["workload"]["stream"].update(ring_frames=1 << 31)
    )


@named(4)
def sink_of_2_31_frames(bases: Bases, folder: Path) -> None:
    opened(
        bases.artifacts["whole"], folder, lambda tree: tree["workload"]["stream"].update(sink_frames=1 << 31)
    )


@named(4)
def references_of_65536_frames(bases: Bases, folder: Path) -> None:
    opened(
        bases.artifacts["reference"],
        folder,
        lambda tree: tree["workload"]["stream"].update(reference_frames=1 << 16),
    )


@named(4)
def pad_id_behind_the_text_engines_table(bases: Bases, folder: Path) -> None:
    opened(bases.artifacts["whole"], folder, lambda tree: tree["workload"]["text"].update(pad_id=1 << 31))


@named(4)
def two_engines_files_swapped(bases: Bases, folder: Path) -> None:
    def change(tree: Tree) -> None:
        step, prompt = engine(tree, "step"), engine(tree, "prompt")
        step["file"], prompt["file"] = prompt["file"], step["file"]

    opened(bases.artifacts["streamed"], folder, change)


@named(4)
def two_engines_files_of_the_sample_swapped(bases: Bases, folder: Path) -> None:
    def change(tree: Tree) -> None:
        head, noise = engine(tree, "head"), engine(tree, "noise")
        head["file"], noise["file"] = noise["file"], head["file"]

    opened(bases.artifacts["sample"], folder, change)


def _sparse(bases: Bases, folder: Path, name: str, size: int) -> None:
    """Open an artifact that lists a file of holes."""
    base = bases.artifacts["whole"]
    place = linked(base, folder / base.name)
    put(place / name, b"")
    os.truncate(place / name, size)
    entries = {**base.entries, name: {"sha256": "0" * 64, "size": size}}
    put(place / MANIFEST_FILE, json.dumps({**base.tree, "files": entries}).encode())
    with open_artifact(place):
        pass


@named(4)
def sparse_engine_of_a_tebibyte(bases: Bases, folder: Path) -> None:
    """An engine that takes no disk: to hold it would take memory that its sender never had."""
    _sparse(bases, folder, "engines/step.pt2", 1 << 40)


@named(4, limits=HASHING)
def sparse_weights_of_a_gib(bases: Bases, folder: Path) -> None:
    _sparse(bases, folder, "weights/0.safetensors", 1 << 30)


@named(4, limits=HASHING)
def sparse_file_of_a_gib_that_nobody_uses(bases: Bases, folder: Path) -> None:
    _sparse(bases, folder, "notes.bin", 1 << 30)


@named(4)
def long_paths_of_many_folders(bases: Bases, folder: Path) -> None:
    """15,000 files, each below 500 folders of its own: the folders' names together are gigabytes."""

    def change(tree: Tree) -> None:
        some = next(iter(tree["files"].values()))
        tree["files"] |= {f"{number:x}" + "/a" * 500: some for number in range(13_000)}

    opened(bases.artifacts["whole"], folder, change)


@named(4)
def long_paths_of_many_folders_in_a_tar(bases: Bases, folder: Path) -> None:
    tree = copy.deepcopy(bases.artifacts["whole"].tree)
    some = next(iter(tree["files"].values()))
    tree["files"] |= {f"{number:x}" + "/a" * 500: some for number in range(13_000)}
    document = json.dumps(tree).encode()
    (folder / "packed.tar").write_bytes(
        member_header(MANIFEST_FILE, len(document)) + document + padding(len(document)) + bytes(4096)
    )
    unpack_artifact(folder / "packed.tar", folder / "made")


@named(4)
def manifest_of_empty_lists(bases: Bases, folder: Path) -> None:
    """16 MiB of text that would be half a gigabyte of objects."""
    place = linked(bases.artifacts["whole"], folder / "whole")
    put(place / MANIFEST_FILE, b'{"x":[' + b"[]," * ((MOST_JSON - 100) // 3) + b"[]]}")
    read_manifest(place)


@named(4)
def manifest_of_small_tables(bases: Bases, folder: Path) -> None:
    place = linked(bases.artifacts["whole"], folder / "whole")
    put(place / MANIFEST_FILE, b'{"x":[' + b'{"":{}},' * ((MOST_JSON - 100) // 8) + b"{}]}")
    read_manifest(place)


@named(4)
def manifest_of_one_long_number(bases: Bases, folder: Path) -> None:
    place = linked(bases.artifacts["whole"], folder / "whole")
    put(place / MANIFEST_FILE, b'{"x":0.' + b"1" * (MOST_JSON - 100) + b"}")
    read_manifest(place)


@named(4)
def header_of_very_many_tensors(bases: Bases, folder: Path) -> None:  # noqa: ARG001
    map_safetensors(memoryview(_many_tensors()), "many.safetensors")


def _many_tensors() -> bytes:
    """A safetensors file of a quarter of a million empty tensors, and a byte too many."""
    entry = '"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    header = ("{" + ",".join(entry % number for number in range(250_000)) + "}").encode()
    return len(header).to_bytes(8, "little") + header + b"x"


@named(4)
def planted_module(bases: Bases, folder: Path) -> None:
    """A top-level numpy.py that no table lists."""
    place = linked(bases.artifacts["whole"], folder / "whole")
    put(place / "numpy.py", b"raise SystemExit('planted code ran')")
    with open_artifact(place):
        pass


@named(4)
def planted_module_that_is_listed(bases: Bases, folder: Path) -> None:
    base = bases.artifacts["whole"]
    place = linked(base, folder / "whole")
    put(place / "numpy.py", b"raise SystemExit('planted code ran')")
    list_anew(base, place, ("numpy.py",))
    with open_artifact(place):
        pass


@named(4)
def pipe_as_a_snapshot(bases: Bases, folder: Path) -> None:
    os.mkfifo(folder / "saved")
    restore(bases, folder / "saved")


@named(4)
def folder_as_a_snapshot(bases: Bases, folder: Path) -> None:
    restore(bases, folder)


@named(4)
def snapshot_without_the_key_of_its_pool(bases: Bases, folder: Path) -> None:
    (folder / "saved").write_bytes(bases.snapshot)
    restore(bases, folder / "saved", SNAPSHOT_KEY)


@named(4)
def snapshot_with_a_key_in_a_pool_without_one(bases: Bases, folder: Path) -> None:
    (folder / "saved").write_bytes(bases.keyed_snapshot)
    restore(bases, folder / "saved")


@named(4)
def device_as_a_snapshot(bases: Bases, folder: Path) -> None:  # noqa: ARG001
    restore(bases, Path("/dev/zero"))


@named(4)
def sparse_snapshot_of_3_gib(bases: Bases, folder: Path) -> None:
    (folder / "saved").write_bytes(bases.snapshot)
    os.truncate(folder / "saved", SPARSE_BYTES)
    restore(bases, folder / "saved")


def _facts(bases: Bases, folder: Path, change: Callable[[Tree], object]) -> None:
    parts = snapshot_parts(bases.snapshot)
    facts = json.loads(parts[FACTS])
    change(facts["numbers"])
    parts[FACTS] = json.dumps(facts).encode()
    (folder / "saved").write_bytes(snapshot_of(parts))
    restore(bases, folder / "saved")


@named(4)
def snapshot_with_a_clock_of_another_length(bases: Bases, folder: Path) -> None:
    _facts(bases, folder, lambda numbers: numbers["clock"].update(first_frames=[0]))


@named(4)
def snapshot_with_a_clock_at_the_end_of_time(bases: Bases, folder: Path) -> None:
    _facts(
        bases,
        folder,
        lambda numbers: numbers["clock"].update(first=1 << 62, slot_first=1 << 62, made=1 << 62),
    )


@named(4)
def snapshot_with_more_conditioning_frames_than_a_chunk_has(bases: Bases, folder: Path) -> None:
    _facts(bases, folder, lambda numbers: numbers.update(conditioning_frames=1 << 62))


@named(4, 5)
def trust_file_with_a_name_of_spaces(bases: Bases, folder: Path) -> None:
    """A pattern that tries each space again would take days."""
    place = linked(bases.artifacts["whole"], folder / "whole")
    put(place / SIGNATURE_FILE, b"{}")
    (folder / "trust").write_bytes(b"ed25519 " + b"0" * 64 + b" a" + b" " * 900_000 + b"b\n")
    read_manifest(place, trust=folder / "trust")


@named(3)
def sparse_index_of_a_checkpoint(bases: Bases, folder: Path) -> None:
    place = folder / "checkpoint"
    shutil.copytree(bases.checkpoints["wan-sharded"], place)
    os.truncate(next(place.glob("*.index.json")), SPARSE_BYTES)
    load_checkpoint(place, MODEL)


@named(3)
def sparse_config_of_a_checkpoint(bases: Bases, folder: Path) -> None:
    place = folder / "checkpoint"
    shutil.copytree(bases.checkpoints["diffusers"], place)
    config = next(place.rglob("*.safetensors")).parent / "config.json"
    put(config, b"{")
    os.truncate(config, SPARSE_BYTES)
    text_config_of(config.parent)


@named(3)
def sparse_pickle_of_a_checkpoint(bases: Bases, folder: Path) -> None:  # noqa: ARG001
    """A `.pt` whose pickle is 3 GiB of a hole."""
    directory = io.BytesIO()
    with zipfile.ZipFile(directory, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
        archive.writestr("archive/version", b"3")
        archive.filelist[0].file_size = archive.filelist[0].compress_size = SPARSE_BYTES
    (folder / "sparse.pt").write_bytes(directory.getvalue())
    load_checkpoint(folder / "sparse.pt", MODEL)


@named(3)
def header_of_very_many_tensors_in_a_checkpoint(bases: Bases, folder: Path) -> None:  # noqa: ARG001
    (folder / "many.safetensors").write_bytes(_many_tensors())
    load_checkpoint(folder / "many.safetensors", MODEL)


@named(3)
def pipe_as_the_only_weights(bases: Bases, folder: Path) -> None:  # noqa: ARG001
    (folder / "checkpoint").mkdir()
    os.mkfifo(folder / "checkpoint" / "model.safetensors")
    load_checkpoint(folder / "checkpoint", MODEL)


@named(3)
def pipe_as_an_index(bases: Bases, folder: Path) -> None:
    place = folder / "checkpoint"
    shutil.copytree(bases.checkpoints["wan-sharded"], place)
    index = next(place.glob("*.index.json"))
    index.unlink()
    os.mkfifo(index)
    load_checkpoint(place, MODEL)


@named(3)
def pipe_as_a_shard(bases: Bases, folder: Path) -> None:
    place = folder / "checkpoint"
    shutil.copytree(bases.checkpoints["wan-sharded"], place)
    shard = next(place.glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    load_checkpoint(place, MODEL)


@named(3)
def sparse_header_of_a_gguf(bases: Bases, folder: Path) -> None:  # noqa: ARG001
    """Fields without end: every length in a hole is 0."""
    file = folder / "sparse.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60))
    os.truncate(file, SPARSE_BYTES)
    load_checkpoint(file, MODEL)


@named(3)
def gguf_with_an_array_of_2_60_numbers(bases: Bases, folder: Path) -> None:  # noqa: ARG001
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
    (folder / "array.gguf").write_bytes(head + struct.pack("<IIQ", 9, 5, 1 << 60) + bytes(100))
    load_checkpoint(folder / "array.gguf", MODEL)


def _with_config(bases: Bases, folder: Path, change: Callable[[Tree], object]) -> None:
    """Merge a LoRA whose PEFT config was changed."""
    place = folder / "lora"
    shutil.copytree(bases.loras["peft"], place)
    config = json.loads((place / "adapter_config.json").read_bytes())
    change(config)
    put(place / "adapter_config.json", json.dumps(config).encode())
    checkpoint = load_checkpoint(bases.checkpoints["wan"], MODEL, LoadOptions(loras=[LoraFile(place)]))
    for _ in checkpoint.items():
        pass


@named(3)
def lora_pattern_that_backtracks(bases: Bases, folder: Path) -> None:
    """A regular expression that takes a second for each 25 letters of a name."""
    _with_config(bases, folder, lambda config: config.update(rank_pattern={"(a|.)*(.|a)*(.*)*x": 4}))


@named(3)
def lora_pattern_of_many_repetitions(bases: Bases, folder: Path) -> None:
    _with_config(bases, folder, lambda config: config.update(rank_pattern={".*" * 60 + "x": 4}))


@named(3)
def lora_of_a_rank_of_2_62(bases: Bases, folder: Path) -> None:
    _with_config(bases, folder, lambda config: config.update(r=1 << 62))


@named(3)
def lora_of_very_many_tensors(bases: Bases, folder: Path) -> None:
    (folder / "many.safetensors").write_bytes(_many_tensors())
    load_checkpoint(
        bases.checkpoints["wan"], MODEL, LoadOptions(loras=[LoraFile(folder / "many.safetensors")])
    )


@named(3)
def format_of_a_matrix_that_is_nested_deeply(bases: Bases, folder: Path) -> None:
    tensors = load_file(bases.checkpoints["comfyui-quant"])
    key = next(key for key in tensors if key.endswith(".comfy_quant"))
    tensors[key] = torch.full((4000,), ord("["), dtype=torch.uint8)
    save_file(tensors, folder / "deep.safetensors")
    load_checkpoint(folder / "deep.safetensors", MODEL)
