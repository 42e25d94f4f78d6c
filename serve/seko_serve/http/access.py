"""Who a request is from, and how often a caller may open sessions."""

from __future__ import annotations

import time

from starlette.requests import Request

from seko_serve.security.keys import ApiKeys
from seko_serve.security.rates import Rate
from seko_serve.settings import Settings


class Access:
    """API keys and rates of one server.

    Parameters
    ----------
    settings : Settings
        The server's.

    Attributes
    ----------
    controls : Rate
        Controls of one session.
    """

    def __init__(self, settings: Settings) -> None:
        self._keys = ApiKeys(settings.keys)
        self._opens = Rate(1.0, 8.0, "sessions opened", time.monotonic)
        self.controls = Rate(60.0, 120.0, "controls", time.monotonic)

    def tenant(self, request: Request) -> str:
        """Return the tenant of a request; ServeError if there are keys and it has none of them."""
        return self._keys.tenant(request.headers.get("authorization"))

    def opener(self, request: Request) -> str:
        """Return the tenant of a request that takes a row; ServeError also if it opens too many."""
        tenant = self.tenant(request)
        address = request.client.host if request.client else ""
        self._opens.take(f"{tenant} {address}")
        return tenant
