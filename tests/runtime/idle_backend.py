"""A backend whose engines give the same numbers at each call, for processes that need no torch. No tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from seko_runtime.backends.memory import Engine, Memory
from seko_runtime.backends.numpy_memory import NumpyMemory
from seko_runtime.format.manifest import EngineSpec
from seko_runtime.video.manifest import VideoManifest


class IdleBackend:
    """`seko_runtime.backends.base.Backend` in numpy; engine files are not looked at."""

    def memory(self) -> Memory:
        return NumpyMemory()

    def load_engines(self, manifest: VideoManifest, files: Mapping[str, memoryview]) -> Mapping[str, Engine]:
        assert {engine.file for engine in manifest.engines} <= set(files)
        return {spec.name: _same_at_each_call(spec) for spec in manifest.engines}

    def stats(self) -> Mapping[str, int]:
        return {}

    def close(self) -> None:
        pass


def _same_at_each_call(spec: EngineSpec) -> Engine:
    drawn = np.random.default_rng(0)
    outputs: list[Any] = [
        (drawn.random(output.shape) * (255 if output.dtype == "uint8" else 1)).astype(output.dtype)
        for output in spec.outputs
    ]
    return lambda _inputs: list(outputs)
