"""A gateway as a process of its own, which a test may kill. No tests.

python -m tests.serve.toy_gateway PORT DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from seko_serve.fleet.gateway import Gateway
from seko_serve.fleet.redis_directory import RedisDirectory
from seko_serve.settings import Settings


def main(port: str, directory: str) -> None:
    """Serve until a signal comes."""
    gateway = Gateway(Settings(Path("fleet"), opens_per_s=1e5), lambda: RedisDirectory(directory))
    uvicorn.run(gateway.app(), port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
