"""Server of Seko artifacts: live sessions over HTTP and WebSocket, and a web page that shows them."""

from __future__ import annotations

__version__ = "0.1.0"
