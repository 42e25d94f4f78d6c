"""The boxes of a fleet as a gateway asks them: which there are, which take a request, and what they answer."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager, suppress

from seko_serve.errors import ServeError
from seko_serve.fleet.boxes import Answer, Boxes, BoxGoneError, BoxSilentError
from seko_serve.fleet.choice import TRIED, KnownBoxes, in_order
from seko_serve.fleet.directory import LEASE_S, BoxFacts, Directory, DirectoryError

AGAIN_S = 1.0  # after which a client asks again
REFUSALS = ("full", "stopping")  # after which another box is asked


class AskedBoxes:
    """The boxes of a fleet; use it on one event loop.

    Parameters
    ----------
    open_directory : callable
        Function that returns the directory.
    authorities : ssl.SSLContext
        Context with which the certificates of boxes with TLS are checked.
    retired : collection of str
        Groups of boxes that take no new sessions.

    Attributes
    ----------
    directory : Directory
        The fleet's directory, from `opened` on.
    retired : collection of str
        As given.
    dice : random.Random
        Draws the order of boxes with free rows.
    """

    directory: Directory
    _connections: Boxes

    def __init__(
        self,
        open_directory: Callable[[], Directory],
        authorities: ssl.SSLContext,
        retired: Collection[str] = (),
    ) -> None:
        self._open_directory, self._authorities = open_directory, authorities
        self.retired, self.dice = retired, random.Random()
        self._rows, self._reading = KnownBoxes(), asyncio.Lock()
        self._failed_at, self._failure = float("-inf"), ""  # of the last read that failed
        self._silent_at = float("-inf")  # when the directory last failed, also in another call

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the directory and the connections; close them at the end."""
        self.directory, self._connections = self._open_directory(), Boxes(self._authorities)
        try:
            yield
        finally:
            await self._connections.close()
            with suppress(DirectoryError):
                await self.directory.close()

    async def ask(
        self, box: BoxFacts, method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> Answer:
        """Ask one box, as `Boxes.ask` does."""
        return await self._connections.ask(box, method, path, headers, body)

    async def known(self, *, fresh: bool = False) -> list[BoxFacts]:
        """Return the entries of all boxes, which are at most `FRESH_S` seconds old. Those who wait while the directory
        does not answer get its error together: one after another they would wait without end."""
        asked = time.monotonic()
        async with self._reading:
            if self._failed_at > asked:
                raise DirectoryError(self._failure)
            if fresh or self._rows.stale(time.monotonic()):
                try:
                    rows = await self.directory.boxes()
                except DirectoryError as error:
                    self._failed_at, self._failure = time.monotonic(), str(error)
                    self.failed()
                    raise
                self._rows.update(rows, time.monotonic())
            return self._rows.rows

    @property
    def settling(self) -> bool:
        """Whether the directory failed a moment ago: entries of boxes have expired in it meanwhile, and a box that is
        missing may only not have written its entry again yet."""
        return time.monotonic() - self._silent_at < LEASE_S

    def missing(self, what: str, message: str) -> ServeError:
        """Return the error for something that no box has: `not_found` with a message, or `full` while the directory is
        `settling`."""
        if self.settling:
            return ServeError("full", f"a box that may have {what} is not known yet", retry_after=AGAIN_S)
        return ServeError("not_found", message)

    def failed(self) -> None:
        """Record that a call of the directory failed."""
        self._silent_at = time.monotonic()

    def promised(self) -> dict[str, int]:
        """Return for each box the number of sessions that were sent to it and that its entry does not count yet."""
        return self._rows.promised(time.monotonic())

    async def taking(
        self, *, model: str | None = None, kind: str | None = None, fresh: bool = False
    ) -> list[BoxFacts]:
        """Return the boxes that accept new sessions, of a model or a kind of output if one is given; the emptiest
        first."""
        known = await self.known(fresh=fresh)
        return in_order(known, self.promised(), model=model, kind=kind, retired=self.retired)

    async def with_model(self, model: object, kind: str | None = None) -> list[BoxFacts]:
        """Return the boxes for a new session or video of a model, the best first.

        Raises
        ------
        ServeError
            If no box has the model or the requested kind of output, or if several models would fit and none is named.
            The error of a model whose boxes have just failed is `full`.
        """
        known = await self.known()
        lost = [box for box in self._rows.lost(time.monotonic()) if box.group not in self.retired]
        if known and model is not None and all(box.model != model for box in known):
            if any(box.model == model for box in lost):
                raise ServeError("full", "the boxes of this model do not answer", retry_after=AGAIN_S)
            raise ServeError("not_found", "no box has this model")
        name = None if model is None else str(model)
        boxes = in_order(known, self.promised(), model=name, kind=kind, retired=self.retired, dice=self.dice)
        if kind is not None and not boxes and any(box.kind != kind for box in known):
            raise ServeError("unsupported", f"no artifact of this fleet makes {kind}")
        models = sorted({box.model for box in (*boxes, *lost) if kind in (None, box.kind)})
        if name is None and len(models) > 1:
            raise ServeError("bad_request", f"model is missing, expected one of {', '.join(models)}")
        return boxes

    def sent(self, box: BoxFacts) -> None:
        """Record that a session was sent to a box."""
        self._rows.sent(box.name, time.monotonic())

    async def named(self, name: str) -> BoxFacts | None:
        """Return the box of a name; None if there is none."""
        return named(await self.known(), name)

    async def first(
        self,
        boxes: list[BoxFacts],
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        more_s: float = 0.0,
    ) -> tuple[BoxFacts, Answer]:
        """Ask a few boxes one after another; return the first answer that is not a refusal by a full or stopping box.
        If all refuse, return the first refusal; if none answers, raise a ServeError. For ``more_s`` see `Boxes.ask`.
        """
        refused: tuple[BoxFacts, Answer] | None = None
        for box in boxes[:TRIED]:
            try:
                answer = await self._connections.ask(box, method, path, headers, body, more_s=more_s)
            except BoxGoneError:
                await self.directory.withdraw(box.name)
                self._rows.remove(box.name)
                continue
            except BoxSilentError:
                continue
            if answer.code not in REFUSALS:
                return box, answer
            refused = refused or (box, answer)
            if answer.table["error"].get("queue_token"):  # it waits there
                break
        if refused is None:
            raise ServeError("full", "no box answers", retry_after=AGAIN_S)
        return refused

    async def all(
        self, boxes: Iterable[BoxFacts], path: str, headers: dict[str, str]
    ) -> list[tuple[BoxFacts, Answer]]:
        """Return the answers of all boxes that answer."""

        async def ask(box: BoxFacts) -> tuple[BoxFacts, Answer] | None:
            try:
                return box, await self._connections.ask(box, "GET", path, headers)
            except (BoxGoneError, BoxSilentError):
                return None

        answers = await asyncio.gather(*map(ask, boxes))
        return [answer for answer in answers if answer is not None]


def named(boxes: Iterable[BoxFacts], name: str) -> BoxFacts | None:
    """Return the box of a name among these; None if it is not there."""
    return next((box for box in boxes if box.name == name), None)


def by_artifact(boxes: Iterable[BoxFacts]) -> dict[str, list[BoxFacts]]:
    """Return the boxes of each artifact, by its digest, in the order in which they are given."""
    groups: dict[str, list[BoxFacts]] = {}
    for box in boxes:
        groups.setdefault(box.digest, []).append(box)
    return groups
