"""A peer's stream in a process of its own: what it made until its time was up."""

from __future__ import annotations

import time

from scripts.bench.real_peers import stream_of

CHUNKS = """
import json, sys, time
for number, ms in enumerate((500.0, 40.0, 20.0, 30.0)[: int(sys.argv[2])]):
    print(json.dumps({"chunk": number, "ms": ms, "since_start_s": 7.0 + number}), flush=True)
"""


def test_a_whole_stream_has_a_cold_start_and_a_steady_chunk() -> None:
    made = stream_of(("-c", CHUNKS), (), 4, time.monotonic() + 60)
    assert made is not None
    assert (made["cold_s"], made["steady_ms"], made["slowest"]["chunk"]) == (7.0, 35.0, 0)


def test_a_stream_whose_time_is_up_has_no_steady_chunk_even_if_a_child_of_it_holds_the_pipe() -> None:
    hangs = "import subprocess; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    made = stream_of(("-c", CHUNKS + hangs), (), 4, time.monotonic() + 5)
    assert made is not None
    assert (made["cold_s"], made["steady_ms"], made["chunks"]) == (7.0, None, 4)


def test_nothing_is_said_of_a_stream_without_a_chunk() -> None:
    assert stream_of(("-c", "raise SystemExit(3)"), (), 4, time.monotonic() + 60) is None
