"""Cases of damaged files beside artifacts: a tar, a safetensors header, a snapshot, trust, a checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.errors import ExportError
from seko_export.families.model_files import load_checkpoint, recognise_checkpoint
from seko_export.media.load import load_vae
from seko_export.media.umt5.dimensions import text_config_of
from seko_export.media.vaes import vae_config_of
from seko_runtime.format.manifest import MANIFEST_FILE, SIGNATURE_FILE
from seko_runtime.format.safetensors_map import map_safetensors
from seko_runtime.format.tar_format import BLOCK_BYTES, END, member_header, padding
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.opening.checked_artifact import read_manifest

from .bases import CHECKPOINTS, MODEL, QUANTISED, SNAPSHOT_KEY, Bases, linked, put
from .damage import PATHS, Document, damage_bytes, damage_json
from .manifest_cases import damage_header

Damage = Callable[[bytes, Random], tuple[bytes, str]]  # damaged content, and what was done to it

# What the header of a safetensors file may say of itself, as trainers and quantisers write it.
SAID_OF_ITSELF = {
    "lora_adapter_metadata": '{"transformer.r": 2, "transformer.lora_alpha": 2.0, "transformer.rank_pattern": {}}',
    "ss_network_alpha": "2.0",
    "ss_network_dim": "2",
    "_quantization_metadata": '{"layers": {"blocks.0.ffn.0": {"format": "float8_e4m3fn"}}}',
}
FACTS, HASH = "seko.snapshot", "seko.sha256"
MANY_TENSORS = 10_000


def tar_case(bases: Bases, random: Random, folder: Path, notes: list[str]) -> str:
    """Damage a packed artifact: bytes, blocks, a header with its checksum mended, or the manifest that it packs."""
    content = bases.tar
    kind = random.choice(("bytes", "blocks", "header", "manifest", "members"))
    for _ in range(random.choice((1, 1, 2))):
        if kind == "bytes":
            content, note = damage_bytes(content, random)
        elif kind == "blocks":
            content, note = damage_bytes(content, random, BLOCK_BYTES)
        elif kind == "header":
            content, note = _damage_tar_header(content, random)
        else:
            content, note = _packed_anew(bases, random, manifest=kind == "manifest")
        notes.append(note)
    archive, goal = folder / "packed.tar", folder / "made"
    archive.write_bytes(content)
    trust = folder / "trust" if random.random() < 0.3 else None
    if trust is not None:
        trust.write_bytes(bases.trust)
    try:
        unpack_artifact(archive, goal, trust=trust)
    except Exception:
        if goal.exists() or set(os.listdir(folder)) - {"packed.tar", "trust", "log"}:
            raise AssertionError(f"a refused tar leaves {sorted(os.listdir(folder))}") from None
        raise
    return "unpacked"


def _damage_tar_header(content: bytes, random: Random) -> tuple[bytes, str]:
    """Put something else into a field of a header; the checksum fits it."""
    data = bytearray(content)
    headers = [at for at in range(0, len(data), BLOCK_BYTES) if data[at + 257 : at + 262] == b"ustar"]
    if not headers:
        return content, "no header is left"
    at = random.choice(headers)
    first, size = random.choice(
        ((0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 6), (263, 2),
         (265, 32), (297, 32), (329, 8), (337, 8), (345, 155), (500, 12))
    )  # fmt: skip
    values = (
        bytes(size), b"7" * size, b"0" * (size - 1) + b"\0", b"77777777777\0"[:size], b"\x80" + bytes(size),
        b"\xff" * size, b"-1", b"5", b"1", b"2", b"x", b"g", b"L", b"../../x", b"/tmp/x", b"engines/step.pt2",
        MANIFEST_FILE.encode(), random.randbytes(size), "ä".encode(), b" " * size,
    )  # fmt: skip
    value = random.choice(values)[:size]
    data[at + first : at + first + size] = value.ljust(size, b"\0")
    if random.random() < 0.9:
        block = data[at : at + BLOCK_BYTES]
        data[at + 148 : at + 156] = b"%06o\0 " % (sum(block) - sum(block[148:156]) + 8 * 32)
    return bytes(data), f"bytes {first} of the header at {at} become {bytes(value[:20])!r}"


def _packed_anew(bases: Bases, random: Random, *, manifest: bool) -> tuple[bytes, str]:
    """Pack by hand, from a damaged manifest or of other members."""
    base = bases.artifacts["whole"]
    document = Document(base.tree)
    note = damage_json(document, random) if manifest else "members"
    members: list[tuple[str, bytes]] = [
        (name, (base.folder / name).read_bytes()) for name in sorted(base.entries)
    ]
    if not manifest:
        step = random.choice(("shuffle", "drop", "twice", "surplus", "rename", "empty", "many"))
        note = f"members: {step}"
        at = random.randrange(len(members))
        if step == "shuffle":
            random.shuffle(members)
        elif step == "drop":
            del members[at]
        elif step == "twice":
            members.insert(at, members[at])
        elif step == "surplus":
            members.insert(at, ("engines/zzz", b"more"))
        elif step == "rename":
            members[at] = (random.choice(PATHS[:-1]).encode("utf-8", "replace").decode(), members[at][1])
        elif step == "empty":
            members[at] = (members[at][0], b"")
        else:
            members += [(f"more/{number}", b"") for number in range(2000)]
    parts = []
    for name, content in [(MANIFEST_FILE, document.encoded()), *members]:
        parts += [member_header(name, len(content)), content, padding(len(content))]
    return b"".join((*parts, END)), note


def safetensors_case(bases: Bases, random: Random, folder: Path, notes: list[str]) -> str:  # noqa: ARG001
    """Damage a safetensors file, read its header, and copy each tensor."""
    whole = bases.artifacts[random.choice(tuple(bases.artifacts))]
    file = random.choice([name for name in whole.entries if name.endswith(".safetensors")])
    content = (whole.folder / file).read_bytes()
    kind = random.random()
    if kind < 0.6:
        content, note = damage_header(content, random)
    elif kind < 0.65:
        content, note = _many_tensors(random)
    else:
        content, note = damage_bytes(content[: random.choice((64, len(content)))], random)
    notes.append(f"{whole.name}, {file}: {note}")
    for tensor in map_safetensors(memoryview(content), file).values():
        tensor.to_numpy()
    return "read"


def _many_tensors(random: Random) -> tuple[bytes, str]:
    """A header of very many tensors, of which each is empty or lies where it must."""
    size = random.choice((0, 1))
    shape = random.choice(([size], [size] * 16, [size, 1]))
    table = {
        f"t{number}": {"dtype": "U8", "shape": shape, "data_offsets": [number * size, (number + 1) * size]}
        for number in range(MANY_TENSORS)
    }
    header = json.dumps(table).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size * MANY_TENSORS), f"many of {shape}"


def snapshot_case(bases: Bases, random: Random, folder: Path, notes: list[str]) -> str:
    """Damage a snapshot and restore it; its hash is mended where the numbers in it are what is damaged."""
    path = folder / "saved.safetensors"
    kind = random.choice(("bytes", "bytes", "header", "facts", "facts", "facts", "tensors", "another"))
    key = SNAPSHOT_KEY if random.random() < 0.2 else None
    whole = bases.keyed_snapshot if key is not None and random.random() < 0.8 else bases.snapshot
    if kind == "bytes":
        content, note = damage_bytes(whole, random)
    elif kind == "header":
        content, note = damage_header(whole, random)
    elif kind == "another":
        content, note = random.choice(
            ((b"", "empty"), (bases.tar, "a tar"), (b"{}", "JSON"), (bytes(4096), "zeros"))
        )
    else:
        content, note = _snapshot_anew(whole, random, facts=kind == "facts")
    notes.append(f"{kind}: {note}")
    path.write_bytes(content)
    ending = restore(bases, path, key)
    if key is not None and snapshot_parts(content) != snapshot_parts(whole):
        raise AssertionError("a keyed pool took another state than was saved with its key")
    return ending


def restore(bases: Bases, path: Path, key: bytes | None = None) -> str:
    """Restore a snapshot and make three chunks of its session."""
    folder = bases.artifacts["pool"].folder
    with open_artifact(folder) as artifact, artifact.open_pool(snapshot_key=key) as pool:
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


def _snapshot_anew(content: bytes, random: Random, *, facts: bool) -> tuple[bytes, str]:
    """Change a snapshot's facts or its tensors, and hash it as `save` does."""
    parts = snapshot_parts(content)
    if facts:
        document = Document(json.loads(parts[FACTS]))
        note = damage_json(document, random, least_depth=random.choice((1, 2, 3)))
        parts[FACTS] = document.encoded()
    else:
        name = random.choice([part for part in parts if not part.startswith("seko.")])
        note = f"{name} changes"
        if random.random() < 0.3:
            del parts[name]
        else:
            parts[name] = damage_bytes(parts[name], random)[0]
    return snapshot_of(parts), note


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
            running.update(f"{name}\0{len(part)}\0".encode())
            running.update(part)
    parts = {**parts, HASH: running.digest()}
    table: dict[str, Any] = {}
    offset = 0
    for name, part in sorted(parts.items()):
        table[name] = {"dtype": "U8", "shape": [len(part)], "data_offsets": [offset, offset + len(part)]}
        offset += len(part)
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(part for _, part in sorted(parts.items()))


