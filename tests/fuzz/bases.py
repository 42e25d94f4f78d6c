"""The whole things that cases damage: artifacts, a tar, a snapshot, keys, checkpoints. Made once, before any fork."""

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
import pytest
import torch
from safetensors.torch import load_file

from scripts.quantised_files import write_quantised
from scripts.random_lora import FORMS, random_pairs, write_lora
from scripts.random_vae import FORMS as VAE_FORMS
from scripts.random_vae import SIZES as VAES
from scripts.random_vae import write_random_vae
from seko_export.artifact.manifest_json import manifest_json
from seko_export.artifact.packing import pack_artifact
from seko_export.artifact.signing import make_key, sign_artifact
from seko_export.config.model import ModelConfig
from seko_export.families.model_files import write_random_checkpoint
from seko_runtime.backends import open_backend
from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import ArtifactError
from seko_runtime.format.manifest import MANIFEST_FILE, Buffer
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.video.manifest import Golden, VideoManifest, parse_video_manifest
from tests.runtime import toy, toy_pool, toy_whole
from tests.small_artifact import build_small_artifact
from tests.stacked import open_stacked

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


@dataclass
class Base:
    """A whole artifact: its folder, its manifest as JSON, the hash and size of each of its files."""

    name: str
    folder: Path
    tree: dict[str, Any]
    entries: Mapping[str, dict[str, Any]]


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


