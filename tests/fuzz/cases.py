"""The kinds of cases: for each a strategy of damaged input, and the use of it that must end well."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.errors import CheckpointError, ExportError
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.media.load import load_vae
from seko_export.media.umt5.dimensions import text_config_of
from seko_export.media.vaes import vae_config_of
from seko_runtime.cli.commands import main
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import DTYPE_BYTES, MANIFEST_FILE, SIGNATURE_FILE
from seko_runtime.format.safetensors_map import DTYPE_NAMES, map_safetensors
from seko_runtime.format.tar_format import BLOCK_BYTES, END, member_header, padding
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.opening.checked_artifact import read_manifest
from seko_runtime.video.contract import TEXT_BUFFER
from seko_runtime.video.manifest import VideoManifest
from tests.support.stacked import open_stacked

from .bases import MODEL, SNAPSHOT_KEY, Base, Bases, entry_of, linked, put, reference_of
from .damage import PATHS, Draw, change_json, damaged_bytes, damaged_header, damaged_json, encoded

ARTIFACT, ENVIRONMENT, CHECKPOINT = 4, 5, CheckpointError.exit_code
CLI_CODES = (0, 2, 4, 5, 6)
PROMPT = "a blue ring drifts"
MAX_CALLS = 600  # of engines in a chunk that is run here
MAX_REPLAYED = 8  # chunks; a golden of more is not replayed here
MAX_MENDED = 1 << 22  # bytes of weights that are written for a changed table
MANY_TENSORS = 10_000
FACTS, HASH = "seko.snapshot", "seko.sha256"
_STORED = {dtype: name for name, dtype in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Case:
    """What is damaged, the work in an empty folder, and the exit codes of the errors that it may end in."""

    what: str
    work: Callable[[Path], object] = field(repr=False)
    codes: tuple[int, ...] = (ARTIFACT, ENVIRONMENT)


@st.composite
def manifest_cases(draw: Draw, bases: Bases) -> Case:
    """A manifest after one to three changes, of which what would hide them is mended; its artifact is used."""
    base = draw(st.sampled_from(list(bases.artifacts.values())))
    tree = copy.deepcopy(base.tree)
    for _ in range(draw(st.integers(1, 3))):
        draw(st.sampled_from((change_json, change_json, change_json, _other_passes, _ring_apart)))(draw, tree)
    if draw(st.integers(0, 4)) < 4:
        mend_pool_bytes(tree)
    mended, way = draw(st.booleans()), draw(st.integers(0, 9))

    def work(folder: Path) -> str:
        place = linked(base, folder / base.name)
        if mended:
            _mend_weights(tree, place)
        put(place / MANIFEST_FILE, encoded(tree))
        return _use_artifact(place, way)

    return Case(base.name, work)


def _other_passes(draw: Draw, tree: Any) -> None:
    """Another number of passes, with as many times."""
    passes, number = (
        draw(st.sampled_from((1, 2, 3, 5, 100, 1024))),
        draw(st.sampled_from((0.0, 1.0, 1e308, -1.0))),
    )
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        tree["workload"]["schedule"].update(
            denoise_passes=passes, timesteps=[number] * passes, sigmas=[number] * passes
        )


def _ring_apart(draw: Draw, tree: Any) -> None:
    """A group of layers with a ring of its own, and its two buffers."""
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        stream = tree["workload"]["stream"]
        sizes = (stream["chunk_frames"], stream["ring_frames"], 1, 1 << 20)
        stream["rings"] = {"short": draw(st.sampled_from(sizes))}
        tree["buffers"] += [
            {**buffer, "name": buffer["name"] + ".short"}
            for buffer in tree["buffers"]
            if buffer["name"] in ("write_slots", "valid_tokens")
        ]


@st.composite
def member_cases(draw: Draw, bases: Bases) -> Case:
    """A file of an artifact, damaged, whose manifest lists it as it is: weights, goldens, a tokenizer, an engine."""
    base = draw(st.sampled_from(list(bases.artifacts.values())))
    names = sorted(base.tree["files"])
    name = draw(st.sampled_from([name for name in names if not name.startswith("engines/")] * 4 + names))
    content, way = draw(_damaged_file(base.folder / name)), draw(st.integers(0, 9))

    def work(folder: Path) -> str:
        place = linked(base, folder / base.name)
        put(place / name, content)
        list_anew(base, place, name)
        return _use_artifact(place, way)

    return Case(f"{base.name}, {name}", work)


@st.composite
def tar_cases(draw: Draw, bases: Bases) -> Case:
    """A packed artifact: bytes or blocks, a header whose checksum is mended, or packed anew by hand."""
    kind = draw(st.sampled_from(("bytes", "blocks", "header", "manifest", "members")))
    if kind in ("bytes", "blocks"):
        content = draw(damaged_bytes(bases.tar, BLOCK_BYTES if kind == "blocks" else 1))
    else:
        content = draw(_damaged_tar_header(bases.tar) if kind == "header" else _packed_anew(bases, kind))
    trusting = draw(st.integers(0, 2)) == 2

    def work(folder: Path) -> str:
        (folder / "packed.tar").write_bytes(content)
        if trusting:
            (folder / "trust").write_bytes(bases.trust)
        try:
            unpack_artifact(
                folder / "packed.tar", folder / "made", trust=folder / "trust" if trusting else None
            )
        except Exception:
            left = set(os.listdir(folder)) - {"packed.tar", "trust", "log"}
            if left:
                raise AssertionError(f"a refused tar leaves {sorted(left)}") from None
            raise
        return "unpacked"

    return Case(kind, work)


@st.composite
def _damaged_tar_header(draw: Draw, content: bytes) -> bytes:
    """Something else in a field of a header; the checksum fits it, mostly."""
    data = bytearray(content)
    at = draw(
        st.sampled_from(
            [at for at in range(0, len(data), BLOCK_BYTES) if data[at + 257 : at + 262] == b"ustar"]
        )
    )
    first, size = draw(
        st.sampled_from(
            ((0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 6), (263, 2),
             (265, 32), (297, 32), (329, 8), (337, 8), (345, 155), (500, 12))
        )
    )  # fmt: skip
    values = (
        b"7" * size, b"0" * (size - 1) + b"\0", b"\x80" + bytes(size), b"\xff" * size, b"-1", b"5", b"1", b"2", b"x",
        b"g", b"L", b"../../x", b"/tmp/x", b"engines/step.pt2", MANIFEST_FILE.encode(), "ä".encode(), b" " * size, b"",
    )  # fmt: skip
    value = draw(st.one_of(st.sampled_from(values), st.binary(min_size=1, max_size=size)))
    data[at + first : at + first + size] = value[:size].ljust(size, b"\0")
    if draw(st.integers(0, 9)) < 9:
        block = data[at : at + BLOCK_BYTES]
        data[at + 148 : at + 156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 8 * 32)
    return bytes(data)


@st.composite
def _packed_anew(draw: Draw, bases: Bases, kind: str) -> bytes:
    """A tar of a damaged manifest, or of other members."""
    base = bases.artifacts["whole"]
    members = [(name, (base.folder / name).read_bytes()) for name in sorted(base.tree["files"])]
    manifest = json.dumps(base.tree).encode()
    if kind == "manifest":
        manifest = draw(damaged_json(manifest))
    else:
        at = draw(st.integers(0, len(members) - 1))
        name, content = members[at]
        other = draw(st.sampled_from([path.encode("utf-8", "replace").decode() for path in PATHS]))
        instead = [
            [], [members[at]] * 2, [("engines/zzz", b"more"), members[at]], [(other, content)], [(name, b"")],
            [members[at], *((f"more/{number}", b"") for number in range(2000))],
        ]  # fmt: skip
        members[at : at + 1] = draw(st.sampled_from(instead))
        members = (
            draw(st.one_of(st.just(members), st.permutations(members))) if len(members) < 100 else members
        )
    parts = [(MANIFEST_FILE, manifest), *members]
    packed = [part for name, c in parts for part in (member_header(name, len(c)), c, padding(len(c)))]
    return b"".join((*packed, END))


@st.composite
def safetensors_cases(draw: Draw, bases: Bases) -> Case:
    """A safetensors file, or one of very many tensors, whose header is read and whose tensors are copied."""
    base = draw(st.sampled_from(list(bases.artifacts.values())))
    file = draw(
        st.sampled_from([name for name in sorted(base.tree["files"]) if name.endswith(".safetensors")])
    )
    content = (base.folder / file).read_bytes()
    many = st.sampled_from([(size, shape) for size in (0, 1) for shape in ([size], [size] * 16, [size, 1])])
    damaged = draw(
        st.one_of(
            damaged_header(content), damaged_header(content), damaged_bytes(content), many.map(_many_tensors)
        )
    )

    def work(_: Path) -> None:
        for tensor in map_safetensors(memoryview(damaged), file).values():
            tensor.to_numpy()

    return Case(f"{base.name}, {file}", work, (ARTIFACT,))


def _many_tensors(drawn: tuple[int, list[int]]) -> bytes:
    size, shape = drawn
    table = {
        f"t{n}": {"dtype": "U8", "shape": shape, "data_offsets": [n * size, (n + 1) * size]}
        for n in range(MANY_TENSORS)
    }
    return _safetensors(table, bytes(size * MANY_TENSORS))


def _safetensors(table: Any, data: bytes) -> bytes:
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


@st.composite
def snapshot_cases(draw: Draw, bases: Bases) -> Case:
    """A snapshot that is restored; its hash is mended where the numbers in it are what is damaged."""
    kind = draw(st.sampled_from(("bytes", "header", "facts", "facts", "tensor", "another")))
    key = draw(st.sampled_from((None, None, None, SNAPSHOT_KEY)))
    whole = bases.snapshot if key is None else bases.keyed_snapshot
    parts = snapshot_parts(whole)
    if kind in ("bytes", "header"):
        content = draw(damaged_bytes(whole) if kind == "bytes" else damaged_header(whole))
    elif kind == "another":
        content = draw(
            st.sampled_from((b"", bases.tar, b"{}", bytes(4096), bases.snapshot, bases.keyed_snapshot))
        )
    else:
        names = [FACTS] if kind == "facts" else sorted(name for name in parts if not name.startswith("seko."))
        name = draw(st.sampled_from(names))
        if kind == "tensor" and draw(st.integers(0, 3)) == 3:
            del parts[name]
        else:
            parts[name] = draw(damaged_json(parts[name]) if kind == "facts" else damaged_bytes(parts[name]))
        content = snapshot_of(parts)

    def work(folder: Path) -> str:
        (folder / "saved").write_bytes(content)
        ending = restore(bases, folder / "saved", key)
        if key is not None and snapshot_parts(content) != snapshot_parts(whole):
            raise AssertionError("a keyed pool took another state than was saved with its key")
        return ending

    return Case(kind, work)


def restore(bases: Bases, path: Path, key: bytes | None = None) -> str:
    """Restore a snapshot and make three chunks of its session."""
    with (
        open_artifact(bases.artifacts["pool"].folder) as artifact,
        artifact.open_pool(snapshot_key=key) as pool,
    ):
        try:
            session = pool.restore(path)
        except Exception:
            if pool.free != pool.capacity:
                raise AssertionError("a refused snapshot holds a row") from None
            raise
        with session:
            for _ in range(3):
                session.run_chunk().to_host()
    return "restored"


def snapshot_parts(content: bytes) -> dict[str, bytes]:
    """The tensors of a snapshot file, as bytes."""
    size = int.from_bytes(content[:8], "little")
    table, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    return {name: data[slice(*entry["data_offsets"])] for name, entry in table.items()}


def snapshot_of(parts: dict[str, bytes]) -> bytes:
    """A snapshot file of these tensors, with the hash that belongs to them."""
    running = hashlib.sha256()
    for name, part in sorted(parts.items()):
        if name != HASH:
            running.update(f"{name}\0{len(part)}\0".encode() + part)
    parts = dict(sorted({**parts, HASH: running.digest()}.items()))
    table: dict[str, Any] = {}
    offset = 0
    for name, part in parts.items():
        table[name] = {"dtype": "U8", "shape": [len(part)], "data_offsets": [offset, offset + len(part)]}
        offset += len(part)
    return _safetensors(table, b"".join(parts.values()))


@st.composite
def trust_cases(draw: Draw, bases: Bases) -> Case:
    """A trust file and a signature, of which at least one is damaged: is the artifact to be opened?"""
    lines = bases.trust.decode().splitlines()
    digest = draw(st.sampled_from(("0" * 64, "f" * 64, "0" * 63, "", "é" * 64)))
    time = draw(
        st.sampled_from(("2020-01-01", "9999-12-31T23:59:59Z", "0000-00-00", "99999-01-01", "nan", "", "-1"))
    )
    more = (
        f"revoked {digest}", f"not-before {time}", lines[-1] + f" not-before={time}", f"not-before={time}",
        f"ed25519 {digest} low", "ed25519 " + "0" * 62 + "01 low", "rsa 00 x", "\u2028".join(lines), "#" * 1000,
        lines[-1] * 2, lines[-1].upper(), "ed25519", "\0", " " * 100_000, "ed25519 " + " " * 50_000 + "x",
    )  # fmt: skip
    ends = st.sampled_from(("\n", "\r\n", "\r"))
    changed = st.tuples(st.sampled_from(more), ends, st.booleans()).map(
        lambda drawn: drawn[1].join([drawn[0], *lines] if drawn[2] else [*lines, drawn[0]]).encode()
    )
    signed = st.one_of(damaged_json(bases.signature), damaged_bytes(bases.signature))
    trust = draw(st.one_of(st.just(bases.trust), damaged_bytes(bases.trust), changed))
    signature = draw(signed if trust == bases.trust else st.one_of(st.just(bases.signature), signed))
    return Case("trust", lambda folder: trusted(bases, folder, trust, signature))


def trusted(bases: Bases, folder: Path, trust: bytes, signature: bytes) -> str:
    """Read the manifest of an artifact with this signature, under a trust file."""
    place = linked(bases.artifacts["whole"], folder / "whole")
    put(place / SIGNATURE_FILE, signature)
    (folder / "trust").write_bytes(trust)
    read_manifest(place, trust=folder / "trust")
    return "trusted"


@st.composite
def file_cases(draw: Draw, sources: dict[str, Path], use: Callable[[Path], object]) -> Case:
    """A file, or one of a folder's, damaged and used as a build does; a flipped weight may pass, as no format has a
    checksum."""
    source = draw(st.sampled_from(list(sources.values())))
    files = sorted(file for file in source.rglob("*") if file.is_file()) if source.is_dir() else [source]
    target = draw(st.sampled_from(files))
    content = draw(_damaged_file(target))

    def work(folder: Path) -> object:
        path = folder / source.name
        if source.is_dir():
            shutil.copytree(source, path, copy_function=os.link)
        put(path / target.relative_to(source) if source.is_dir() else path, content)
        return use(path)

    return Case(f"{source.name}, {target.name}", work, (CHECKPOINT,))


@st.composite
def lora_cases(draw: Draw, bases: Bases) -> Case:
    """A LoRA's tensors, header or config, merged at some strength."""
    strength, partial = draw(st.sampled_from(("", "", ":0.5", ":-1", ":nan"))), draw(st.booleans())

    def use(path: Path) -> str:
        return merge(bases, LoraFile.parse(f"{path}{strength}"), partial=partial)

    return draw(file_cases(bases.loras, use))  # type: ignore[no-any-return]


