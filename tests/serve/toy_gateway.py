"""A gateway as a process of its own, which a test may kill. No tests."""

from __future__ import annotations

from pathlib import Path

import uvicorn

from seko_serve.fleet.gateway import Gateway
from seko_serve.fleet.redis_directory import RedisDirectory
from seko_serve.settings import Settings


def main(port: int, directory: str) -> None:
    """Serve until a signal comes."""
    gateway = Gateway(Settings(Path("fleet"), opens_per_s=1e5), lambda: RedisDirectory(directory))
    uvicorn.run(gateway.app(), port=port, log_level="warning")
