"""Measurement of how long a pool's calls take, before the first session begins; admission uses the times."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from typing import Any

import numpy as np

from seko_runtime import Pool, Session
from seko_runtime.errors import SekoRuntimeError
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.session import SpeechSession
from seko_serve.live.device import ServedPool
from seko_serve.live.video import VideoContent, blank_opening

LONGEST_S = 30.0  # a device that is slower is measured further by its first sessions
TENANT = "calibration"
TEXT = "hallo"
_LOG = logging.getLogger("seko_serve")


def calibrate(pool: ServedPool) -> None:
    """Run the pool's calls until the times of all buckets (numbers of rows) were measured. For a video artifact the
    caches are full during the measurement. The times are in the pool's `call_times`.

    Inputs that a viewer would send are zeros and silence during this measurement, and a speech artifact speaks a short
    text. If the artifact refuses inputs of zeros and silence, no call is measured.
    """
    sessions: list[Any] = []
    try:
        if isinstance(pool, Pool):
            _measure_video(pool, sessions)
        else:
            _measure_speech(pool, sessions)
    except SekoRuntimeError as error:
        _LOG.warning("calls are not measured before the first session: %s", type(error).__name__)
    finally:
        for session in sessions:
            session.close()


def _measure_video(pool: Pool, sessions: list[Session]) -> None:
    """Measure the calls of a video artifact. Sessions that the function opens are appended to ``sessions``."""
    manifest = pool.manifest
    stream, buckets = (
        manifest.workload.stream,
        (pool.capacity,) if manifest.pool is None else manifest.pool.buckets,
    )
    rows, began = min(buckets[-1], pool.capacity), time.monotonic()
    contents = [VideoContent(manifest, blank_opening(manifest)) for _ in range(rows)]
    for number, content in enumerate(contents):
        sessions.append(content.open(pool, f"{TENANT}-{number}", TENANT))
    filling = -(-stream.cache_frames // stream.chunk_frames)
    for count in [*[rows] * (filling + 1), *reversed([bucket for bucket in buckets if bucket < rows])]:
        if time.monotonic() - began > LONGEST_S:
            break
        for content, session in zip(contents[:count], sessions[:count], strict=True):
            content.ask(session, 0.0)
        for session, chunk in pool.serve_next(in_one=True):
            contents[sessions.index(session)].accept_chunk(chunk)


def _measure_speech(pool: SpeechPool, sessions: list[SpeechSession]) -> None:
    """Measure the calls of a speech artifact that make patches; see `_measure_video`."""
    buckets = (pool.capacity,) if pool.manifest.pool is None else pool.manifest.pool.buckets
    began = time.monotonic()
    for number in range(min(buckets[-1], pool.capacity)):
        session = pool.open_session(name=f"{TENANT}-{number}", tenant=TENANT)
        sessions.append(session)
        session.begin(TEXT)
    for session in sessions:
        patch = None
        while patch is None:  # parts of its prompt come first
            if time.monotonic() - began > LONGEST_S:
                return
            session.request_patch(0.0)
            ((_, patch),) = pool.serve_next(among=[session])
    for count in buckets:
        speaking = [session for session in sessions if session.speaks][:count]
        if len(speaking) < count or time.monotonic() - began > LONGEST_S:
            return
        for session in speaking:
            session.request_patch(0.0)
        pool.serve_next(among=speaking, in_one=True)


def one_part_of_a_voice(pool: Any) -> Generator[None, None, None]:
    """Encode a voice of one part, so that `Device.in_parts` knows how long a part takes."""
    silence = np.zeros(pool.manifest.workload.voice.samples, np.float32)
    try:
        yield from pool.encode_voice_in_parts(silence)
    except SekoRuntimeError as error:
        _LOG.warning("the encoder of voices is not measured before the first voice: %s", type(error).__name__)