def load(path: Path) -> str:
    """Recognise a checkpoint, and read all its tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config_of in (text_config_of, vae_config_of, recognise_checkpoint):
            with contextlib.suppress(ExportError):  # that it is none of that kind is an answer
                config_of(path)
        list(load_checkpoint(path, MODEL).items())
    return "loaded"


def merge(bases: Bases, lora: LoraFile, *, partial: bool = False) -> str:
    """Merge a LoRA into the checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = LoadOptions(loras=[lora], lora_partial=partial)
        list(load_checkpoint(bases.checkpoints["wan"], MODEL, options).items())
    return "merged"


def load_media(path: Path) -> str:
    """Read all tensors of a VAE."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        list(load_vae(path, vae_config_of(path)).items())
    return "loaded"


def _damaged_file(path: Path) -> st.SearchStrategy[bytes]:
    """The content of a file, damaged in the ways that its format has."""
    content = path.read_bytes()
    ways = [damaged_bytes(content)]
    if path.suffix == ".json":
        ways += [damaged_json(content)] * 3
    elif content.startswith(b"PK"):
        ways += [_damaged_zip(content)] * 2
    elif content.startswith(b"GGUF"):
        heads = st.sampled_from((64, 1024, 8192))
        ways += [
            heads.flatmap(lambda size: damaged_bytes(content[:size]).map(lambda head: head + content[size:]))
        ] * 3
    elif content[8:9] == b"{":
        ways += [damaged_header(content), damaged_header(content), _damaged_metadata(content)]
        if b".comfy_quant" in content:
            ways += [_damaged_format(content)] * 2
    return st.one_of(ways)


# What the header of a safetensors file may say of itself, as trainers and quantisers write it.
SAID_OF_ITSELF = {
    "lora_adapter_metadata": '{"transformer.r": 2, "transformer.lora_alpha": 2.0, "transformer.rank_pattern": {}}',
    "ss_network_alpha": "2.0",
    "ss_network_dim": "2",
    "_quantization_metadata": '{"layers": {"blocks.0.ffn.0": {"format": "float8_e4m3fn"}}}',
}


@st.composite
def _damaged_metadata(draw: Draw, content: bytes) -> bytes:
    """What a safetensors header says of its file: the JSON or number in one of its strings."""
    size = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + size])
    said = table.setdefault("__metadata__", {})
    key, text = draw(st.sampled_from(sorted((SAID_OF_ITSELF | said).items())))
    words = (
        "",
        "nan",
        "-1",
        "0",
        "1e400",
        "9" * 5000,
        "[" * 100_000,
        "{}",
        '"',
        "null",
        "\0",
        "2.5",
        text * 2,
    )
    others = st.sampled_from(words)
    in_it = damaged_json(text.encode()).map(lambda changed: changed.decode("utf-8", "replace"))
    said[key] = draw(st.one_of(others, in_it, in_it) if text.startswith("{") else others)
    return _safetensors(table, content[8 + size :])


@st.composite
def _damaged_format(draw: Draw, content: bytes) -> bytes:
    """The JSON of a matrix's format, which a tensor of bytes holds."""
    size = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + size])
    key = draw(st.sampled_from([key for key in sorted(table) if key.endswith(".comfy_quant")]))
    begin, end = (8 + size + offset for offset in table[key]["data_offsets"])
    changed = draw(damaged_json(content[begin:end]))[: end - begin].ljust(end - begin)
    return content[:begin] + changed + content[end:]