def trust_case(bases: Bases, random: Random, folder: Path, notes: list[str]) -> str:
    """Damage a trust file or a signature, or both, and ask whether the artifact is to be opened."""
    trust, signature = bases.trust, bases.signature
    if random.random() < 0.5:
        trust, note = _damage_trust(trust, random)
        notes.append(f"trust: {note}")
    if trust == bases.trust or random.random() < 0.3:
        if random.random() < 0.6:
            document = Document(json.loads(signature))
            note = damage_json(document, random)
            signature = document.encoded()
        else:
            signature, note = damage_bytes(signature, random)
        notes.append(f"signature: {note}")
    place = linked(bases.artifacts["whole"], folder / "whole")
    put(place / SIGNATURE_FILE, signature)
    (folder / "trust").write_bytes(trust)
    read_manifest(place, trust=folder / "trust")
    return "trusted"


def _damage_trust(content: bytes, random: Random) -> tuple[bytes, str]:
    if random.random() < 0.5:
        return damage_bytes(content, random)
    lines = content.decode().splitlines()
    digest = random.choice(("0" * 64, "f" * 64, "0" * 63, "", "é" * 64))
    time = random.choice(
        ("2020-01-01", "9999-12-31T23:59:59Z", "0000-00-00", "99999-01-01", "nan", "", "-1", "1e9")
    )
    line = random.choice(
        (
            f"revoked {digest}", f"not-before {time}", lines[-1] + f" not-before={time}", f"not-before={time}",
            f"ed25519 {digest} low", "ed25519 " + "0" * 62 + "01 low", "rsa 00 x", "\u2028".join(lines), "#" * 1000,
            lines[-1] * 2, lines[-1].upper(), "ed25519", "\0", " " * 100_000, "ed25519 " + " " * 50_000 + "x",
        )
    )  # fmt: skip
    lines.insert(random.randrange(len(lines) + 1), line)
    return random.choice(("\n", "\r\n", "\r")).join(lines).encode(), line[:60]


