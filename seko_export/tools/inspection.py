"""Reports on a finished artifact: contents, errors against recorded results, speed. Only the runtime opens the artifact
for a report."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seko_runtime import open_artifact
from seko_runtime.format.manifest import ENGINES_FOLDER, MANIFEST_FILE, Manifest
from seko_runtime.opening.artifact import check_artifact
from seko_runtime.sessions.verdict import verdict, worst_of
from seko_runtime.video.artifact import video_artifact
from seko_runtime.video.manifest import VideoManifest

_TAR_MARK = (257, b"ustar")


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is to be read as a checkpoint, since nothing there looks like an artifact."""
    if path.is_dir():
        return not (path / MANIFEST_FILE).exists() and not (path / ENGINES_FOLDER).is_dir()
    if not path.is_file():
        return False
    at, mark = _TAR_MARK
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(len(mark)) != mark
    except OSError:
        return True


def inspect_artifact(path: Path) -> dict[str, Any]:
    """Return the contents of an artifact after checking every hash. `inspect_artifact` does not load the artifact's
    engines.

    Parameters
    ----------
    path : Path
        Folder of the artifact.

    Returns
    -------
    dict
        Plain data: name, digest, target, model, the workload's own part (for video: stream, kv, schedule, text, video),
        sizes, engines, programs.

    Raises
    ------
    ArtifactError
        If the artifact is damaged or cannot be read; the subclass tells the cause.
    """
    checked = check_artifact(path, fits_here=False)
    manifest = checked.manifest
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    return {
        "name": manifest.name,
        "digest": checked.digest,
        "format": manifest.format_version,
        "backend": manifest.backend,
        "target": asdict(manifest.target),
        "producer": dict(manifest.producer),
        "model": dict(manifest.model),
        **_workload(manifest),
        "engine_bytes": sum(size for name, size in sizes.items() if name.startswith("engines/")),
        "weight_bytes": sum(size for name, size in sizes.items() if name.startswith("weights/")),
        "engines": {engine.name: sizes[engine.file] for engine in manifest.engines},
        "programs": {name: [call.engine for call in calls] for name, calls in manifest.programs.items()},
    }


def _workload(manifest: Manifest) -> dict[str, Any]:
    """Return the workload's own part of the report, without recorded results."""
    if isinstance(manifest, VideoManifest):
        video = manifest.workload
        return {
            "stream": asdict(video.stream),
            "kv": asdict(video.kv) | {"device_bytes": manifest.device_pool_bytes},
            "schedule": asdict(video.schedule),
            "text": None if video.text is None else asdict(video.text),
            "video": None if video.video is None else asdict(video.video),
        }
    return {
        "workload": {name: value for name, value in asdict(manifest.workload).items() if name != "golden"}
    }


def verify_artifact(path: Path) -> dict[str, Any]:
    """Replay the steps or chunks of an artifact's golden, and compare the results with the recorded results.

    Returns
    -------
    dict
        ``digest``, and the result of `seko_runtime.sessions.verdict.verdict`: ``ok``, ``worst``, and ``errors`` for
        each recorded chunk.
    """
    return replayed_artifact(path)[0]


def replayed_artifact(path: Path) -> tuple[dict[str, Any], str]:
    """Return the report of `verify_artifact`, and its worst error as a line of text."""
    with open_artifact(path) as artifact:
        errors = artifact.verify()
        return {"digest": artifact.digest} | verdict(errors), str(worst_of(errors))


def bench_artifact(path: Path, chunks: int) -> dict[str, Any]:
    """Measure the speed of an artifact with its recorded text, one chunk at a time; the host waits for each chunk.

    Parameters
    ----------
    path : Path
        Folder of the artifact.
    chunks : int
        Number of chunks to time after the cache is full.

    Returns
    -------
    dict
        Times in seconds are ``open_s``, ``first_chunk_s`` (from before the session is opened), ``chunk_median_s``,
        ``chunk_p90_s``, ``chunk_p99_s`` and ``step_median_s`` (a chunk divided by its passes). Further entries are
        ``chunks_per_s``, ``real_time_factor`` (video seconds made per second), ``kv`` and the session's counters.
    """
    started = time.perf_counter()
    with open_artifact(path) as loaded:
        opened, artifact = time.perf_counter(), video_artifact(loaded)
        manifest = artifact.manifest
        stream, passes = (
            manifest.workload.stream,
            manifest.workload.schedule.denoise_passes + manifest.has_context,
        )
        fill = -(-stream.cache_frames // stream.chunk_frames)
        with artifact.open_together() as session:
            inputs = artifact.golden_inputs(0, None)
            session.run_chunk(inputs).to_host()
            first = time.perf_counter()
            for _ in range(fill + 1):
                session.run_chunk(inputs).to_host()
            times = []
            for _ in range(chunks):
                begin = time.perf_counter()
                session.run_chunk(inputs).to_host()
                times.append(time.perf_counter() - begin)
            counters = asdict(session.stats)
    median = statistics.median(times)
    video_s = stream.chunk_frames * stream.video_frames_per_latent / stream.fps
    return {
        "artifact": manifest.name,
        "digest": artifact.digest,
        "open_s": opened - started,
        "first_chunk_s": first - opened,
        "chunk_median_s": median,
        "chunk_p90_s": percentile(times, 0.90),
        "chunk_p99_s": percentile(times, 0.99),
        "chunks_per_s": 1 / median,
        "step_median_s": median / passes,
        "real_time_factor": video_s / median,
        "kv": asdict(manifest.workload.kv),
        "counters": counters,
    }


def percentile(values: list[float], share: float) -> float:
    """Return the value at index ``int(share * n)`` of the n values in ascending order; if there is no value at this
    index, the largest value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
