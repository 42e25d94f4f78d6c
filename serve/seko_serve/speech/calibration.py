"""The calls of a speech artifact that are measured before the first session."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator

import numpy as np

from seko_runtime.errors import SekoRuntimeError
from seko_runtime.speech.pool import SpeechPool
from seko_runtime.speech.session import SpeechSession
from seko_serve.live.calibration import LONGEST_S, TENANT

TEXT = "hallo"
_LOG = logging.getLogger("seko_serve")


def measure(pool: SpeechPool, sessions: list[SpeechSession]) -> None:
    """Measure the calls that make patches while a short text is spoken; see `LiveWorkload.measure`."""
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


def one_part_of_a_voice(pool: SpeechPool) -> Generator[None, None, None]:
    """Encode a voice of one part, so that `Device.in_parts` knows how long a part takes."""
    silence = np.zeros(pool.manifest.workload.voice.samples, np.float32)
    try:
        yield from pool.encode_voice_in_parts(silence)
    except SekoRuntimeError as error:
        _LOG.warning("the encoder of voices is not measured before the first voice: %s", type(error).__name__)
