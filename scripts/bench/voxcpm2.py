"""Speech on one GPU: a full-size VoxCPM2 of random weights beside plain torch, as other systems run it, in one process.

A text ends at its limit of patches, never at a random stop flag.

Parts: ``peers`` times plain torch (see `voxcpm2_peers`), ``step`` the artifact's steps of 1 and 64 rows and, with the
peers of the same run, their ratios; ``talk`` is what a listener hears: first sound, alone and beside 32 who speak, and
the real-time factor; ``fp8`` a step with weights in fp8. Checkpoint and artifacts that are there are used.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.bench.counting import spread
from scripts.bench.rows import append_row
from scripts.bench.voxcpm2_peers import CAPTURED, COMPILED, EAGER, PUBLIC, Peer, runners
from seko_export.families.voxcpm2.keys import FILES
from seko_export.families.voxcpm2.presets import PRESETS
from seko_runtime import open_artifact
from seko_runtime.errors import SekoRuntimeError
from seko_runtime.speech import contract
from seko_runtime.speech.artifact import SpeechArtifact, speech_artifact

ROOT = Path(__file__).parents[2]
GPU_BYTES_PER_MS = 4.8e9  # of an H200
POSITIONS, CACHED_POSITIONS = 1024, 600  # of a row: room in the cache, and positions that the cache has
SINGLE_ROW, MANY_ROWS, BUSY_ROWS = 1, 64, 32  # batch sizes; `BUSY_ROWS` speak while another row begins
BUCKETS = (SINGLE_ROW, BUSY_ROWS, MANY_ROWS)
TEXT = "hello world " * 12 + "in the thin "
VOICE_SECONDS = 5
BARS = {
    "vox_step_vs_floor": 3.2,
    "vox_step_vs_compiled": 0.62,
    "vox_step_vs_public": 0.25,
    "vox_step_vs_eager": 0.10,
    "vox_b64_vs_captured": 0.60,
    "vox_first_audio_ms": 40.0,
    "vox_first_audio_busy_ms": 60.0,
    "vox_rtf_b1": 0.035,
    "vox_launches_per_step": 1.0,
    "vox_fp8_step_vs_bf16": 0.75,
}


@dataclass
class Bench:
    """The measurements so far.

    Parameters
    ----------
    options : argparse.Namespace
        As `cases.py` has them.
    """

    options: argparse.Namespace
    started: float = field(default_factory=time.monotonic)
    peers: dict[tuple[str, int], float] = field(default_factory=dict)  # ms of a peer's step, by rows
    steps: dict[int, float] = field(default_factory=dict)  # ms of ours
    floor_ms: float = 0.0  # reading a step's weights once

    def row(self, figure: str, value: float, unit: str, **more: object) -> None:
        """Append one figure."""
        append_row(self.options.rows, figure, self.options.preset, value, unit, BARS.get(figure), **more)

    @property
    def on_gpu(self) -> bool:
        """Whether there is a GPU."""
        return torch.cuda.is_available()

    def artifact(self, name: str, *options: str) -> Path:
        """Return an artifact's folder, built unless it is there."""
        work: Path = self.options.work
        model, folder = work / self.options.preset, work / name
        device = ("--device", "cuda") if self.on_gpu else ()
        if not model.exists():
            make = ROOT / "scripts" / "make_checkpoint.py"
            _run(str(make), "--preset", self.options.preset, *device, "-o", str(model))
            speak_to_the_limit(model / FILES[0])
        if not folder.exists():
            sizes = ("--positions", str(POSITIONS), "--read-lengths", str(POSITIONS), "--prefill", "128")
            pool = ("--sessions", str(MANY_ROWS), "--batch", ",".join(map(str, BUCKETS)))
            _run(
                "-m",
                "seko_export",
                "build",
                str(model),
                *sizes,
                *pool,
                *options,
                "-o",
                str(folder),
                "--force",
            )
        return folder

    @contextmanager
    def opened(self, name: str, *options: str) -> Iterator[SpeechArtifact]:
        """Open an artifact, built if necessary."""
        with open_artifact(self.artifact(name, *options)) as artifact:
            yield speech_artifact(artifact)