def _copied(source: Path, path: Path, random: Random) -> Path:
    """Copy a file or folder by hard links to ``path``; return the file of it that is to be damaged."""
    if not source.is_dir():
        os.link(source, path)
        return path
    shutil.copytree(source, path, copy_function=os.link)
    return random.choice(sorted(file for file in path.rglob("*") if file.is_file()))


def _damage_file(target: Path, random: Random, damage: Damage | None = None) -> str:
    """Damage a file by ``damage``, otherwise in a way that its format has; return what was done."""
    content = target.read_bytes()
    if target.suffix == ".json":
        document = Document(json.loads(content))
        note = damage_json(document, random)
        content = document.encoded()
    elif damage is not None:
        content, note = damage(content, random)
    elif content.startswith(b"PK"):
        content, note = _damage_zip(content, random)
    elif content.startswith(b"GGUF"):
        content, note = _damage_gguf(content, random)
    elif random.random() < 0.7:
        content, note = damage_header(content, random)
    else:
        content, note = damage_bytes(content, random)
    put(target, content)
    return note


def checkpoint_case(bases: Bases, random: Random, folder: Path, notes: list[str]) -> str:
    """Damage a checkpoint and read it as a build does; a flipped weight may pass, as no format has a checksum."""
    name = random.choice((*CHECKPOINTS, *QUANTISED))
    source, path = bases.checkpoints[name], folder / f"checkpoint-{name}"
    target = _copied(source, path, random)
    damage: Damage | None = None
    if name == "comfyui-quant" and random.random() < 0.4:
        damage = _damage_format
    elif target.read_bytes()[8:9] == b"{" and random.random() < 0.2:
        damage = _damage_metadata
    note = _damage_file(target, random, damage)
    notes.append(f"{name}, {target.name}: {note}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for config_of in (text_config_of, vae_config_of, recognise_checkpoint):
            with contextlib.suppress(ExportError):  # that it is none of that kind is an answer
                config_of(path)
        checkpoint = load_checkpoint(path, MODEL)
        for _ in checkpoint.items():
            pass
    return "loaded"


def lora_case(bases: Bases, random: Random, folder: Path, notes: list[str]) -> str:
    """Damage a LoRA's tensors, header or config, and merge it as a build does."""
    name = random.choice(tuple(bases.loras))
    source, path = bases.loras[name], folder / "lora"
    target = _copied(source, path, random)
    of_itself = target.read_bytes()[8:9] == b"{" and random.random() < 0.4
    note = _damage_file(target, random, _damage_metadata if of_itself else None)
    notes.append(f"{name}, {target.name}: {note}")
    file = LoraFile.parse(random.choice((str(path), f"{path}:0.5", f"{path}:-1", f"{path}:nan")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        partial_match = random.random() < 0.5
        checkpoint = load_checkpoint(
            bases.checkpoints["wan"], MODEL, LoadOptions(loras=[file], lora_partial=partial_match)
        )
        for _ in checkpoint.items():
            pass
    return "merged"


def vae_case(bases: Bases, random: Random, folder: Path, notes: list[str]) -> str:
    """Damage a VAE of Wan 2.2, its weights or its config.json, and read it as a build does."""
    name = random.choice(tuple(bases.vaes))
    path = folder / "vae"
    target = _copied(bases.vaes[name], path, random)
    notes.append(f"{name}, {target.name}: {_damage_file(target, random)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in load_vae(path, vae_config_of(path)).items():
            pass
    return "loaded"


def _damage_gguf(content: bytes, random: Random) -> tuple[bytes, str]:
    """Damage a GGUF file: its first kilobytes, which are its header, or its bytes."""
    size = random.choice((64, 1024, 8192, len(content)))
    head, note = damage_bytes(content[:size], random)
    return head + content[size:], f"first {size}: {note}"


def _damage_format(content: bytes, random: Random) -> tuple[bytes, str]:
    """Change the JSON of a matrix's format, which a tensor of bytes holds."""
    size = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + size])
    key = random.choice([key for key in table if key.endswith(".comfy_quant")])
    begin, end = (8 + size + offset for offset in table[key]["data_offsets"])
    document = Document(json.loads(content[begin:end]))
    note = damage_json(document, random)
    changed = document.encoded()[: end - begin].ljust(end - begin)
    return content[:begin] + changed + content[end:], f"{key}: {note}"


def _damage_metadata(content: bytes, random: Random) -> tuple[bytes, str]:
    """Change what a safetensors header says of its file: the JSON or number in one of its strings."""
    size = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + size])
    metadata = table.setdefault("__metadata__", {})
    key = random.choice(tuple(SAID_OF_ITSELF | metadata))
    text = metadata.get(key, SAID_OF_ITSELF.get(key, ""))
    if text.startswith("{") and random.random() < 0.8:
        document = Document(json.loads(text))
        note = damage_json(document, random)
        metadata[key] = document.encoded().decode("utf-8", "replace")
    else:
        metadata[key] = random.choice(
            (
                "",
                "nan",
                "-1",
                "0",
                "1e400",
                "9" * 5000,
                "[",
                "[" * 100_000,
                "{}",
                '"',
                "null",
                "\0",
                "2.5",
                text * 2,
            )
        )
        note = f"becomes {metadata[key][:20]!r}"
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[8 + size :], f"{key}: {note}"


def _damage_zip(content: bytes, random: Random) -> tuple[bytes, str]:
    """Damage a `.pt`: its bytes, or one entry of its zip, whose sums fit then."""
    if random.random() < 0.4:
        return damage_bytes(content, random)
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(out, "w") as new,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        names = old.namelist()
        pickles = [name for name in names if name.endswith("data.pkl")]
        chosen = random.choice((*pickles, *pickles, random.choice(names)))
        step = random.choice(("damage", "damage", "damage", "drop", "twice", "rename"))
        note = f"{chosen}: {step}"
        for name in names:
            part = old.read(name)
            if name == chosen and step == "drop":
                continue
            if name == chosen and step == "damage":
                part, more = damage_bytes(part, random)
                note += " " + more
            new.writestr(name + "x" * (name == chosen and step == "rename"), part)
            if name == chosen and step == "twice":
                new.writestr(name, part[: len(part) // 2])
    return out.getvalue(), note
