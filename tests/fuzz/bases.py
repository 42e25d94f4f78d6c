"""The whole things that cases damage: artifacts, a tar, snapshots, keys, checkpoints. Made once, before any fork."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import seko_runtime.opening.artifact
from scripts.quantised_files import write_quantised
from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_lora import FORMS, random_pairs, write_lora
from scripts.random_vae import FORMS as VAE_FORMS
from scripts.random_vae import SIZES as VAES
from scripts.random_vae import write_random_vae
from seko_export.artifact.manifest_json import manifest_json
from seko_export.artifact.packing import pack_artifact
from seko_export.artifact.signing import make_key, sign_artifact
from seko_export.config.model import ModelConfig
from seko_runtime.backends.memory import Engine
from seko_runtime.errors import ArtifactError
from seko_runtime.format.manifest import MANIFEST_FILE, Buffer
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.video.manifest import Golden, VideoManifest, parse_video_manifest
from tests.runtime import toy, toy_pool, toy_whole
from tests.runtime.eager_backend import EagerBackend
from tests.support.rows import rows_of
from tests.support.small_artifact import build_small_artifact
from tests.support.stacked import open_stacked

STREAMED_LAYERS, STREAMED_SEATS = 4, 2
MODEL = ModelConfig(
    name="test",
    layers=2,
    dim=32,
    heads=2,
    ffn_dim=48,
    in_channels=5,
    out_channels=3,
    text_dim=24,
    freq_dim=16,
)
SNAPSHOT_KEY = bytes(range(32))
CHECKPOINTS = ("self-forcing", "wan", "wan-sharded", "diffusers")
QUANTISED = ("lightx2v-fp8", "comfyui-scaled", "comfyui-quant", "gguf")
Callables = dict[str, Callable[[list[Any]], list[Any]]]


@dataclass(frozen=True)
class Base:
    """A whole artifact: its folder and its manifest as JSON."""

    name: str
    folder: Path
    tree: dict[str, Any]


@dataclass
class Bases:
    """All that is whole, below one folder."""

    room: Path
    artifacts: dict[str, Base] = field(default_factory=dict)
    tar: bytes = b""
    snapshot: bytes = b""
    keyed_snapshot: bytes = b""  # under `SNAPSHOT_KEY`
    trust: bytes = b""
    signature: bytes = b""
    checkpoints: dict[str, Path] = field(default_factory=dict)
    loras: dict[str, Path] = field(default_factory=dict)
    vaes: dict[str, Path] = field(default_factory=dict)


class DoubleBackend(EagerBackend):
    """A backend that knows an engine by the content of its file, and compiles nothing."""

    engines: dict[str, Callable[[list[Any]], list[Any]]] = {}  # noqa: RUF012 - by SHA-256, filled before any fork

    def load_engines(self, manifest: VideoManifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        known = {spec.name: self.engines.get(_sha256(files[spec.file])) for spec in manifest.engines}
        if None in known.values():
            raise ArtifactError(f"one of the engines {sorted(known)} is no engine")
        return {name: engine for name, engine in known.items() if engine is not None}


def make_bases(room: Path, sample: Path | None = None) -> Bases:
    """Make everything in a new folder, and let `open_artifact` load engines that are plain callables from now on.

    ``sample`` is the smallest real artifact where it is built already.
    """
    room.mkdir()
    bases = Bases(room)
    bases.artifacts["sample"] = _sample(room / "sample", sample)
    seko_runtime.opening.artifact.open_backend = lambda *_: DoubleBackend()  # type: ignore
    whole, whole_engines = toy_whole.whole_manifest(golden=toy_whole.GOLDEN), toy_whole.eager_engines()
    artifacts: dict[str, tuple[VideoManifest, Callables, dict[str, torch.Tensor]]] = {
        "whole": (whole, whole_engines, toy_whole.whole_weights()),
        "pool": (toy_pool.pool_manifest(), toy_pool.pool_engines(), toy_pool.pool_weights()),
        "streamed": (_streamed(), toy.eager_engines(), toy.toy_weights(STREAMED_LAYERS)),
        "reference": (_with_references(), whole_engines, toy_whole.whole_weights(2)),
    }
    for name, parts in artifacts.items():
        bases.artifacts[name] = _written(room / name, *parts)
    make_key(room / "key")
    signed = shutil.copytree(bases.artifacts["whole"].folder, room / "signed")
    sign_artifact(signed, room / "key")
    bases.trust, bases.signature = (room / "key.pub").read_bytes(), (signed / "manifest.sig").read_bytes()
    pack_artifact(signed, room / "whole.tar")
    bases.tar = (room / "whole.tar").read_bytes()
    pool = bases.artifacts["pool"].folder
    bases.snapshot, bases.keyed_snapshot = (_saved(pool, room / "saved", key) for key in (None, SNAPSHOT_KEY))
    for form in CHECKPOINTS:
        bases.checkpoints[form] = room / f"checkpoint-{form}"
        write_random_checkpoint(bases.checkpoints[form], MODEL, format=form, seed=7)
    for form in QUANTISED:
        bases.checkpoints[form] = room / f"checkpoint-{form}"
        write_quantised(bases.checkpoints[form], load_file(bases.checkpoints["wan"]), form)
    for form in FORMS:
        bases.loras[form] = room / f"lora-{form}"
        write_lora(bases.loras[form], random_pairs(MODEL, rank=2, seed=7), form, 2.0)
    for form in VAE_FORMS:
        bases.vaes[form] = room / f"vae-{form}"
        write_random_vae(
            bases.vaes[form], VAES["wan-2.2-tiny"], form, seed=7, dtype=torch.bfloat16, device="cpu"
        )
    return bases


def _saved(folder: Path, path: Path, key: bytes | None) -> bytes:
    """A snapshot of a session that has made a chunk."""
    with (
        open_artifact(folder) as artifact,
        artifact.open_pool(snapshot_key=key) as rows,
        rows.open_session(prompt=toy_whole.PROMPT) as session,
    ):
        session.run_chunk()
        session.save(path)
    return path.read_bytes()


def linked(base: Base, folder: Path) -> Path:
    """A copy of an artifact's folder in hard links: a file of it is replaced by `put`, never written to."""
    return Path(shutil.copytree(base.folder, folder, copy_function=os.link))