class DoubleBackend:
    """`seko_runtime.backends.base.Backend` that knows an engine by the content of its file, and compiles nothing."""

    engines: dict[str, Callable[[list[Any]], list[Any]]] = {}  # noqa: RUF012 - by SHA-256, filled before any fork

    def memory(self) -> Memory:
        return CpuMemory()

    def load_engines(self, manifest: VideoManifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        loaded = {}
        for spec in manifest.engines:
            engine = self.engines.get(hashlib.sha256(files[spec.file]).hexdigest())
            if engine is None:
                raise ArtifactError(f"engine {spec.name} ({spec.file}) is no engine")
            loaded[spec.name] = engine
        return loaded

    def stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        pass


def make_bases(room: Path, *, with_sample: bool = True) -> Bases:
    """Make everything below ``room``, and teach `DoubleBackend` the engines.

    Parameters
    ----------
    room : Path
        An empty folder.
    with_sample : bool
        Whether the committed artifact is among them; its graphs take seconds to load.
    """
    bases = Bases(room)
    whole = toy_whole.whole_manifest(golden=toy_whole.GOLDEN)
    streamed = _streamed()
    artifacts: dict[str, tuple[VideoManifest, Callables, dict[str, torch.Tensor]]] = {
        "whole": (whole, toy_whole.eager_engines(), toy_whole.whole_weights()),
        "pool": (toy_pool.pool_manifest(), toy_pool.pool_engines(), toy_pool.pool_weights()),
        "streamed": (streamed, toy.eager_engines(), toy.toy_weights(STREAMED_LAYERS)),
        "reference": (_with_references(), toy_whole.eager_engines(), toy_whole.whole_weights(2)),
    }
    for name, (manifest, engines, weights) in artifacts.items():
        bases.artifacts[name] = _written(room / name, manifest, engines, weights)
    if with_sample:
        bases.artifacts["sample"] = _sample(room / "sample")
    pool, whole_folder = bases.artifacts["pool"].folder, bases.artifacts["whole"].folder
    make_key(room / "key")
    signed = shutil.copytree(whole_folder, room / "signed")
    sign_artifact(signed, room / "key")
    bases.trust, bases.signature = (room / "key.pub").read_bytes(), (signed / "manifest.sig").read_bytes()
    pack_artifact(signed, room / "whole.tar")
    bases.tar = (room / "whole.tar").read_bytes()
    bases.snapshot = _saved(pool, room / "snapshot.safetensors", None)
    bases.keyed_snapshot = _saved(pool, room / "keyed.safetensors", SNAPSHOT_KEY)
    for format_name in CHECKPOINTS:
        bases.checkpoints[format_name] = room / f"checkpoint-{format_name}"
        write_random_checkpoint(bases.checkpoints[format_name], MODEL, format=format_name, seed=7)
    weights = load_file(bases.checkpoints["wan"])
    for form in QUANTISED:
        bases.checkpoints[form] = room / f"checkpoint-{form}"
        write_quantised(bases.checkpoints[form], weights, form)
    pairs = random_pairs(MODEL, rank=2, seed=7)
    for form in FORMS:
        bases.loras[form] = room / f"lora-{form}"
        write_lora(bases.loras[form], pairs, form, 2.0)
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
    shutil.copytree(base.folder, folder, copy_function=os.link)
    return folder


def put(path: Path, content: bytes) -> None:
    """Write a file in the place of another one, of which links may be elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def entry_of(path: Path) -> dict[str, Any]:
    """Hash and size of a file, as a manifest lists them."""
    content = path.read_bytes()
    return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def _written(
    folder: Path, manifest: VideoManifest, engines: Callables, weights: Mapping[str, torch.Tensor]
) -> Base:
    """Write an artifact with stand-ins for engines, and goldens where its manifest wants some."""
    for spec in manifest.engines:
        content = f"a stand-in for {spec.name} of {folder.name}".encode()
        put(folder / spec.file, content)
        DoubleBackend.engines[hashlib.sha256(content).hexdigest()] = engines[spec.name]
    for file in {weight.file for weight in manifest.weights}:
        tensors = {
            weight.name: weights[weight.name].numpy() for weight in manifest.weights if weight.file == file
        }
        toy.write_safetensors(folder / file, tensors)
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
    text = None if golden.prompt is not None else toy.toy_text(manifest.call_rows)
    reference = reference_of(manifest) if golden.reference is not None else None
    with open_artifact(folder) as artifact:
        prompt = {"prompt": golden.prompt} if text is None else {"text": text}
        with open_stacked(artifact, golden.seeds, reference=reference, **prompt) as session:  # type: ignore[arg-type]
            if golden.text is not None:
                tensors[golden.text] = session._rows.device().buffers["text.embeddings"].numpy().copy()
            for number in range(golden.chunks[-1] + 1):
                chunk = session.run_chunk()
                if number in golden.chunks:
                    tensors[f"latents.{number}"] = chunk.to_host()
                    if golden.video_step:
                        step = golden.video_step
                        tensors[f"video.{number}"] = np.ascontiguousarray(chunk.video()[:, :, ::step, ::step])
    if golden.reference is not None:
        tensors[golden.reference] = reference_of(manifest)
    toy.write_safetensors(folder / golden.file, tensors)


def reference_of(manifest: VideoManifest) -> np.ndarray[Any, Any]:
    """Reference frames for each row of a call."""
    channels, *sides = manifest.workload.stream.latent_shape
    shape = (manifest.call_rows, channels, manifest.workload.stream.reference_frames, *sides)
    return np.broadcast_to(np.float32(0.5), shape)


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
    stream = replace(
        base.workload.stream, reference_frames=2, ring_frames=base.workload.stream.ring_frames - 2
    )
    shape = (2, toy.CHANNELS, 2, toy.ROWS, toy.COLUMNS)
    buffers = (*base.buffers, Buffer("reference.latents", shape, "float32", "session"))
    golden = replace(toy_whole.GOLDEN, seeds=(0, 1), chunks=(0,), reference="reference", bounds=())
    return toy.changed(base, stream=stream, buffers=buffers, golden=golden)


def _sample(folder: Path) -> Base:
    """The smallest real artifact, whose graphs run without being compiled."""
    with pytest.MonkeyPatch.context() as patch:
        # the build verifies in this process, by real engines
        patch.setattr("seko_runtime.opening.artifact.open_backend", open_backend)
        build_small_artifact(folder)
    for spec in parse_video_manifest((folder / MANIFEST_FILE).read_bytes()).engines:
        content = (folder / spec.file).read_bytes()
        DoubleBackend.engines[hashlib.sha256(content).hexdigest()] = _eager(content)
    return _based(folder)


def _eager(content: bytes) -> Callable[[list[Any]], list[Any]]:
    module = torch.export.load(io.BytesIO(content)).module(check_guards=False)

    def run(inputs: list[Any]) -> list[Any]:
        out = module(*inputs)
        return [out] if isinstance(out, torch.Tensor) else list(out)

    return run


def _based(folder: Path) -> Base:
    tree = json.loads((folder / MANIFEST_FILE).read_bytes())
    return Base(folder.name, folder, tree, dict(tree["files"]))
