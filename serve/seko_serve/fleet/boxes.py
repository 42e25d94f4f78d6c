"""Requests from a gateway to boxes."""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from seko_serve.fleet.directory import BoxFacts

ANSWER_S = 5.0  # for which an answer's beginning is waited for; opening a session encodes its prompt
VOICE_S = 25.0  # more, for a voice that a box encodes part by part between its sessions' calls
CONNECT_S = 2.0
_LOG = logging.getLogger("seko_serve")


class BoxGoneError(Exception):
    """Error: no process listens at the box's address, because the box's process has ended."""


class BoxSilentError(Exception):
    """Error: the box does not answer in time, or breaks off its answer."""


@dataclass(frozen=True)
class Answer:
    """A box's answer.

    Parameters
    ----------
    status : int
        HTTP status.
    headers : mapping of str to str
        Headers, with names in small letters.
    body : bytes
        The body.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def table(self) -> dict[str, Any]:
        """The JSON object in the body; empty if the body is not a JSON object."""
        try:
            table = json.loads(self.body)
        except ValueError:
            return {}
        return table if isinstance(table, dict) else {}

    @property
    def code(self) -> str:
        """The code of the error in the answer; empty if the answer is no error."""
        error = self.table.get("error") if self.status >= 400 else None
        return str(error.get("code", "")) if isinstance(error, dict) else ""


class Boxes:
    """A gateway's connections to boxes; use it on one event loop.

    Parameters
    ----------
    authorities : ssl.SSLContext
        Context with which the certificates of boxes with TLS are checked.
    """

    def __init__(self, authorities: ssl.SSLContext) -> None:
        import aiohttp

        self._library = aiohttp
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=authorities),
            auto_decompress=False,
        )

    async def ask(
        self,
        box: BoxFacts,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes = b"",
        *,
        more_s: float = 0.0,
    ) -> Answer:
        """Send a request, and return the whole answer, whose beginning is waited for `ANSWER_S` and ``more_s`` seconds.

        Raises
        ------
        BoxGoneError
            If nothing listens at the box's address.
        BoxSilentError
            If the box does not answer.
        """
        library = self._library
        try:
            async with self._client.request(
                method,
                box.inside + path,
                headers=headers,
                data=body or None,
                allow_redirects=False,
                timeout=library.ClientTimeout(sock_connect=CONNECT_S, sock_read=ANSWER_S + more_s),
            ) as answer:
                fields = {name.lower(): value for name, value in answer.headers.items()}
                return Answer(answer.status, fields, await answer.read())
        except library.ClientConnectorCertificateError as error:  # before its base class
            _LOG.error("box %s has no certificate that is trusted: %s", box.name, error.certificate_error)
            raise BoxSilentError(box.name) from None
        except library.ClientConnectorError as error:
            if isinstance(error.os_error, ConnectionRefusedError):
                raise BoxGoneError(box.name) from None
            raise BoxSilentError(box.name) from None
        except (TimeoutError, library.ClientError, OSError):
            raise BoxSilentError(box.name) from None

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()