def put(path: Path, content: bytes) -> None:
    """Write a file in the place of another one, of which links may be elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def entry_of(path: Path) -> dict[str, Any]:
    """Hash and size of a file, as a manifest lists them."""
    return {"sha256": _sha256(path.read_bytes()), "size": path.stat().st_size}


def reference_of(manifest: VideoManifest) -> np.ndarray[Any, Any]:
    """Reference frames for each row of a call."""
    channels, *sides = manifest.workload.stream.latent_shape
    shape = (manifest.call_rows, channels, manifest.workload.stream.reference_frames, *sides)
    return np.broadcast_to(np.float32(0.5), shape)


def _written(
    folder: Path, manifest: VideoManifest, engines: Callables, weights: Mapping[str, torch.Tensor]
) -> Base:
    """Write an artifact with stand-ins for engines, and goldens where its manifest wants some."""
    for spec in manifest.engines:
        content = f"a stand-in for {spec.name} of {folder.name}".encode()
        put(folder / spec.file, content)
        DoubleBackend.engines[_sha256(content)] = engines[spec.name]
    for file in {weight.file for weight in manifest.weights}:
        named = [weight.name for weight in manifest.weights if weight.file == file]
        toy.write_safetensors(folder / file, {name: weights[name].numpy() for name in named})
    if manifest.workload.text is not None:
        put(folder / toy_whole.TOKENIZER, toy_whole.tokenizer_json())
    if manifest.workload.golden is not None:
        _write_golden(folder, manifest, manifest.workload.golden)
    manifest = replace(manifest, files=toy.file_entries(folder))
    (folder / MANIFEST_FILE).write_bytes(manifest_json(manifest))
    return _based(folder)


def _write_golden(folder: Path, manifest: VideoManifest, golden: Golden) -> None:
    """Record what an artifact without goldens makes."""
    bare = toy.changed(manifest, golden=None, files=toy.file_entries(folder))
    (folder / MANIFEST_FILE).write_bytes(manifest_json(bare))
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    given: dict[str, Any] = {"prompt": golden.prompt}
    if golden.prompt is None:
        given = {"text": toy.toy_text(manifest.call_rows)}
    if golden.reference is not None:
        given["reference"] = tensors[golden.reference] = reference_of(manifest)
    with open_artifact(folder) as artifact, open_stacked(artifact, golden.seeds, **given) as session:
        if golden.text is not None:
            tensors[golden.text] = rows_of(session).device().buffers["text.embeddings"].numpy().copy()
        for number in range(golden.chunks[-1] + 1):
            chunk = session.run_chunk()
            if number in golden.chunks:
                tensors[f"latents.{number}"] = chunk.to_host()
                if step := golden.video_step:
                    tensors[f"video.{number}"] = np.ascontiguousarray(chunk.video()[:, :, ::step, ::step])
    toy.write_safetensors(folder / golden.file, tensors)


def _streamed() -> VideoManifest:
    """The toy with a cache on the host, of which two layers are on the device."""
    base = toy.toy_manifest(layers=STREAMED_LAYERS, golden=toy.GOLDEN)
    buffers = tuple(
        replace(buffer, device_layers=STREAMED_SEATS) if buffer.role == "cache" else buffer
        for buffer in base.buffers
    )
    return replace(base, buffers=buffers)


def _with_references() -> VideoManifest:
    """The whole toy with two rows, and two of its ring's slots as references."""
    base = toy_whole.whole_manifest(2)
    ring_frames = base.workload.stream.ring_frames - 2
    stream = replace(base.workload.stream, reference_frames=2, ring_frames=ring_frames)
    shape = (2, toy.CHANNELS, 2, toy.ROWS, toy.COLUMNS)
    buffers = (*base.buffers, Buffer("reference.latents", shape, "float32", "session"))
    golden = replace(toy_whole.GOLDEN, seeds=(0, 1), chunks=(0,), reference="reference", bounds=())
    return toy.changed(base, stream=stream, buffers=buffers, golden=golden)


def _sample(folder: Path, built: Path | None) -> Base:
    """The smallest real artifact, whose graphs run without being compiled."""
    if built is None:
        build_small_artifact(folder)
    else:
        shutil.copytree(built, folder)
    for spec in parse_video_manifest((folder / MANIFEST_FILE).read_bytes()).engines:
        content = (folder / spec.file).read_bytes()
        DoubleBackend.engines[_sha256(content)] = _eager(content)
    return _based(folder)


def _eager(content: bytes) -> Callable[[list[Any]], list[Any]]:
    module = torch.export.load(io.BytesIO(content)).module(check_guards=False)

    def run(inputs: list[Any]) -> list[Any]:
        out = module(*inputs)
        return [out] if isinstance(out, torch.Tensor) else list(out)

    return run


def _based(folder: Path) -> Base:
    return Base(folder.name, folder, json.loads((folder / MANIFEST_FILE).read_bytes()))


def _sha256(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
