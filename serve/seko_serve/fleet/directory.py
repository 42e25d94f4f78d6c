"""The directory of a fleet: an entry for each box, and for each session a lease of the box that runs it.

A box is one server process with one artifact. Boxes renew their entries and leases every `BEAT_S` seconds; an entry
or lease that was not renewed for `LEASE_S` seconds expires.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

BEAT_S = 2.0
LEASE_S = 6.0
KEEP_S = 3600.0  # for which a session without a lease is remembered
SHELF_S = 30 * 86400.0  # for which a shelf is kept of which nobody takes or puts anything


@dataclass(frozen=True)
class BoxFacts:
    """A box's entry in the directory.

    Parameters
    ----------
    name : str
        Name of the box's process, made of the machine's name, the process id and a random part.
    url : str
        Address for the sockets of clients, such as ``ws://10.0.0.7:41000``.
    inside : str
        Address for the gateways, such as ``http://10.0.0.7:41000``.
    group : str
        Name of the boxes of the same artifact and settings.
    model, digest : str
        The artifact's name and SHA-256.
    capacity, free, waiting, sessions : int
        Number of rows of the box's pool; number of further sessions that the box would admit by measured call times;
        number of requests in the box's queue; number of sessions that are open, or are being opened.
    accepts : bool
        Whether the box accepts new sessions; False while the box ends, or if the box is to end after its last session.
    application : str
        Name of the box's application in Ray; empty outside Ray.
    kind : str
        The artifact's workload, such as ``video``.
    """

    name: str
    url: str
    inside: str
    group: str
    model: str
    digest: str
    capacity: int
    free: int
    waiting: int
    sessions: int
    accepts: bool
    application: str = ""
    kind: str = "video"

    @property
    def web(self) -> str:
        """Address for the HTTP requests of clients, such as ``http://10.0.0.7:41000``."""
        return f"http{self.url.removeprefix('ws')}"


@dataclass(frozen=True)
class Place:
    """The directory's stored facts about a session, which are kept also while no box has the session's lease.

    Parameters
    ----------
    session, tenant : str
        The session's id, and its owner's name.
    model, digest : str
        Name and SHA-256 of the artifact that the session needs.
    """

    session: str
    tenant: str
    model: str
    digest: str


@dataclass(frozen=True)
class Lease:
    """The lease of a session.

    Parameters
    ----------
    box : str
        Name of the box that has the session.
    fence : int
        Number of the lease. Numbers rise with each lease, unless the directory has lost its content.
    """

    box: str
    fence: int


class DirectoryError(Exception):
    """Error: the fleet's directory does not answer."""


class RefusalError(DirectoryError):
    """The error of a directory that refuses a connection, for example because the password is wrong or the database
    does not exist.

    Parameters
    ----------
    reason : str
        What the directory says.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"the directory refuses: {reason}")
        self.reason = reason


class HeldError(Exception):
    """Error: another box has the session's lease."""


class TooManyError(Exception):
    """Error: the tenant already has the largest number of sessions that it may have."""


class Directory(Protocol):
    """The interface of a directory. Every method raises a DirectoryError if the directory does not answer."""

    async def announce(self, box: BoxFacts) -> None:
        """Write a box's entry, which expires after `LEASE_S` seconds."""

    async def withdraw(self, box: str) -> None:
        """Remove a box's entry."""

    async def boxes(self) -> list[BoxFacts]:
        """Return the entries of all boxes, in the order of their names."""

    async def claim(self, place: Place, box: str, most: int) -> Lease:
        """Take a session's lease for `LEASE_S` seconds.

        Parameters
        ----------
        place : Place
            The session, which the directory stores for `KEEP_S` seconds.
        box : str
            Name of the box that takes the lease.
        most : int
            Largest number of sessions with a lease that the tenant may have; 0: any number.

        Raises
        ------
        HeldError
            If a box has a lease of the session.
        TooManyError
            If the tenant has ``most`` sessions.
        """

    async def renew(self, leases: Mapping[Place, Lease]) -> dict[str, Lease | None]:
        """Prolong leases by `LEASE_S` seconds, and return the lease that each session has now, by the session's id.

        If the returned lease of a session differs from the session's lease in ``leases``, another box has taken the
        session meanwhile. None means that the lease has expired.
        """

    async def release(self, session: str, tenant: str, lease: Lease) -> None:
        """End a session's lease, if ``lease`` is still the session's lease."""

    async def find(self, session: str) -> tuple[Place | None, Lease | None]:
        """Return a session's stored facts and its lease; each of the two is None if it is missing."""

    async def note(self, video: str, box: str) -> None:
        """Remember for two hours which box makes a video."""

    async def noted(self, video: str) -> str | None:
        """Return the box that makes a video."""

    async def keep(self, shelf: str, name: str, label: str, content: str, most: int) -> None:
        """Keep a thing on a shelf for `SHELF_S` seconds, in place of another one of its name; TooManyError if ``most``
        others are there."""

    async def labels(self, shelf: str) -> dict[str, str]:
        """Return the labels of a shelf's things, by name."""

    async def kept(self, shelf: str, name: str) -> str | None:
        """Return the content of a thing, and keep its shelf for `SHELF_S` seconds more."""

    async def remove(self, shelf: str, name: str) -> None:
        """Remove a thing from a shelf, if it is there."""

    async def close(self) -> None:
        """Close the connection to the directory."""


