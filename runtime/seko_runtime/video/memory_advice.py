"""Advice about build options for a session that needs more memory than the device has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from seko_runtime.errors import DeviceMemoryError


@contextmanager
def memory_advice() -> Iterator[None]:
    """Context or decorator that adds advice to a DeviceMemoryError: which build options need less memory."""
    try:
        yield
    except DeviceMemoryError as error:
        raise DeviceMemoryError(f"{error}, or build with a smaller ring or --kv fp4") from error
