"""A test that ends in time or says where it waits. No tests."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")
LIMIT_S = 120.0  # of an async test without the mark limit_s, and of a wait


async def bounded(test: Awaitable[T], limit_s: float) -> T:
    """Await a test; the AssertionError of one that takes longer says which lines it waits at."""
    try:
        async with asyncio.timeout(limit_s):
            return await test
    except TimeoutError as late:
        frames = traceback.extract_tb((late.__cause__ or late).__traceback__)
        lines = " < ".join(
            f"{frame.name}:{frame.lineno}" for frame in reversed(frames) if "tests" in frame.filename
        )
        raise AssertionError(f"not done, waits at {lines}") from late


def until(true: Callable[[], object], lacking: str = "it does not become true") -> None:
    """Wait until something is so; the AssertionError of a wait that takes too long says what is lacking."""
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end, lacking
        time.sleep(0.02)


async def comes(true: Callable[[], object]) -> None:
    """Wait until something is so; the test's own limit ends a wait that takes too long, and says where it was."""
    while not true():
        await asyncio.sleep(0.02)
