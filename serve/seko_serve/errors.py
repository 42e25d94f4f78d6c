"""Errors that a client sees. Each error has a code, an HTTP status, a close code of the socket, and a flag that says
whether to try again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from seko_runtime.arguments import nearest

MAX_NAME_LETTERS = 64  # of a client's word in a message


@dataclass(frozen=True)
class Kind:
    """A kind of error that a client sees: one line of the table of errors.

    Parameters
    ----------
    code : str
        The code by which programs recognise the error.
    status : int
        HTTP status of an answer with this error.
    close : int
        Close code of a socket that this error ends.
    retryable : bool
        Whether the refused request may succeed if the client repeats it later.
    meaning : str
        One sentence for the documentation that says what the error means.
    """

    code: str
    status: int
    close: int
    retryable: bool
    meaning: str


POLICY, LATER, RESTART, BROKEN = 1008, 1013, 1012, 1011  # close codes of RFC 6455 and its registry

_KINDS = (
    Kind("bad_request", 400, POLICY, False, "A field is missing, of another type, or out of range."),
    Kind("unauthorized", 401, POLICY, False, "The API key, ticket or resume token is missing or wrong."),
    Kind(
        "forbidden",
        403,
        POLICY,
        False,
        "The page's origin, the header Host or the API key does not allow the request.",
    ),
    Kind("not_found", 404, POLICY, False, "There is no such session, video or model."),
    Kind("not_allowed", 405, POLICY, False, "The path exists, but not with this HTTP method."),
    Kind("timeout", 408, POLICY, True, "The request took too long to arrive."),
    Kind(
        "conflict",
        409,
        POLICY,
        False,
        "The state of the session or video does not allow the request; with retry_after it soon will.",
    ),
    Kind("too_large", 413, POLICY, False, "A message, text, picture or sound is larger than the limit."),
    Kind(
        "unsupported",
        415,
        POLICY,
        False,
        "The artifact does not take this input, or client and server share no codec.",
    ),
    Kind(
        "too_many_requests",
        429,
        POLICY,
        True,
        "More controls, sessions or sockets per second than the limit allows.",
    ),
    Kind(
        "internal",
        500,
        BROKEN,
        True,
        "The server failed; the server's log has an entry with the error's number.",
    ),
    Kind(
        "not_installed",
        501,
        BROKEN,
        False,
        "The server lacks a library that the request needs; the message says what its operator must install.",
    ),
    Kind(
        "exhausted",
        503,
        LATER,
        True,
        "The server's machine lacks memory, space or another resource for the request; the server's log says which.",
    ),
    Kind(
        "full",
        503,
        LATER,
        True,
        "No row of the pool is free, or a further session would make other sessions late; see retry_after.",
    ),
    Kind(
        "stopping",
        503,
        RESTART,
        True,
        "The server is shutting down; resume at the same address after a moment.",
    ),
    Kind(
        "lost", 410, POLICY, False, "The session's lease has ended, and no snapshot of the session is left."
    ),
)
KINDS = {kind.code: kind for kind in _KINDS}


def table() -> str:
    """Return the table of errors in Markdown, as docs/clients.md has it."""
    lines = ["| code | HTTP | close | try again | meaning |", "|---|---|---|---|---|"]
    for kind in _KINDS:
        again = "yes" if kind.retryable else "no"
        lines.append(f"| `{kind.code}` | {kind.status} | {kind.close} | {again} | {kind.meaning} |")
    return "\n".join(lines) + "\n"


class ServeError(Exception):
    """An error that is sent to a client.

    Parameters
    ----------
    code : str
        Code of the error, one of `KINDS`.
    message : str
        A sentence that names the found and the expected value. The sentence has no path, no key, no token and no text
        of a user, except for the name of an unknown field.
    retry_after : float, optional
        Seconds after which the client may repeat the request; also makes an error retryable whose kind is not.
    facts : dict, optional
        Further fields of the JSON object of the error, such as the request's place in the queue.
    field : str, optional
        Name of the request's field that is wrong.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retry_after: float | None = None,
        facts: dict[str, object] | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = KINDS[code]
        self.message = _encodable(message)
        self.retry_after = retry_after
        self.facts = dict(facts or {})
        self.field = None if field is None else _encodable(field)

    @property
    def retryable(self) -> bool:
        """Whether the refused request may succeed later: always for some kinds of errors, and for one of another kind
        if it says when to repeat the request."""
        return self.kind.retryable or self.retry_after is not None

    def answer(self) -> dict[str, object]:
        """Return the body of an HTTP answer with the error, which also has what clients of OpenAI's API read:
        ``type``, and ``param``, the field that is wrong."""
        kind = "invalid_request_error" if self.kind.status < 500 else "server_error"
        return {"error": {**self.body(), "type": kind, "param": self.field}}

    def body(self) -> dict[str, object]:
        """Return the error as a JSON object, as sockets and events send it."""
        table: dict[str, object] = {
            "code": self.kind.code,
            "message": self.message,
            "retryable": self.retryable,
            **self.facts,
        }
        if self.retry_after is not None:
            table["retry_after"] = round(self.retry_after, 3)
        return table

    @classmethod
    def of_body(cls, table: Mapping[str, Any]) -> ServeError:
        """Return the error that a JSON object of `body` describes; an unknown code, from a newer server, becomes
        ``internal``."""
        known = ("type", "param", "code", "message", "retryable", "retry_after")
        return cls(
            table["code"] if table["code"] in KINDS else "internal",
            str(table["message"]),
            retry_after=table.get("retry_after"),
            facts={name: value for name, value in table.items() if name not in known},
        )

    @classmethod
    def of_answer(cls, status: int, content: bytes, address: str = "") -> ServeError:
        """Return the error in an HTTP answer. If the answer was sent by a proxy or by another server, so that the
        answer has no error of this server, return the error ``internal``; with ``address`` an `UnreachableError`.

        Parameters
        ----------
        status : int
            HTTP status of the answer.
        content : bytes
            The answer's body.
        address : str
            The address that was asked, if the client is to know it.
        """
        try:
            return cls.of_body(json.loads(content)["error"])
        except (ValueError, KeyError, TypeError):  # such as a proxy's page
            reason = f"a proxy or another server answered {status}"
            return UnreachableError(address, reason) if address else cls("internal", reason)


@contextmanager
def of_field(name: str) -> Iterator[None]:
    """Name the request's field in a ServeError of the block that names none."""
    try:
        yield
    except ServeError as error:
        error.field = error.field or name
        raise


def _encodable(text: str) -> str:
    """Return a text with halves of surrogate pairs, which JSON may hold and no answer can, written as in Python."""
    return text.encode(errors="backslashreplace").decode()


class UnreachableError(ServeError):
    """No server of Seko answers a client, at an address that the message names. The error may be tried again.

    Parameters
    ----------
    address : str
        The address that the client asked.
    reason : str
        What happened there, as a sentence that begins with a small letter.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            "internal",
            f"no server of Seko answers at {address}: {reason}; check the address, and whether the server runs",
        )
        self.address = address


def check_fields(given: Iterable[object], known: Iterable[str], where: str = "the request") -> None:
    """Raise a ServeError if a client's JSON object has a field that is not among the known ones; its message names the
    field, and the known field that is most like it."""
    names = sorted(known)
    for name in given:
        if name not in names:
            shown, takes = str(name)[:MAX_NAME_LETTERS], ", ".join(names) or "none"
            raise ServeError(
                "bad_request",
                f"{where} has the unknown field {shown!r}{nearest(shown, names)}; it takes {takes}",
                field=shown,
            )
