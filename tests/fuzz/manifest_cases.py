"""Cases of damaged artifacts: a manifest or a file of it, hashes mended, opened and run for a chunk."""

from __future__ import annotations

import contextlib
import io
import json
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from seko_runtime.cli.commands import main
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import DTYPE_BYTES, MANIFEST_FILE
from seko_runtime.format.safetensors_map import DTYPE_NAMES
from seko_runtime.opening.artifact import OpenArtifact, open_artifact
from seko_runtime.video.contract import TEXT_BUFFER
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.session import Session
from tests.stacked import open_stacked

from .bases import Base, Bases, entry_of, linked, put, reference_of
from .damage import Document, Raw, damage_bytes, damage_json
from .manifest_steps import change_manifest

NAMES = ("sample", "whole", "pool", "streamed", "reference")
PROMPT = "a blue ring drifts"
MAX_CALLS = 600  # of engines in a chunk that is run here
MAX_REPLAYED = 8  # chunks; a golden of more is not replayed here
MAX_MENDED = 1 << 22  # bytes of weights that are written for a changed table
_STORED = {dtype: name for name, dtype in DTYPE_NAMES.items()}
CLI_CODES = (0, 2, 4, 5, 6)


def manifest_case(bases: Bases, random: Random, folder: Path, notes: list[str]) -> str:
    """Damage a manifest one to three times, mend what hides the damage, and use the artifact."""
    base = random.choice([bases.artifacts[name] for name in NAMES if name in bases.artifacts])
    place = linked(base, folder / base.name)
    document = Document(base.tree)
    notes.append(base.name)
    deep = random.random() < 0.6
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        notes.append(change_manifest(document, random) if deep else damage_json(document, random))
    if random.random() < 0.8:
        mend_pool_bytes(document.tree)
    if deep and random.random() < 0.7:
        mend_weights(document.tree, place)
    put(place / MANIFEST_FILE, document.encoded())
    return use_artifact(place, random)


def member_case(bases: Bases, random: Random, folder: Path, notes: list[str]) -> str:
    """Damage a file of an artifact whose manifest then lists it as it is: weights, goldens, a tokenizer."""
    base = random.choice([bases.artifacts[name] for name in NAMES if name in bases.artifacts])
    place = linked(base, folder / base.name)
    names = [name for name in base.entries if not name.startswith("engines/") or random.random() < 0.1]
    name = random.choice(names)
    content = (place / name).read_bytes()
    if name.endswith(".safetensors") and random.random() < 0.7:
        content, damage = damage_header(content, random)
    elif name.endswith(".json") and random.random() < 0.7:
        document = Document(json.loads(content))
        damage = damage_json(document, random)
        content = document.encoded()
    else:
        content, damage = damage_bytes(content, random)
    notes.append(f"{base.name}, {name}: {damage}")
    put(place / name, content)
    list_anew(base, place, (name,))
    return use_artifact(place, random)


def damage_header(content: bytes, random: Random) -> tuple[bytes, str]:
    """Damage the JSON header of a safetensors file; its length is right again, mostly."""
    size = int.from_bytes(content[:8], "little")
    document = Document(json.loads(content[8 : 8 + size]))
    damage = damage_json(document, random)
    header = document.encoded()
    header += b" " * (-len(header) % 8)
    said = len(header) if random.random() < 0.95 else random.choice((0, 1, 1 << 24, 1 << 40, (1 << 64) - 1))
    return said.to_bytes(8, "little") + header + content[8 + size :], damage


def list_anew(base: Base, place: Path, names: tuple[str, ...]) -> None:
    """Write the manifest anew with the hashes and sizes that files have now."""
    entries = {**base.entries, **{name: entry_of(place / name) for name in names}}
    put(place / MANIFEST_FILE, json.dumps({**base.tree, "files": entries}).encode())


def mend_pool_bytes(tree: Any) -> None:
    """Let ``kv.pool_bytes`` be the sum that the buffers give, so that another size gets past that check."""
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        total = 0
        for buffer in tree["buffers"]:
            if buffer["role"] == "cache":
                total += prod(buffer["shape"]) * DTYPE_BYTES[buffer["dtype"]]
        if not isinstance(tree["workload"]["kv"]["pool_bytes"], Raw):
            tree["workload"]["kv"]["pool_bytes"] = total


def mend_weights(tree: Any, place: Path) -> None:
    """Write files of zeros as the manifest's tables want them, where they are small, and list them."""
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        for file in {weight["file"] for weight in tree["weights"]}:
            table, offset = {}, 0
            for weight in tree["weights"]:
                if weight["file"] == file:
                    size = prod(weight["shape"]) * DTYPE_BYTES[weight["dtype"]]
                    table[weight["name"]] = {
                        "dtype": _STORED[weight["dtype"]],
                        "shape": weight["shape"],
                        "data_offsets": [offset, offset + size],
                    }
                    offset += size
            if file in tree["files"] and 0 < offset <= MAX_MENDED:
                header = json.dumps(table).encode()
                put(place / file, len(header).to_bytes(8, "little") + header + bytes(offset))
                tree["files"][file] = entry_of(place / file)


def use_artifact(place: Path, random: Random) -> str:
    """Open an artifact and make a chunk of it; sometimes by the command line."""
    way = random.random()
    if way < 0.1:
        return command(["verify", str(place), "--json"])
    if way < 0.2:
        return command(["info", str(place), "--json"])
    with open_artifact(place, copy_weights=random.random() < 0.1) as artifact:
        return replay(artifact)


def replay(artifact: OpenArtifact) -> str:
    """Make a chunk, and compare a short golden."""
    manifest = artifact.manifest
    opening = _given(manifest)
    if manifest.pool is not None:
        with artifact.open_pool() as pool, pool.open_session(**opening) as session:
            return _chunk(session, manifest)
    with open_stacked(artifact, **opening) as session:
        ending = _chunk(session, manifest)
    if (
        ending == "ran"
        and manifest.workload.golden is not None
        and manifest.workload.golden.chunks[-1] < MAX_REPLAYED
    ):
        try:
            artifact.verify()
        except UsageError as error:  # its golden lacks what a session needs
            return type(error).__name__
        return "verified"
    return ending


def _chunk(session: Session | Session, manifest: VideoManifest) -> str:
    """Make a chunk, unless its engines alone would take all the time that a case has."""
    passes = manifest.workload.schedule.denoise_passes
    if passes * sum(map(len, manifest.programs.values())) > MAX_CALLS:
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


def command(arguments: list[str]) -> str:
    """Run the runtime's command line; its exit code must be one of the documented ones, and stderr a sentence."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main(arguments)
    message = stderr.getvalue()
    if code not in CLI_CODES or "Traceback" in message or len(message) > 1 << 14:
        raise AssertionError(f"{arguments[0]} ended with {code}: {message[:500]!r}")
    return f"exit code {code}"
