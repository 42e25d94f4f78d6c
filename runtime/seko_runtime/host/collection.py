"""Pause of Python's garbage collector while an artifact is opened, because a full collection of all objects that torch
holds takes 0.1 s."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_inside = 0  # number of contexts that are open, in all threads
_was_enabled = False  # whether the collector ran before the first of them


@contextmanager
def without_collections() -> Iterator[None]:
    """Context manager or decorator in which no garbage is collected. Several threads may be inside at a time. A garbage
    collector that the caller had switched off stays switched off afterwards."""
    global _inside, _was_enabled
    with _lock:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()
