"""One measurement in a process of its own: `python -m scripts.bench.peers.child JOB` prints one JSON line."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def main() -> None:
    """Do the job that the only argument describes."""
    job = json.loads(sys.argv[1])
    with torch.no_grad():
        report = JOBS[job["kind"]](job)
    print(json.dumps(report))


def reference(job: dict[str, Any]) -> dict[str, Any]:
    """Write what peers and engines are compared with."""
    from scripts.bench.peers.check import write_reference
    from scripts.bench.peers.shapes import SHAPES

    write_reference(SHAPES[job["shape"]], _device(), Path(job["reference"]))
    return {}


def peer(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one peer."""
    from scripts.bench.peers.network import RandomWan, device_weights, make_network
    from scripts.bench.peers.peers import PEERS, Compiler
    from scripts.bench.peers.shapes import SHAPES
    from seko_export.video.recording import golden_text

    shape, kind = SHAPES[job["shape"]], PEERS[job["peer"]]
    config = shape.config(_device())
    weights = device_weights(config, RandomWan(shape.model, config.target.device))
    network = make_network(config, weights, golden_text(config))
    return measure_peer(kind, network, Compiler(), job)


def measure_peer(kind: Any, network: Any, compiler: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Run one peer: first chunk, check, steady chunks.

    Parameters
    ----------
    kind : Peer
        From `PEERS`.
    network : Network
        Weights and prompt.
    compiler : Compiler
        How to compile.
    job : dict
        ``reference``, ``chunks``.

    Returns
    -------
    dict
        Milliseconds, bytes, counts, the `Verdict`; plain data.
    """
    from scripts.bench import counting
    from scripts.bench.peers.check import judge
    from seko_export.lowering.attention_backends import attention_backends

    config, s = network.config, network.config.workload.stream
    wrapped_chunk = -(-s.cache_frames // s.chunk_frames)
    noises = [network.noise([0], number * s.chunk_frames) for number in (0, wrapped_chunk)]
    _synchronize()
    if config.target.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with attention_backends(config.target.device):
        stream = kind.make(network, compiler)
        stream.prepare()
        first = stream.run_chunk(noises[0]).clone()
        for number in range(1, wrapped_chunk):
            stream.run_chunk(network.noise([0], number * s.chunk_frames))
        wrapped = stream.run_chunk(noises[1]).clone()
        verdict = judge(stream, first, wrapped, Path(job["reference"]))

        noise = torch.empty_like(noises[0])

        def run() -> Tensor:
            chunk: Tensor = stream.run_chunk(noise.normal_())
            return chunk

        run()
        chunk_ms = counting.spread(counting.chunk_times(run, job["chunks"]))
        return {
            "host_load": os.getloadavg()[0] / (os.cpu_count() or 1),
            "what": kind.what,
            "verdict": asdict(verdict) | {"ok": verdict.ok},
            "chunk_ms": chunk_ms,
            "step_ms": _per_pass(chunk_ms, network.passes + 1),
            "kv_bytes": stream.store.kv_bytes,
            "peak_bytes": counting.peak_bytes(),
        }


def engine(job: dict[str, Any]) -> dict[str, Any]:
    """Measure an artifact in the same way."""
    from scripts.bench import counting
    from scripts.bench.peers.check import FP8_LATENTS, LOSSY_LATENTS, Verdict, bounds, latents_errors
    from seko_runtime import open_artifact
    from seko_runtime.video.artifact import video_artifact

    with open_artifact(Path(job["artifact"])) as opened:
        artifact = video_artifact(opened)
        manifest = artifact.manifest
        s, passes = manifest.workload.stream, manifest.workload.schedule.denoise_passes + 1
        wrapped_chunk = -(-s.cache_frames // s.chunk_frames)
        with artifact.open_together() as session:
            first = torch.from_numpy(session.run_chunk().to_host())
            for _ in range(1, wrapped_chunk):
                session.run_chunk()
            wrapped = torch.from_numpy(session.run_chunk().to_host())
            dtype = torch.bfloat16 if artifact.device != "cpu" else torch.float32
            latents_bound, cache_bound = bounds(dtype)
            if not job["engine"].startswith("exact"):
                latents_bound = FP8_LATENTS if "fp8" in job["engine"] else LOSSY_LATENTS
            errors = latents_errors(first, wrapped, load_file(job["reference"]))
            verdict = Verdict(*errors, None, latents_bound, cache_bound)  # its cache: the build's goldens
            session.run_chunk()
            chunk_ms = counting.spread(counting.chunk_times(session.run_chunk, job["chunks"]))
            return {
                "what": f"seko, {manifest.workload.kv.scheme} cache, {manifest.backend}",
                "verdict": asdict(verdict) | {"ok": verdict.ok},
                "chunk_ms": chunk_ms,
                "step_ms": _per_pass(chunk_ms, passes),
                "kv_bytes": manifest.workload.kv.pool_bytes,
                "peak_bytes": counting.peak_bytes(),
            }


def batch(job: dict[str, Any]) -> dict[str, Any]:
    """Time an artifact of several rows, each at another chunk, all caches full."""
    from scripts.bench import counting
    from seko_runtime import open_artifact
    from seko_runtime.video.artifact import video_artifact

    with open_artifact(Path(job["artifact"])) as opened:
        artifact = video_artifact(opened)
        s = artifact.manifest.workload.stream
        with artifact.open_together() as session:
            for later in session.sessions[1:]:
                session.run_chunk()
                later.restart()
            for _ in range(-(-s.cache_frames // s.chunk_frames) + 1):
                chunk = session.run_chunk()
            first_frames = [int(row.frames[0, 0]) for row in chunk.rows]
            chunk_ms = counting.spread(counting.chunk_times(session.run_chunk, job["chunks"]))
    return {"chunk_ms": chunk_ms, "first_frames": first_frames, "peak_bytes": counting.peak_bytes()}


def end_to_end(job: dict[str, Any]) -> dict[str, Any]:
    """Time an artifact with a VAE from chunk to frames on the host: decoding after each chunk, and beside the next."""
    from scripts.bench.counting import paced_times
    from seko_runtime import open_artifact

    report = {}
    with open_artifact(Path(job["artifact"])) as artifact:
        s = artifact.manifest.workload.stream
        for name, overlap in (("serial_ms", False), ("overlapped_ms", True)):
            with artifact.open_session(overlap=overlap) as session:
                report[name] = statistics.median(paced_times(session, s, job["chunks"]))
    return report


def eager_vae(job: dict[str, Any]) -> dict[str, Any]:
    """Time diffusers' VAE decoding one chunk, as `vae` does it."""
    from scripts.bench import vae
    from scripts.bench.peers.shapes import SHAPES
    from scripts.bench.vae_engines import random_weights
    from seko_export.media.wan_vae.config import WanVaeConfig
    from seko_export.media.wan_vae.modules import latent_statistics

    wan = WanVaeConfig()
    config = SHAPES[job["shape"]].config(_device()).changed(vae=wan)
    weights = random_weights(wan) | latent_statistics(wan, torch.float32)
    latents = vae.some_latents(config, vae.CHUNKS).to(config.target.device)
    decoder = vae.eager_reference(config, weights, config.target.dtype)
    times, _ = vae.eager_times(decoder, latents, job["chunks"])
    return {"decode_ms": times["vae_decode"], "what": decoder.name}


def vae_file(job: dict[str, Any]) -> dict[str, Any]:
    """Write a full-size VAE or tiny decoder of random weights for a build."""
    from safetensors.torch import save_file

    from scripts.random_vae import SIZES, random_vae

    size = SIZES["taew2_1" if job["tiny"] else "wan-2.1"]
    save_file(random_vae(size, seed=0, dtype=torch.bfloat16), job["output"])
    return {}


def _per_pass(chunk_ms: dict[str, float], passes: int) -> dict[str, float]:
    return {name: chunk_ms[name] / passes for name in ("median", "p90")}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


JOBS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    job.__name__: job for job in (reference, peer, engine, batch, end_to_end, eager_vae, vae_file)
}

if __name__ == "__main__":
    main()
