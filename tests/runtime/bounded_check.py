"""Checks the artifact in a folder as opening it would, with little time and memory. Run as a program; no tests."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path

import seko_runtime  # and numpy with it, which is no part of what the check may take
from seko_runtime.errors import SekoRuntimeError
from seko_runtime.opening.artifact import check_artifact

MEMORY_BYTES = 256 << 20


def taken_bytes() -> int:
    """Address space of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def main(folder: str, cpu_seconds: str) -> int:
    """Print how the check ended: the class of the error, its exit code and its message, as JSON."""
    seconds, memory = math.ceil(time.process_time() + float(cpu_seconds)), taken_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        check_artifact(folder, fits_here=False)
    except SekoRuntimeError as error:
        print(json.dumps([type(error).__name__, error.exit_code, str(error)]))
        return 0
    print(json.dumps(["", 0, f"taken by {seko_runtime.__version__}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
