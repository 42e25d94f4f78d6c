"""A call in a thread of its own. No tests."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_new_thread(call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Return what a call returns that is made in a thread of its own.

    Below pytest-xdist a loop of onnxscript took 300 seconds of a processor, and takes 40 in a new thread. The likely
    cause, not proven: CPython 3.11 unmaps and maps a part of the frame stack at each call that crosses the part's end,
    and a new thread's stack begins empty.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call, *arguments, **named).result()
