"""Inference box: open an artifact and replay it chunk by chunk. Importing this imports no tensor library."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seko_runtime.artifact import OpenArtifact, open_artifact, read_manifest
    from seko_runtime.golden import ChunkError
    from seko_runtime.manifest import Manifest
    from seko_runtime.pool import Pool, PooledSession
    from seko_runtime.session import Chunk, Session

__version__ = "0.1.0"
__all__ = [
    "Chunk",
    "ChunkError",
    "Manifest",
    "OpenArtifact",
    "Pool",
    "PooledSession",
    "Session",
    "__version__",
    "open_artifact",
    "read_manifest",
]

_HOMES = {
    "Chunk": "session",
    "ChunkError": "golden",
    "Manifest": "manifest",
    "OpenArtifact": "artifact",
    "Pool": "pool",
    "PooledSession": "pool",
    "Session": "session",
    "open_artifact": "artifact",
    "read_manifest": "artifact",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
