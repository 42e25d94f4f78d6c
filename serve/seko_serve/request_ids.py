"""The id of the request that is answered: the trace of W3C's ``traceparent`` header where a request brings one."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

HEADER = "traceparent"
# Whoever traces a request, as a gateway or a proxy does, names it by 32 digits, which say nothing else.
_TRACE = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_CURRENT: ContextVar[str] = ContextVar("request", default="")


def begin(header: str) -> str:
    """Give the running task a request's id and return it: that of the header, or a new one if the header has none."""
    traced = _TRACE.fullmatch(header)
    request = traced[1] if traced else secrets.token_hex(16)
    _CURRENT.set(request)
    return request


def current() -> str:
    """Return the id of the request that the running task answers; empty if it answers none."""
    return _CURRENT.get()


def header() -> str:
    """Return the header by which another server learns the id of the running task's request."""
    return f"00-{current()}-{secrets.token_hex(8)}-00"
