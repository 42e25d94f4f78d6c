"""A test that ends in time or says where it waits. No tests."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


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
