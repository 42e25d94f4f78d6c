"""Check of origins: a browser says which page opens a socket, and pages of other sites are refused. The browser's rules
for other sites (CORS) do not cover sockets."""

from __future__ import annotations

from urllib.parse import urlsplit

from seko_serve.errors import ServeError

OWN_PORTS = {"http": ":80", "https": ":443"}


def browsers_form(origin: str) -> str:
    """Return an origin as browsers write it: in small letters, and without the port that is its scheme's own."""
    origin = origin.lower()
    return origin.removesuffix(OWN_PORTS.get(urlsplit(origin).scheme, ""))


def check_origin(origin: str | None, host: str | None, allowed: frozenset[str]) -> None:
    """Raise a ServeError if a page of another site opens the socket.

    Parameters
    ----------
    origin : str or None
        The request's header ``Origin``; programs other than browsers send none.
    host : str or None
        The request's header ``Host``.
    allowed : frozenset of str
        Further allowed origins, in `browsers_form`, such as ``https://example.org``; ``*`` allows all.
    """
    if origin is None or "*" in allowed or origin in allowed:
        return
    try:
        parts = urlsplit(origin)
        same = parts.scheme in ("http", "https") and bool(host) and parts.netloc == host
    except ValueError:
        same = False
    if not same:
        raise ServeError("forbidden", "the page's origin is not this server's; add it to --allowed-origins")
