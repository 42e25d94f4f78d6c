"""A peer from its own package beside our artifacts, on one GPU: `s1_vs_flashdreams`, `cold_vs_flashdreams`.

Each runs in a process of its own, one after another, with random weights, at S1: 480x832, chunks of 3 latent frames, a
window of 21, four denoise passes and a context pass, no VAE. A steady chunk sees a full window. A cold start begins
with the process, `import torch` included, and ends with its first chunk. Ours: an exact cache, and the fastest build.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from scripts.bench.built import artifact, checkpoint
from scripts.bench.first_chunk import PRESET
from scripts.bench.peers.shapes import SHAPES
from scripts.bench.rows import append_row

ENGINES = {
    "exact": ("--kv", "bf16"),
    "fp4_fp8_resident": ("--kv", "fp4", "--fp8", "--resident-window"),
}
STEADY = 5  # the last chunks of a stream, of which the median is taken
_OURS = """
import json, sys, time
begun, artifact, chunks = float(sys.argv[1]), sys.argv[2], int(sys.argv[3])
from seko_runtime import open_artifact
with open_artifact(artifact) as opened, opened.open_session() as session:
    for number in range(chunks):
        began = time.perf_counter()
        session.run_chunk().to_host()
        took = time.perf_counter() - began
        print(json.dumps({"chunk": number, "ms": 1e3 * took, "since_start_s": time.time() - begun}), flush=True)
"""


def run(options: argparse.Namespace) -> None:
    """Build our artifacts, measure them and the peer, and append the rows."""
    weights = str(checkpoint(options.work, PRESET))
    ours = {
        name: artifact(options.work / name, weights, "--preset", PRESET, *engine)
        for name, engine in ENGINES.items()
    }
    if options.prepare:
        return
    ends = time.monotonic() + options.seconds
    measured = {
        name: stream_of(("-c", _OURS), (str(folder),), options.chunks, ends) for name, folder in ours.items()
    }
    peer = stream_of(("-m", "scripts.bench.peers.flashdreams_child"), (), options.chunks, ends)
    print(json.dumps({"flashdreams": peer, **measured}), flush=True)
    if peer is None:
        raise SystemExit("flashdreams made no chunk in the case's seconds: no ratio can be taken")
    shape = SHAPES["S1"].text
    version = importlib.metadata.version("flashdreams")
    figures = (
        ("cold_vs_flashdreams", "cold_s", "ours / theirs, seconds"),
        ("s1_vs_flashdreams", "steady_ms", "ours / theirs"),
    )
    for name, own in measured.items():
        for figure, key, unit in figures:
            if own is None or own[key] is None or peer[key] is None:
                continue
            on = f"{shape}, {name}, beside flashdreams {version}"
            append_row(options.rows, figure, on, own[key] / peer[key], unit, None, own=own, peer=peer)


def stream_of(
    program: Sequence[str], arguments: Sequence[str], chunks: int, ends: float
) -> dict[str, Any] | None:
    """Run a stream in a new process until it ends or its time is up; return its cold start and a steady chunk.

    Parameters
    ----------
    program : sequence of str
        What Python runs. It is given the time of its start, ``arguments`` and ``chunks``, and prints a JSON object a
        chunk.
    ends : float
        When it is ended, as time.monotonic().

    Returns
    -------
    dict or None
        None if it made no chunk. ``steady_ms`` is None where it did not come to its end.
    """
    command = [sys.executable, *program, str(time.time()), *arguments, str(chunks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        try:
            output, _ = child.communicate(timeout=max(1.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its compilers hold the pipe too
            output, _ = child.communicate()
    said = [json.loads(line) for line in output.splitlines() if line.startswith('{"chunk"')]
    if not said:
        return None
    steady = statistics.median(chunk["ms"] for chunk in said[-STEADY:]) if child.returncode == 0 else None
    slowest = max(said, key=lambda chunk: float(chunk["ms"]))
    return {"cold_s": said[0]["since_start_s"], "steady_ms": steady, "chunks": len(said), "slowest": slowest}