@st.composite
def _damaged_zip(draw: Draw, content: bytes) -> bytes:
    """One entry of a `.pt`'s zip, whose sums fit then."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(out, "w") as new,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        names = old.namelist()
        chosen = draw(st.sampled_from([name for name in names if name.endswith("data.pkl")] * 4 + names))
        step = draw(st.sampled_from(("damage", "damage", "damage", "drop", "twice", "rename")))
        for name in names:
            part = old.read(name)
            if name != chosen:
                new.writestr(name, part)
            elif step != "drop":
                new.writestr(
                    name + "x" * (step == "rename"), draw(damaged_bytes(part)) if step == "damage" else part
                )
                if step == "twice":
                    new.writestr(name, part[: len(part) // 2])
    return out.getvalue()


def list_anew(base: Base, place: Path, name: str) -> None:
    """Write the manifest anew with the hash and size that a file has now."""
    files = {**base.tree["files"], name: entry_of(place / name)}
    put(place / MANIFEST_FILE, json.dumps({**base.tree, "files": files}).encode())


def mend_pool_bytes(tree: Any) -> None:
    """Let ``kv.pool_bytes`` be the sum that the buffers give, so that another size gets past that check."""
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        caches = [buffer for buffer in tree["buffers"] if buffer["role"] == "cache"]
        tree["workload"]["kv"]["pool_bytes"] = sum(
            prod(cache["shape"]) * DTYPE_BYTES[cache["dtype"]] for cache in caches
        )


def _mend_weights(tree: Any, place: Path) -> None:
    """Write files of zeros as the manifest's tables want them, where they are small, and list them."""
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        for file in sorted({weight["file"] for weight in tree["weights"]}):
            table, offset = {}, 0
            for weight in tree["weights"]:
                if weight["file"] == file:
                    size = prod(weight["shape"]) * DTYPE_BYTES[weight["dtype"]]
                    offsets = [offset, offset + size]
                    stored = {
                        "dtype": _STORED[weight["dtype"]],
                        "shape": weight["shape"],
                        "data_offsets": offsets,
                    }
                    table[weight["name"]] = stored
                    offset += size
            if file in tree["files"] and 0 < offset <= MAX_MENDED:
                put(place / file, _safetensors(table, bytes(offset)))
                tree["files"][file] = entry_of(place / file)


