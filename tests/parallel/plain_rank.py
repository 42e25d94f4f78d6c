"""What the processes of a test's rank group run: a few commands, and no engines.

python -m tests.parallel.plain_rank DESCRIPTOR
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from seko_runtime.parallel.channel import inherited_channel
from seko_runtime.parallel.records import record
from seko_runtime.parallel.worker import Handler, serve


@record
@dataclass
class Own:
    """An object of a class that the caller's process does not know."""


def begin(rank: int, facts: Mapping[str, Any]) -> tuple[Handler, object]:
    """Return the handler of commands; ``facts`` may say how long to wait before."""
    time.sleep(facts.get("seconds", 0.0))

    def answer(command: str, facts: Mapping[str, Any]) -> object:
        if command == "wait":  # uses no processor, as a rank that loads libraries or waits for another one
            time.sleep(facts["seconds"])
        if command == "own":
            return Own()
        if command == "stop" and rank == facts["rank"]:
            stop_at_the_first_array()
        return {
            "array": np.zeros(facts.get("size", 0)),
            "rank": rank,
            **facts,
            "temporary": os.environ.get("TMPDIR"),
        }

    return answer, rank


def stop_at_the_first_array() -> None:
    """Stop this process when it has sent a part of the next array."""
    write = os.write

    def write_a_part(descriptor: int, data: memoryview) -> int:
        written = write(descriptor, data[:1000])
        os.kill(os.getpid(), signal.SIGSTOP)
        return written

    os.write = write_a_part


if __name__ == "__main__":
    serve(inherited_channel(int(sys.argv[1])), begin)
    os._exit(0)
