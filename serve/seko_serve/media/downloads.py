"""Pictures that a request names by their web address, from hosts that the operator has named."""

from __future__ import annotations

import time
from collections.abc import Collection
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from seko_serve.errors import ServeError

WAIT_S, WHOLE_S = 5.0, 20.0  # for the next bytes, and for all
PART_BYTES = 1 << 16


class _NoRedirects(HTTPRedirectHandler):
    """Take a redirect for an error: it may lead to a host that nobody has named."""

    def redirect_request(self, *_: Any) -> None:
        """Follow nothing."""


_OPENER = build_opener(_NoRedirects)


def is_address(value: object) -> bool:
    """Return whether a value is a web address."""
    return isinstance(value, str) and value.lower().startswith(("http://", "https://"))


def downloaded(address: str, name: str, hosts: Collection[str], most: int) -> bytes:
    """Return what lies at a web address.

    Parameters
    ----------
    address : str
        The address.
    name : str
        Name of the request's field, for error messages.
    hosts : collection of str
        The hosts from which files are fetched, as in an address: ``example.org`` or ``example.org:8080``.
    most : int
        Largest number of bytes.

    Raises
    ------
    ServeError
        If the host is not among ``hosts``, or nothing of the allowed size comes from there in time.
    """
    try:
        host = urlsplit(address).netloc.lower()
    except ValueError:
        host = ""
    if host not in hosts:
        raise ServeError(
            "unsupported",
            f"{name} is a web address of a host that this server does not ask (--picture-hosts): send the picture as a "
            "file, in base64 or as a data URL",
            field=name,
        )
    content, end = bytearray(), time.monotonic() + WHOLE_S
    try:
        with _OPENER.open(Request(address), timeout=WAIT_S) as answer:
            while part := answer.read1(PART_BYTES):
                content += part
                if len(content) > most:
                    raise ServeError("too_large", f"{name} has more than {most} bytes", field=name)
                if time.monotonic() > end:
                    raise TimeoutError
    except HTTPError as error:
        raise ServeError("bad_request", f"{name}: its host answers {error.code}", field=name) from None
    except (OSError, HTTPException, ValueError):
        raise ServeError("bad_request", f"{name} cannot be had from its host", field=name) from None
    return bytes(content)
