"""The calls of a video artifact that are measured before the first session."""

from __future__ import annotations

import time

import numpy as np

from seko_runtime import Pool, Session
from seko_serve.live.calibration import LONGEST_S, TENANT
from seko_serve.video.content import VideoContent
from seko_serve.video.opening import blank_opening


def measure(pool: Pool, sessions: list[Session]) -> None:
    """Measure the calls of a video artifact with full caches; see `LiveWorkload.measure`."""
    manifest = pool.manifest
    stream, buckets = (
        manifest.workload.stream,
        (pool.capacity,) if manifest.pool is None else manifest.pool.buckets,
    )
    rows, began = min(buckets[-1], pool.capacity), time.monotonic()
    contents = [VideoContent(manifest, blank_opening(manifest)) for _ in range(rows)]
    for number, content in enumerate(contents):
        sessions.append(content.open(pool, f"{TENANT}-{number}", TENANT))
        for video in sessions[-1].controls.of_kind("video_in"):
            video.take({"frame": np.zeros((stream.height, stream.width, 3), np.uint8)})
    filling = -(-stream.cache_frames // stream.chunk_frames)
    for count in [*[rows] * (filling + 1), *reversed([bucket for bucket in buckets if bucket < rows])]:
        if time.monotonic() - began > LONGEST_S:
            break
        for content, session in zip(contents[:count], sessions[:count], strict=True):
            content.ask(session, 0.0)
        for session, chunk in pool.serve_next(in_one=True):
            contents[sessions.index(session)].accept_chunk(chunk)
