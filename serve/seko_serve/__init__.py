"""Server of Seko artifacts: live sessions over HTTP and WebSocket, and a web page that shows them."""

from __future__ import annotations

from seko_runtime import __version__

__all__ = ["__version__"]