def speak_to_the_limit(file: Path) -> None:
    """Set the stop head's weights to zero: random ones end most texts at the fifth patch, as no trained model does."""
    with file.open("r+b") as stored:
        (length,) = struct.unpack("<Q", stored.read(8))
        begin, end = json.loads(stored.read(length))["stop_head.weight"]["data_offsets"]
        stored.seek(8 + length + begin)
        stored.write(bytes(end - begin))


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True)


def peers(bench: Bench) -> None:
    """Plain torch in this process: whichever peers a batch is compared with."""
    config = PRESETS[bench.options.preset]
    device, dtype = ("cuda", torch.bfloat16) if bench.on_gpu else ("cpu", torch.float32)
    for batch, names in ((SINGLE_ROW, (EAGER, PUBLIC, CAPTURED, COMPILED)), (MANY_ROWS, (EAGER, CAPTURED))):
        peer = Peer(config, batch, CACHED_POSITIONS, POSITIONS, device, dtype)
        bench.floor_ms = peer.weight_bytes / GPU_BYTES_PER_MS
        for name in names if bench.on_gpu else (EAGER,):
            with torch.no_grad():
                step = runners(peer)[name]()
                bench.peers[name, batch] = times = queued_ms(step, 5 if name == EAGER else 20)
            print(json.dumps({"peer": name, "rows": batch, "ms": times}), flush=True)
        del peer


def step(bench: Bench) -> None:
    """Time the artifact's captured step at `CACHED_POSITIONS` positions; append its ratios to the peers of this run."""
    with bench.opened("artifact") as artifact:
        launches = 0
        for batch in (SINGLE_ROW, MANY_ROWS):
            bench.steps[batch], launches = steps_ms(artifact, batch, 20)
    ours, many = bench.steps[SINGLE_ROW], bench.steps[MANY_ROWS]
    facts = {
        "step_ms": ours,
        "held": CACHED_POSITIONS,
        "peers_ms": {f"{n} {b}": ms for (n, b), ms in bench.peers.items()},
    }
    bench.row("vox_launches_per_step", launches, "graph launches")
    if not bench.peers:
        bench.row("vox_step_ms", ours, "ms", b64_ms=many)
        return
    bench.row(
        "vox_step_vs_floor", ours / bench.floor_ms, "step / weight traffic", floor_ms=bench.floor_ms, **facts
    )
    for figure, name in (
        ("vox_step_vs_compiled", COMPILED),
        ("vox_step_vs_public", PUBLIC),
        ("vox_step_vs_eager", EAGER),
    ):
        if (name, SINGLE_ROW) in bench.peers:
            bench.row(figure, ours / bench.peers[name, SINGLE_ROW], f"step / {name}", **facts)
    if (CAPTURED, MANY_ROWS) in bench.peers:
        ratio = many / bench.peers[CAPTURED, MANY_ROWS]
        bench.row("vox_b64_vs_captured", ratio, f"step of {MANY_ROWS} / captured", b64_ms=many,
                  patches_per_second=1e3 * MANY_ROWS / many, **facts)  # fmt: skip


