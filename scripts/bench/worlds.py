"""Worlds that people play, at full size on one GPU: Matrix-Game 2.0 and minWM, with Wan's VAE.

No checkpoint and no artifact is written: engines are compiled as in a build, weights are drawn on the device. Parts:

- ``fps``: ``mg2_fps`` or ``minwm_fps``: video frames a second, on the host, decoded while the next chunk is made;
- ``fps_parts``: the same, decoded by one latent frame at a time;
- ``compiled``: ``mg2_step_vs_compiled``: a chunk of latents against the same by torch.compile, captured;
- ``kernels``: no row: where the time of a chunk goes, by kinds of kernels and by the longest ones, of both;
- ``key``: ``serve_key_to_picture``: from a key's event, where the row waits for its viewer, until the first frame that
  follows it is at the client, in chunk times;
- ``played``: ``serve_key_to_shown``: from a key's event at any time of a player in real time to the first frame that
  follows it on his screen, in chunks of video;
- ``sessions``: ``worlds_sessions`` and ``worlds_misses``: viewers of one server at 16 fps, and their late chunks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from scripts.bench.counting import paced_times, peak_bytes, spread
from scripts.bench.full_model import (
    FAST,
    PLAIN,
    TRIAL_VAE,
    FullModelBench,
    compiled_engines,
    measure,
    steady,
)
from scripts.bench.graph_timing import emit
from scripts.bench.serve import Served, python, watched
from seko_export import BuildOptions
from seko_export.config.video import VideoBuild
from seko_export.families.wan_layout.picture_condition import TABLE
from seko_export.media.pieces import decode_parts
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_export.options.resolve import resolve_build
from seko_export.tools.profile_trace import digest_trace
from seko_export.tools.profiling import kineto_settings, traced
from seko_export.video.recording import golden_inputs
from seko_runtime import Pool
from seko_runtime.video.session import Session

FIGURES = {"matrix_game": "mg2", "minwm": "minwm"}  # how the rows of a family begin
BARS = {
    "mg2_fps": 80.0,
    "minwm_fps": 24.0,
    "mg2_step_vs_compiled": 0.75,
    "serve_key_to_picture": 1.25,
    "serve_key_to_shown": 1.25,
    "worlds_sessions": 4.0,
    "worlds_misses": 0.0,
}
WATCHED_FPS = 16.0
LEAD_S = 0.15
KERNELS, KERNEL_LETTERS = 40, 160  # of a chunk, longest first; letters of a name
PRESSES = """
import asyncio, base64, json, sys, time
from pathlib import Path
from seko_serve.client import AsyncClient
from seko_serve.protocol import Media

async def run(url, presses, picture, begin):
    image = base64.b64encode(Path(picture).read_bytes()).decode()
    async with AsyncClient(url) as client:
        await client.open(codecs=["h264"], image=image)
        controls = client.ready["controls"].items()
        name, keys = next((name, control["keys"]) for name, control in controls if control.get("keys"))
        sent, times = None, []
        async for message in client.messages():
            if isinstance(message, Media):
                if sent is not None and message.chunk == sent[2]:
                    times.append(1e3 * (time.monotonic() - sent[1]))
                    sent = None
                continue
            if message["type"] == "applied" and sent is not None and message["id"] == sent[0]:
                sent = (*sent[:2], message["chunk"])
            if message["type"] == "chunk" and message["chunk"] < begin:
                await client.send("ack", chunk=message["chunk"])
            elif message["type"] == "chunk" and message["chunk"] > begin:  # two are unshown: the row waits
                if len(times) >= presses:
                    break
                held, pressed = keys[len(times) % 2]["codes"][:1], time.monotonic()
                sent = (await client.send("control", name=name, event={"held": held}), pressed, None)
                await client.send("ack", chunk=message["chunk"] - 1)
        await client.close()
    print(json.dumps(times))

asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
"""


# A player who shows frames at the stream's rate, and presses keys at any time. A latency ends when the first frame that
# follows the key is shown.
PLAYED = """
import asyncio, base64, json, random, sys, time
from pathlib import Path
from seko_serve.client import AsyncClient
from seko_serve.protocol import Media

async def run(url, presses, picture, begin, fps):
    image = base64.b64encode(Path(picture).read_bytes()).decode()
    random.seed(0)
    shown, applied, times, late = {}, {}, [], 0  # by chunk: when its first frame is shown; by control: its chunk
    news = asyncio.Condition()
    async with AsyncClient(url) as client:
        await client.open(codecs=["h264"], image=image, fps=fps)
        controls = client.ready["controls"].items()
        name, keys = next((name, control["keys"]) for name, control in controls if control.get("keys"))
        chunk_s, ends = client.ready["chunk_frames"] / fps, [0.0]

        async def press():
            for number in range(presses):
                await asyncio.sleep(random.uniform(1.0, 2.0) * chunk_s)
                pressed = time.monotonic()
                sent = await client.send("control", name=name, event={"held": keys[number % 2]["codes"][:1]})
                async with news:
                    await news.wait_for(lambda: sent in applied and applied[sent] in shown)
                times.append(1e3 * (shown[applied[sent]] - pressed))

        async def acknowledge(chunk, at):
            await asyncio.sleep(at - time.monotonic())
            await client.send("ack", chunk=chunk)

        tasks = []
        async for message in client.messages():
            if isinstance(message, Media):
                if message.chunk not in shown:
                    now = time.monotonic()
                    late += ends[-1] > 0 and now > ends[-1]
                    async with news:
                        shown[message.chunk] = max(now, ends[-1])
                        news.notify_all()
                    if message.chunk == begin:
                        tasks.append(asyncio.create_task(press()))
                continue
            if message["type"] == "applied":
                async with news:
                    applied[message["id"]] = message["chunk"]
                    news.notify_all()
            if message["type"] == "chunk":
                ends.append(shown[message["chunk"]] + message["frames"] / fps)
                tasks.append(asyncio.create_task(acknowledge(message["chunk"], ends[-1])))
                if len(times) >= presses:
                    break
        for task in tasks:
            task.cancel()
        await client.close()
    print(json.dumps({"times": times, "late": late}))

asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5])))
"""


class Bench(FullModelBench):
    """The options of the case."""

    bars: ClassVar[Mapping[str, float | None]] = BARS

    def config(
        self, *, exact: bool = False, decoded: bool = False, sessions: int = 1, parts: bool = False
    ) -> VideoBuild:
        """Return a build: FP4 cache, fp8 matmuls, a resident window; or torch's own layers over an exact cache. With
        ``parts`` a chunk is decoded by one latent frame at a time."""
        more: dict[str, Any] = {**PLAIN} if exact else {**FAST, "resident_window": True}
        if parts:
            more["decode_frames"] = 1
        if sessions > 1:
            more |= {"sessions": sessions, "batch": tuple(n for n in (1, 2, 4, 8) if n <= sessions)}
        asked = BuildOptions(preset=self.options.preset, no_vae=True, no_text=True, **more)
        config = resolve_build(asked).config
        return config.changed(vae=TRIAL_VAE if self.tiny else WanVaeConfig()) if decoded else config

    def shape(self, config: VideoBuild) -> str:
        """Return what rows call a build."""
        s = config.workload.stream
        cache = "fp4 cache, fp8 matmuls, resident window" if config.target.fp8 else "exact cache"
        parts = ", by single latents" if decode_parts(config) > 1 else ""
        vae = f", Wan VAE{parts}" if config.workload.vae else ""
        passes = len(config.workload.schedule.timesteps)
        return (
            f"{config.model.name}, {s.height}x{s.width}, chunk {s.chunk_frames}, ring {s.ring_frames}, {passes} passes "
            f"and context, {cache}{vae}, {config.workload.rows} rows"
        )

    @contextmanager
    def world(self, config: VideoBuild) -> Iterator[Pool]:
        """Open a pool whose sessions begin with their picture, of which CLIP has seen random features: there is no
        image encoder."""
        with self.pool(config) as pool:
            opened: Any = pool
            open_session = pool.open_session
            own = {name: value for name, value in golden_inputs(config, None).items() if name != TABLE}

            def begin(**given: Any) -> Session:
                return open_session(**given | {"inputs": own | (given.get("inputs") or {})})

            opened.open_session = begin
            yield pool


def play(session: Session) -> None:
    """Hold the first key of each control that has keys."""
    for control in session.controls.values():
        if keys := control.describe().get("keys"):
            control.take({"held": keys[0]["codes"][:1]})


def fps(bench: Bench) -> None:
    """A steady stream, with every frame on the host."""
    _fps(bench, bench.config(decoded=True))


def fps_parts(bench: Bench) -> None:
    """The same, decoded by one latent frame at a time."""
    _fps(bench, bench.config(decoded=True, parts=True))


def _fps(bench: Bench, config: VideoBuild) -> None:
    bench.compile([config])
    s = config.workload.stream
    with bench.opened(config) as session:
        play(session)
        times = paced_times(session, s, bench.options.chunks)
        kv_bytes = session.manifest.workload.kv.pool_bytes
    chunk_ms, frames = statistics.median(times), s.chunk_frames * s.temporal_stride
    bench.row(
        f"{FIGURES[config.model.family]}_fps", config, 1e3 * frames / chunk_ms, "video frames a second, on the host",
        chunk_ms=chunk_ms, kv_bytes=kv_bytes, peak_bytes=peak_bytes(),
    )  # fmt: skip


def _steady(bench: Bench, config: VideoBuild, engines: Any = None) -> dict[str, float]:
    with bench.opened(config, engines) as session:
        play(session)
        return steady(session, config, bench.options.chunks)


def compiled(bench: Bench) -> None:
    """A chunk of latents, and the same by torch.compile over an exact cache."""
    config, exact = bench.config(), bench.config(exact=True)
    bench.compile([config])
    ours = _steady(bench, config)
    theirs = _steady(bench, exact, None if bench.options.eager else compiled_engines(exact))
    bench.row(
        f"{FIGURES[config.model.family]}_step_vs_compiled", config, ours["median"] / theirs["median"],
        "chunk / compiled and captured", chunk_ms=ours["median"], chunk_p90_ms=ours["p90"],
        compiled_ms=theirs["median"], compiled_p90_ms=theirs["p90"],
        peer="each engine's graph by torch.compile, plain layers, exact cache of fixed size; all passes and the "
        "sampler in one captured graph",
    )  # fmt: skip


def kernels(bench: Bench) -> None:
    """Print the kernels of a chunk of latents, and of the same by torch.compile over an exact cache."""
    config, exact = bench.config(), bench.config(exact=True)
    bench.compile([config])
    _print_kernels(bench, "ours", config)
    _print_kernels(bench, "compiled", exact, None if bench.options.eager else compiled_engines(exact))


def _print_kernels(bench: Bench, name: str, config: VideoBuild, engines: Any = None) -> None:
    with kineto_settings(), bench.opened(config, engines) as session:
        play(session)
        steady(session, config, 2)

        def timed() -> float:
            begun = time.perf_counter()
            session.run_chunk().to_host()
            return time.perf_counter() - begun

        traced(timed, 1, bench.on_gpu)  # the profiler's start costs time in the first chunk that it sees
        trace, _ = traced(timed, 3, bench.on_gpu)
    report = digest_trace(trace).report(KERNELS)
    kinds = {kind: _kernel_ms(row) for kind, row in report["buckets"].items() if row["calls"]}
    emit(of=name, model=config.model.name, ms=round(report["total_ns"] / 1e6, 3),
         idle_ms=round(report["idle_ns"] / 1e6, 3), kinds=kinds)  # fmt: skip
    for row in report["top"]:
        emit(of=name, kernel=row["name"][:KERNEL_LETTERS], kind=row["bucket"], **_kernel_ms(row))


def _kernel_ms(row: dict[str, Any]) -> dict[str, float]:
    return {"calls": row["calls"], "ms": round(row["time_ns"] / 1e6, 3)}


def _start_picture(bench: Bench, config: VideoBuild) -> Path:
    picture = Path(bench.options.work, "start.png")
    size = (config.workload.stream.width, config.workload.stream.height)
    Image.new("RGB", size, (90, 120, 150)).save(picture)
    return picture


def _presses(bench: Bench, config: VideoBuild) -> tuple[int, Path, int]:
    """Return how often a viewer presses a key, the picture that he begins with, and the chunk before the first key."""
    return bench.options.presses, _start_picture(bench, config), bench.options.keys_from


def key(bench: Bench) -> None:
    """One viewer who presses a key whenever the row waits for him, of chunks decoded whole and in parts."""
    latents = bench.config()
    bench.compile([latents])
    chunk_ms = _steady(bench, latents)["median"]
    for parts in (False, True):
        _key(bench, bench.config(decoded=True, parts=parts), chunk_ms)


def _key(bench: Bench, config: VideoBuild, chunk_ms: float) -> None:
    bench.compile([config])
    with Served(lambda: bench.world(config)) as served:
        times = json.loads(python("-c", PRESSES, served.url, *_presses(bench, config)))
    figures = spread(times)
    bench.row("serve_key_to_picture", config, figures["p99"] / chunk_ms, "p99, from a key's event, where the row waits "
              "for its viewer, to the first frame that follows it / chunk", chunk_ms=chunk_ms, presses=len(times),
              latency_ms=figures, barred=decode_parts(config) > 1)  # fmt: skip


def played(bench: Bench) -> None:
    """One player in real time who presses a key at any time, of chunks begun as soon as may be, and with a lead."""
    config = bench.config(decoded=True, parts=True)
    bench.compile([config])
    for lead_s in (None, LEAD_S):
        with Served(lambda: bench.world(config), lead_s=lead_s) as served:
            seen = json.loads(python("-c", PLAYED, served.url, *_presses(bench, config), WATCHED_FPS))
            chunk_ms = 1e3 * served.chunk_frames / WATCHED_FPS
        figures = spread(seen["times"])
        bench.row("serve_key_to_shown", config, figures["p99"] / chunk_ms, "p99, from a key's event at any time to the "
                  f"first frame that follows it on a screen of {WATCHED_FPS:g} fps / a chunk's video",
                  late=seen["late"], presses=len(seen["times"]), latency_ms=figures, video_ms=chunk_ms,
                  barred=lead_s is not None, more="" if lead_s is None else f", --lead {lead_s:g}")  # fmt: skip


def sessions(bench: Bench) -> None:
    """Viewers of one server in real time, and what came late for them."""
    config = bench.config(decoded=True, sessions=bench.options.sessions)
    bench.compile([config])
    with Served(lambda: bench.world(config)) as served:
        load = partial(served.load, "--image", _start_picture(bench, config))
        seen = watched(
            load, bench.options.sessions, WATCHED_FPS, served.chunk_frames, bench.options.misses_of
        )
    columns = {name: seen[name] for name in ("chunks", "refused", "cpr", "worst_ms", "underruns", "stall_s")}
    fps_words = f"at {WATCHED_FPS:g} fps"
    bench.row("worlds_sessions", config, seen["served"], f"viewers {fps_words}", late=seen["late"], **columns)
    bench.row(
        "worlds_misses", config, seen["late"], f"chunks late, {seen['served']} viewers {fps_words}", **columns
    )


PARTS: dict[str, Callable[[Bench], None]] = {
    part.__name__: part for part in (fps, fps_parts, compiled, kernels, key, played, sessions)
}


def run(options: argparse.Namespace) -> int:
    """Measure the parts of the case; return the exit code."""
    return measure(Bench(options), PARTS)
