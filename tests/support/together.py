"""Calls in threads of their own, begun at once. No tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of calls, or the first error of one."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait(30)
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(300) for future in [threads.submit(run, call) for call in calls]]
