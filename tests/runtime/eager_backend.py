"""The whole toy as a folder, opened by a backend of plain callables: an artifact without a compiler. No tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.video.manifest import Golden, VideoManifest
from tests.support.manifest_schema import check_manifest
from tests.support.rows import rows_of

from . import toy, toy_pool, toy_whole


class EagerBackend:
    """`seko_runtime.backends.base.Backend` over the toy's modules; engine files are not looked at."""

    def memory(self) -> Memory:
        return CpuMemory()

    def load_engines(self, manifest: VideoManifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        assert {engine.file for engine in manifest.engines} <= set(files)
        return toy_whole.eager_engines() if manifest.pool is None else toy_pool.pool_engines()

    def stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        pass


def write_whole(folder: Path, manifest: VideoManifest) -> Path:
    """Write weights, tokenizer, goldens from the eager modules and, where none are, stand-ins for engines."""
    for engine in manifest.engines:
        path = folder / engine.file
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"a stand-in for " + engine.name.encode())
    weights = {name: tensor.numpy() for name, tensor in toy_whole.whole_weights(manifest.call_rows).items()}
    for file in {weight.file for weight in manifest.weights}:
        named = [weight.name for weight in manifest.weights if weight.file == file]
        toy.write_safetensors(folder / file, {name: weights[name] for name in named})
    (folder / "text").mkdir()
    (folder / toy_whole.TOKENIZER).write_bytes(toy_whole.tokenizer_json())
    if manifest.workload.golden is not None:
        toy.write_safetensors(
            folder / manifest.workload.golden.file, golden_tensors(manifest.workload.golden)
        )
    manifest = replace(manifest, files=toy.file_entries(folder))
    (folder / "manifest.json").write_bytes(manifest_json(manifest))
    return check_manifest(folder)


def golden_tensors(golden: Golden) -> dict[str, Any]:
    """What the eager modules make of the golden's prompt and seeds."""
    step = golden.video_step
    tensors: dict[str, Any] = {}
    with toy_whole.open_whole(len(golden.seeds), seeds=golden.seeds) as session:
        tensors["text"] = rows_of(session).device().buffers["text.embeddings"].numpy().copy()
        for number in range(golden.chunks[-1] + 1):
            chunk = session.run_chunk()
            if number in golden.chunks:
                tensors[f"latents.{number}"] = chunk.to_host()
                tensors[f"video.{number}"] = np.ascontiguousarray(chunk.video()[:, :, ::step, ::step])
    return tensors