NOTE_S = 7200.0


class MemoryDirectory:
    """A directory in the memory of one process; see `Directory`.

    Parameters
    ----------
    clock : callable
        Function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._boxes: dict[str, tuple[BoxFacts, float]] = {}  # with the time at which the row ends
        self._leases: dict[str, tuple[Lease, str, float]] = {}  # with the tenant
        self._places: dict[str, tuple[Place, float]] = {}
        self._notes: dict[str, tuple[str, float]] = {}
        self._shelves: dict[str, tuple[dict[str, tuple[str, str]], float]] = {}  # labels and contents
        self._fence = 0

    async def announce(self, box: BoxFacts) -> None:
        """Renew a box's entry."""
        self._boxes[box.name] = box, self._clock() + LEASE_S

    async def withdraw(self, box: str) -> None:
        """Remove a box's entry."""
        self._boxes.pop(box, None)

    async def boxes(self) -> list[BoxFacts]:
        """Return the entries of all boxes."""
        self._expire()
        return [self._boxes[name][0] for name in sorted(self._boxes)]

    async def claim(self, place: Place, box: str, most: int) -> Lease:
        """Take a session's lease."""
        self._expire()
        if place.session in self._leases:
            raise HeldError
        if most and sum(tenant == place.tenant for _, tenant, _ in self._leases.values()) >= most:
            raise TooManyError
        self._fence += 1
        lease = Lease(box, self._fence)
        self._hold(place, lease)
        return lease

    async def renew(self, leases: Mapping[Place, Lease]) -> dict[str, Lease | None]:
        """Renew leases."""
        self._expire()
        current: dict[str, Lease | None] = {}
        for place, lease in leases.items():
            entry = self._leases.get(place.session)
            current[place.session] = None if entry is None else entry[0]
            if current[place.session] == lease:
                self._hold(place, lease)
        return current

    async def release(self, session: str, tenant: str, lease: Lease) -> None:
        """End a session's lease."""
        del tenant
        entry = self._leases.get(session)
        if entry is not None and entry[0] == lease:
            del self._leases[session]

    async def find(self, session: str) -> tuple[Place | None, Lease | None]:
        """Return a session's stored facts and its lease."""
        self._expire()
        place, lease = self._places.get(session), self._leases.get(session)
        return None if place is None else place[0], None if lease is None else lease[0]

    async def note(self, video: str, box: str) -> None:
        """Record which box makes a video."""
        self._notes[video] = box, self._clock() + NOTE_S

    async def noted(self, video: str) -> str | None:
        """Return the box that makes a video."""
        self._expire()
        note = self._notes.get(video)
        return None if note is None else note[0]

    async def keep(self, shelf: str, name: str, label: str, content: str, most: int) -> None:
        """Keep a thing on a shelf."""
        things = self._shelf(shelf)
        if name not in things and len(things) >= most:
            raise TooManyError
        self._shelves[shelf] = {**things, name: (label, content)}, self._clock() + SHELF_S

    async def labels(self, shelf: str) -> dict[str, str]:
        """Return the labels of a shelf's things."""
        return {name: label for name, (label, _) in self._shelf(shelf).items()}

    async def kept(self, shelf: str, name: str) -> str | None:
        """Return the content of a thing."""
        things = self._shelf(shelf)
        if name not in things:
            return None
        self._shelves[shelf] = things, self._clock() + SHELF_S
        return things[name][1]

    async def remove(self, shelf: str, name: str) -> None:
        """Remove a thing from a shelf."""
        self._shelf(shelf).pop(name, None)

    async def close(self) -> None:
        """Do nothing."""

    def _hold(self, place: Place, lease: Lease) -> None:
        now = self._clock()
        self._leases[place.session] = lease, place.tenant, now + LEASE_S
        self._places[place.session] = place, now + KEEP_S

    def _shelf(self, shelf: str) -> dict[str, tuple[str, str]]:
        self._expire()
        return self._shelves.get(shelf, ({}, 0.0))[0]

    def _expire(self) -> None:
        now = self._clock()
        for table in (self._boxes, self._leases, self._places, self._notes, self._shelves):
            rows: dict[str, tuple[object, ...]] = table  # type: ignore[assignment]
            for name in [name for name, row in rows.items() if row[-1] <= now]:  # type: ignore[operator]
                del rows[name]
