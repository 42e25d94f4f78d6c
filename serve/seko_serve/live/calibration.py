"""Measurement of how long a pool's calls take, before the first session begins; admission uses the times."""

from __future__ import annotations

import logging
import time

from seko_runtime import Pool
from seko_runtime.errors import SekoRuntimeError
from seko_serve.live.content import Opening
from seko_serve.live.device import ServedPool
from seko_serve.live.video import VideoContent, opening_picture

LONGEST_S = 30.0  # a device that is slower is measured further by its first sessions
_LOG = logging.getLogger("seko_serve")


def calibrate(pool: ServedPool) -> None:
    """Run the pool's calls until all buckets (numbers of rows) and full caches were measured; the results are in the
    pool's `call_times`.

    Inputs that a viewer would send are zeros and silence during this measurement. If the artifact refuses these inputs,
    no call is measured.
    """
    if not isinstance(pool, Pool):  # speech: its first sessions measure it
        return
    manifest = pool.manifest
    stream, buckets = (
        manifest.workload.stream,
        (pool.capacity,) if manifest.pool is None else manifest.pool.buckets,
    )
    opening = Opening(
        None if manifest.workload.text is None else "", 0, float(stream.fps), image=opening_picture(manifest)
    )
    rows = min(buckets[-1], pool.capacity)
    contents = [VideoContent(manifest, opening) for _ in range(rows)]
    sessions, began = [], time.monotonic()
    try:
        for number, content in enumerate(contents):
            sessions.append(content.open(pool, f"calibration-{number}", "calibration"))
        filling = -(-stream.cache_frames // stream.chunk_frames)
        for count in [*[rows] * (filling + 1), *reversed([bucket for bucket in buckets if bucket < rows])]:
            if time.monotonic() - began > LONGEST_S:
                break
            for content, session in zip(contents[:count], sessions[:count], strict=True):
                content.ask(session, 0.0)
            for session, chunk in pool.serve_next(in_one=True):
                contents[sessions.index(session)].made(chunk)
    except SekoRuntimeError as error:
        _LOG.warning("calls are not measured before the first session: %s", type(error).__name__)
    finally:
        for session in sessions:
            session.close()