def _use_artifact(place: Path, way: int) -> str:
    """Open an artifact and make a chunk of it; two ways of ten are a command."""
    if way >= 8:
        return _command([("verify", "info")[way - 8], str(place), "--json"])
    with open_artifact(place, copy_weights=way == 7) as artifact:
        return replay(artifact)


def replay(artifact: Any) -> str:
    """Make a chunk, and compare a short golden."""
    manifest: VideoManifest = artifact.manifest
    opening = _given(manifest)
    if manifest.pool is not None:
        with artifact.open_pool() as pool, pool.open_session(**opening) as session:
            return _chunk(session, manifest)
    with open_stacked(artifact, **opening) as session:
        ending = _chunk(session, manifest)
    golden = manifest.workload.golden
    if ending == "ran" and golden is not None and golden.chunks[-1] < MAX_REPLAYED:
        try:
            artifact.verify()
        except UsageError as error:  # its golden lacks what a session needs
            return type(error).__name__
        return "verified"
    return ending


def _chunk(session: Any, manifest: VideoManifest) -> str:
    """Make a chunk, unless its engines alone would take all the time that a case has."""
    if manifest.workload.schedule.denoise_passes * sum(map(len, manifest.programs.values())) > MAX_CALLS:
        return "opened"
    chunk = session.run_chunk()
    chunk.to_host()
    if manifest.workload.video is not None:
        chunk.video()
    return "ran"


