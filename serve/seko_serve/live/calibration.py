"""Measurement of how long a pool's calls take, before the first session begins; admission uses the times."""

from __future__ import annotations

import logging
from typing import Any

from seko_runtime.errors import SekoRuntimeError
from seko_serve.live.workload import ServedPool, live_workload

LONGEST_S = 30.0  # a device that is slower is measured further by its first sessions
TENANT = "calibration"
_LOG = logging.getLogger("seko_serve")


def calibrate(pool: ServedPool) -> None:
    """Run the pool's calls until the times of all buckets (numbers of rows) were measured; see `LiveWorkload.measure`.
    The times are in the pool's `call_times`.

    Inputs that a viewer would send are zeros and silence during this measurement. If the artifact refuses them, no call
    is measured.
    """
    sessions: list[Any] = []
    try:
        live_workload(pool.manifest).measure(pool, sessions)
    except SekoRuntimeError as error:
        _LOG.warning("calls are not measured before the first session: %s", type(error).__name__)
    finally:
        for session in sessions:
            session.close()