def talk(bench: Bench) -> None:
    """From a text to its first samples on the host, with a voice; alone and beside others; and how fast it goes on."""
    with bench.opened("artifact") as artifact, artifact.open_pool() as pool:
        encoder = artifact.manifest.workload.voice
        samples = min(
            VOICE_SECONDS * encoder.sample_rate, 32 * encoder.patch_samples
        )  # a tiny patch is short
        sound = 0.1 * np.random.default_rng(0).standard_normal(samples).astype(np.float32)
        voice = pool.encode_voice(sound)
        share = (artifact.manifest.workload.places - 1) // pool.capacity
        count = bench.options.first_sounds

        def first_sounds() -> dict[str, float]:
            times = []
            for seed in range(count):
                with pool.open_session(voice=voice, seed=seed, positions=share) as session:
                    began = time.perf_counter()
                    next(iter(session.speak(TEXT)))
                    times.append(1e3 * (time.perf_counter() - began))
            return spread(times[3:])

        alone = first_sounds()
        bench.row("vox_first_audio_ms", alone["p99"], "ms, p99, alone", **alone)
        with pool.open_session(voice=voice, seed=1, positions=share) as session:
            began = time.perf_counter()
            patches = sum(1 for _ in session.speak(TEXT, patches=200))
            seconds = time.perf_counter() - began
        heard = patches * artifact.manifest.workload.patch.seconds
        bench.row("vox_rtf_b1", seconds / heard, "seconds / seconds of sound", patches=patches,
                  ms_per_patch=1e3 * seconds / patches)  # fmt: skip
        stop = threading.Event()

        def speaker(seed: int) -> None:
            with pool.open_session(seed=seed, positions=share) as session:
                while not stop.is_set():
                    for _ in session.speak(TEXT):
                        if stop.is_set():
                            break

        threads = [threading.Thread(target=speaker, args=(seed,)) for seed in range(BUSY_ROWS)]
        for thread in threads:
            thread.start()
        time.sleep(2)
        try:
            busy = first_sounds()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        bench.row("vox_first_audio_busy_ms", busy["p99"], f"ms, p99, beside {BUSY_ROWS} who speak", **busy)


def fp8(bench: Bench) -> None:
    """A step whose layers' matrices are fp8."""
    if SINGLE_ROW not in bench.steps:
        step(bench)
    with bench.opened("artifact-fp8", "--fp8") as artifact:
        steps = {batch: steps_ms(artifact, batch, 20)[0] for batch in (SINGLE_ROW, MANY_ROWS)}
    fp8_ms, bf16_ms = steps[SINGLE_ROW], bench.steps[SINGLE_ROW]
    bench.row("vox_fp8_step_vs_bf16", fp8_ms / bf16_ms, "step / step in bf16", fp8_ms=fp8_ms, bf16_ms=bf16_ms,
              fp8_b64_ms=steps[MANY_ROWS], bf16_b64_ms=bench.steps[MANY_ROWS])  # fmt: skip


PARTS: dict[str, Callable[[Bench], None]] = {part.__name__: part for part in (peers, step, talk, fp8)}


def steps_ms(artifact: SpeechArtifact, batch: int, count: int) -> tuple[float, int]:
    """Return the milliseconds of a step of ``batch`` rows with `CACHED_POSITIONS` cached positions each, and the number
    of CUDA graphs that the step launches."""
    with artifact.open_pool() as pool:
        rows = pool._rows
        device, positions = rows.device(), (artifact.manifest.workload.places - 1) // pool.capacity
        numbers = {
            contract.ROWS: range(batch),
            contract.STARTS: range(0, batch * positions, positions),
            contract.FIRST: [CACHED_POSITIONS] * batch,
            contract.COUNT: [1] * batch,
            contract.SEEDS: range(batch),
            contract.PATCH_NUMBERS: [0] * batch,
            contract.TEMPERATURE: [1.0] * batch,
            contract.GUIDANCE: [2.0] * batch,
        }
        launches = 0

        def run() -> None:
            nonlocal launches
            with rows.memory.ordered():
                launches, _ = device.step(numbers)

        return queued_ms(run, count), launches


def queued_ms(run: Callable[[], Any], count: int) -> float:
    """Return the milliseconds of a call, median of several runs of ``count`` that are queued one behind the other."""
    run()
    times_ms = []
    for _ in range(5):
        if torch.cuda.is_available():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(count):
                run()
            end.record()
            end.synchronize()
            times_ms.append(float(begin.elapsed_time(end)) / count)
        else:
            began = time.perf_counter()
            run()
            times_ms.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(times_ms), 4)


def run(options: argparse.Namespace) -> int:
    """Measure the parts of the case; return the exit code."""
    bench, failed = Bench(options), {}
    for name in options.parts:
        try:
            PARTS[name](bench)
        except (SekoRuntimeError, RuntimeError, subprocess.CalledProcessError) as fault:  # other parts go on
            traceback.print_exc()
            failed[name] = f"{type(fault).__name__}: {fault}"[:500]
    print(json.dumps({"failed": failed, "seconds": round(time.monotonic() - bench.started, 1)}))
    return 1 if failed else 0
