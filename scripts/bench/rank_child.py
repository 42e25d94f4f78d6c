"""One rank of what `ranks.py` measures: a session without the caller's control, timed and profiled. Prints JSON.

    python -m scripts.bench.rank_child '{"rank": 0, "ranks": 2, "device": "cuda:0", "meeting": FILE, ...}'

The engines are an artifact's (``artifact``), or those of ``build`` in ``engines``, with weights that each rank draws on
its device from the same seed; ``eager`` runs these uncompiled. Every rank runs the same chunks. With ``decode``, the
facts of `vae.build_config`, the engines are a VAE's decoder, which is all that is measured. With ``video`` a stream of
frames is, decoded beside the next chunk; with ``exchange`` only collectives are (`rank_exchange`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from seko_runtime.backends.rank_group import join_ranks
from seko_runtime.format.manifest import CALL_GROUP, LANE_GROUP
from seko_runtime.opening.artifact import open_rank
from seko_runtime.opening.rank_process import JOIN_S
from seko_runtime.sessions.loaded import Loaded
from seko_runtime.sessions.rank_place import RankPlace
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.opened_rows import open_video_rows
from seko_runtime.video.options import VideoOptions
from seko_runtime.video.pool import Pool
from seko_runtime.video.session import Session

if TYPE_CHECKING:
    from seko_export.config.video import VideoBuild

# The exporter is imported where it is needed. It loads torch's compiler, with which tensors of an engine get Python
# objects; and Gloo then waits for the interpreter, which a compiled engine holds. So nothing is profiled on a CPU.
KINETO = {
    "KINETO_LOG_LEVEL": "6",
    "DISABLE_CUPTI_LAZY_REINIT": "1",
    "TEARDOWN_CUPTI": "0",
}  # as `profiling` sets them
PROFILED = 3  # chunks
TOP = 16  # kernels that are named


def main(spec: Mapping[str, Any]) -> None:
    """Measure as one rank."""
    begun = time.monotonic()
    if spec["ranks"] > 1:
        groups = (CALL_GROUP, LANE_GROUP)
        join_ranks(spec["device"], spec["rank"], spec["ranks"], Path(spec["meeting"]), JOIN_S, groups)
    if "exchange" in spec:
        from scripts.bench.rank_exchange import exchanged

        print(json.dumps(exchanged(spec)), flush=True)
        return
    os.environ |= KINETO
    if "decode" in spec:
        with torch.no_grad():
            print(json.dumps(decoded(spec)), flush=True)
        return
    with torch.no_grad(), opened(spec) as session:
        ready = time.monotonic() - begun
        report = streamed(session, spec) if "video" in spec else measured(session, spec)
    print(json.dumps(report | {"ready_s": round(ready, 1)}), flush=True)


@contextmanager
def opened(spec: Mapping[str, Any]) -> Iterator[Session]:
    """Open the session of this rank."""
    if "artifact" in spec:
        with (
            open_rank(spec["artifact"], spec["device"], rank=spec["rank"]) as artifact,
            artifact.open_session() as session,
        ):
            yield session
        return
    from scripts.bench.full_model import as_video, random_weights
    from seko_export.artifact.describe import describe
    from seko_export.artifact.writer import hash_files
    from seko_export.backends import EAGER, export_backend
    from seko_export.engines.piece import dtype_name
    from seko_export.families.registry import graph_of
    from seko_export.goldens.eager import eager_engine
    from seko_export.lowering.attention_backends import attention_backends
    from seko_export.video.recording import golden_inputs, golden_reference, golden_text
    from seko_runtime.backends import open_backend
    from seko_runtime.backends.aoti import torch_memory
    from seko_runtime.format.manifest import Weight

    config = build_config(spec["build"], spec["ranks"])
    place = torch.device(spec["device"])
    if place.type == "cuda":
        torch.cuda.set_device(place)
    weights = random_weights(config.changed(ranks=1))  # each rank holds all of them
    table = tuple(
        Weight(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in weights.items()
    )
    memory = torch_memory(place)
    if spec["eager"]:
        manifest, backend = as_video(describe(config, EAGER, table, {})), None
        engines: Any = {name: eager_engine(piece) for name, piece in graph_of(config).pieces.items()}
        memory.captures = False
    else:
        folder = Path(spec["engines"])
        manifest = as_video(describe(config, export_backend("aoti"), table, hash_files(folder)))
        backend = open_backend("aoti", spec["device"])
        files = {engine.file: memoryview((folder / engine.file).read_bytes()) for engine in manifest.engines}
        engines = backend.load_engines(manifest, files)
    rank, reference = RankPlace(spec["rank"]), golden_reference(config)
    loaded = Loaded(manifest, resolve_video(manifest), engines, weights, lambda: memory, rank=rank)
    try:
        with (
            attention_backends(config.target.device),
            Pool(open_video_rows(loaded, VideoOptions())) as pool,
            pool.open_session(
                text=golden_text(config),
                reference=None if reference is None else reference[0].numpy(),
                inputs=golden_inputs(config, None),
            ) as session,
        ):
            yield session
    finally:
        if backend is not None:
            backend.close()


def build_config(build: Mapping[str, Any], ranks: int) -> VideoBuild:
    """Return the build of options, for so many ranks; with ``layers`` the model has fewer than its preset. One that
    ``hears`` has an audio encoder, the ``small`` one or the ``full`` one."""
    from scripts.random_vae import SIZES
    from seko_export import BuildOptions
    from seko_export.options.resolve import resolve_build

    options = dict(build)
    layers, vae, hears = options.pop("layers", 0), options.pop("vae", None), options.pop("hears", None)
    config = resolve_build(BuildOptions(**options, ranks=ranks, no_vae=True, no_text=True)).config
    if vae is not None:
        config = config.changed(vae=SIZES[vae])
    if hears:
        from scripts.bench.seko_talk import SMALL_HUBERT
        from seko_export.config.media import HubertConfig

        config = config.changed(audio=SMALL_HUBERT if hears == "small" else HubertConfig())
    return config.changed(model=replace(config.model, layers=layers)) if layers else config


def streamed(session: Session, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the milliseconds between a stream's chunks of frames, each on the host, when the cache is full."""
    from seko_export.video.recording import golden_inputs

    stream = session.manifest.workload.stream
    fill = -(-stream.cache_frames // stream.chunk_frames) + 2
    ends, frames = [], 0
    inputs = repeat(golden_inputs(build_config(spec["build"], spec["ranks"]), 0))
    for video in session.stream(chunks=fill + 1 + spec["chunks"], inputs=inputs):
        ends.append(time.perf_counter())
        frames = video.shape[1]
        if not video.any():
            raise ValueError("a chunk's frames are black, as of latents that are not finite")
    return {
        "ms": [1e3 * (end - begin) for begin, end in pairwise(ends[fill:])],
        "frames": frames,
        "fps": stream.fps,
        "overlaps": session.overlaps_decoding,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def measured(session: Session, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of chunks in milliseconds; of rank 0 also what its device did, and the first latents."""
    chunks, first, stream = spec["chunks"], spec["rank"] == 0, session.manifest.workload.stream
    on_gpu = spec["device"] != "cpu"

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def alone() -> None:
        session.run_chunk()
        wait()

    def to_host() -> None:
        if first:
            session.run_chunk().to_host()
        else:
            alone()

    def queued() -> None:
        for _ in range(chunks):
            session.run_chunk()
        wait()

    latents = []
    for _ in range(-(-stream.cache_frames // stream.chunk_frames) + 2):
        chunk = session.run_chunk()
        if first:
            latents.append(chunk.to_host())
        wait()
    if first:
        if not all(np.isfinite(chunk).all() for chunk in latents):
            raise ValueError("a chunk holds a number that is not finite, whose speed is none of the model's")
        np.savez(spec["latents"], *latents)
    times: dict[str, list[float]] = {"alone": [], "to_host": []}
    ends = []
    for _ in range(chunks):
        times["alone"].append(milliseconds(alone))
        ends.append(time.monotonic_ns())  # one clock for all processes of a machine
    times["to_host"] += [milliseconds(to_host) for _ in range(chunks)]
    times["queued"] = [milliseconds(queued) / chunks]
    report: dict[str, Any] = {
        "name": session.manifest.name,
        "layers": session.manifest.model["layers"],
        "passes": session.manifest.workload.schedule.denoise_passes + session.manifest.has_context,
        "ms": times,
        "ends_ns": ends,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "graph_launches": session.stats.graph_launches,
    }
    if not on_gpu:  # Gloo: see above
        return report
    return report | profiled(to_host, first=first)


def profiled(run: Callable[[], None], *, first: bool) -> dict[str, Any]:
    """Return what a call does on the first rank's GPU; the other ranks only make the same calls."""
    if not first:
        for _ in range(1 + PROFILED):
            run()
        return {}
    from seko_export.tools.profile_trace import digest_trace
    from seko_export.tools.profiling import traced

    # The profiler's start costs time in the first chunk that it sees.
    traced(lambda: milliseconds(run) / 1e3, 1, True)
    trace, _ = traced(lambda: milliseconds(run) / 1e3, PROFILED, True)
    return {"profile": digest_trace(trace).report(TOP)}


def decoded(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the milliseconds of chunks from their latents to this rank's frames on the host; keep the first frames."""
    from scripts.bench.vae import CHUNKS, build_config, some_latents
    from scripts.bench.vae_engines import DecodeSession, random_weights
    from seko_export.media.wan_vae.modules import latent_statistics

    config, vae = build_config(**spec["decode"], ranks=spec["ranks"])
    if spec["device"] != "cpu":
        torch.cuda.set_device(torch.device(spec["device"]))
    weights = random_weights(vae) | latent_statistics(vae, torch.float32)
    session = DecodeSession(config, weights, Path(spec["engines"]), spec["rank"], eager=spec["eager"])
    chunks = some_latents(config, CHUNKS).to(spec["device"]).split(config.workload.stream.chunk_frames, dim=2)
    first = [session.decode(latents).cpu() for latents in chunks]
    np.savez(f"{spec['latents']}.{spec['rank']}.npz", *(part.numpy() for part in first))
    host = torch.empty_like(first[-1], pin_memory=spec["device"] != "cpu")

    def to_host() -> None:
        host.copy_(session.decode(chunks[-1]), non_blocking=True)
        if spec["device"] != "cpu":
            torch.cuda.synchronize()

    to_host()
    report = {
        "ms": [milliseconds(to_host) for _ in range(spec["chunks"])],
        "peak_bytes": session.peak_bytes(),
    }
    if spec["device"] == "cpu":
        return report
    return report | profiled(to_host, first=spec["rank"] == 0)


def milliseconds(run: Callable[[], None]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begun)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