def _given(manifest: VideoManifest) -> dict[str, Any]:
    """What a caller gives to a session: a sentence or embeddings, and reference frames, where it takes some."""
    opening: dict[str, Any] = {}
    embeddings = next((buffer for buffer in manifest.buffers if buffer.name == TEXT_BUFFER), None)
    if manifest.workload.text is not None:
        opening["prompt"] = PROMPT
    elif embeddings is not None:
        rows = 1 if manifest.pool is not None else manifest.call_rows
        opening["text"] = np.broadcast_to(np.float32(1), (rows, *embeddings.shape[1:]))
    if manifest.workload.stream.reference_frames:
        opening["reference"] = reference_of(manifest)
    return opening


def _command(arguments: list[str]) -> str:
    """Run the runtime's command line; its exit code must be one of the documented ones, and stderr a sentence."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(arguments)
    message = stderr.getvalue()
    if code not in CLI_CODES or "Traceback" in message or len(message) > 1 << 14:
        raise AssertionError(f"{arguments[0]} ended with {code}: {message[:500]!r}")
    return f"exit code {code}"


# A kind's strategy, and how often it comes.
KINDS: dict[str, tuple[Callable[[Bases], st.SearchStrategy[Case]], int]] = {
    "manifest": (manifest_cases, 10),
    "member": (member_cases, 2),
    "tar": (tar_cases, 2),
    "safetensors": (safetensors_cases, 2),
    "snapshot": (snapshot_cases, 2),
    "trust": (trust_cases, 1),
    "checkpoint": (lambda bases: file_cases(bases.checkpoints, load), 2),
    "lora": (lora_cases, 1),
    "vae": (lambda bases: file_cases(bases.vaes, load_media), 1),
}
