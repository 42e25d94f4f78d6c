"""A simulated gateway: it chooses a box for each viewer by the rule of the real gateway."""

from __future__ import annotations

import random
from collections.abc import Mapping

from simpy import Environment

from seko_serve.errors import ServeError
from seko_serve.fleet.asked_boxes import AGAIN_S
from seko_serve.fleet.boxes import CONNECT_S
from seko_serve.fleet.choice import TRIED, KnownBoxes, in_order, with_room
from seko_serve.fleet.directory import BoxFacts
from seko_serve.simulation.box import DIGEST, MODEL, Box
from seko_serve.simulation.directory import Rows
from seko_serve.simulation.session import Session, Steps
from seko_serve.simulation.traffic import BOX, GATEWAY, Traffic


class Gateway:
    """A gateway of the simulated fleet.

    Parameters
    ----------
    env : Environment
        The simulation's clock.
    dice : random.Random
        Generator that draws the order in which boxes are asked.
    rows : Rows
        The entries of the simulated directory.
    boxes : mapping of str to Box
        All boxes by name, also those that have ended.
    traffic : Traffic
        Counter of the requests to gateways and boxes.
    """

    def __init__(
        self, env: Environment, dice: random.Random, rows: Rows, boxes: Mapping[str, Box], traffic: Traffic
    ) -> None:
        self._env, self._dice, self._rows, self._boxes, self._traffic = env, dice, rows, boxes, traffic
        self._known = KnownBoxes()

    def open(self, session: Session, token: str | None) -> Steps:
        """Open a session and return its box. With a token, the request waits in the queue of the box ``session.place``.

        Raises
        ------
        ServeError
            If no box takes the session; the error is that of the first box that was asked.
        """
        self._traffic.count(GATEWAY)
        known, promised = self._read(), self._known.promised(self._env.now)
        boxes = in_order(known, promised, model=MODEL, dice=self._dice)
        place = [row for row in boxes if row.name == session.place]
        others = [row for row in boxes if row.name != session.place]
        session.place = ""
        attempts = [(others, token)]
        if place:
            attempts.insert(0, (place, token))
            if not with_room(place, promised):
                attempts.insert(0, (with_room(others, promised), None))
        refused: ServeError | None = None
        for candidates, place_token in attempts:
            for row in candidates[:TRIED]:
                box = self._boxes[row.name]
                if (yield from self._answers(box)):
                    try:
                        if (yield from box.open(session, place_token)):
                            self._known.sent(row.name, self._env.now)
                            return box
                    except ServeError as error:
                        if "place" in error.facts:
                            session.place = row.name
                            raise
                        refused = refused or error
        raise refused or ServeError("full", "no box answers", retry_after=AGAIN_S)

    def find(self, session: Session) -> Steps:
        """Return the box that has a session or may continue it; ServeError if no box answers."""
        self._traffic.count(GATEWAY)
        self._traffic.directory("find")
        known = self._read()
        if session.lease:
            holder = self._boxes[session.lease] if any(row.name == session.lease for row in known) else None
            if holder is not None and (yield from self._answers(holder)):
                return holder
            if holder is not None and holder.silent:
                raise ServeError("full", "the session's box does not answer", retry_after=AGAIN_S)
            self._traffic.directory("release")
            session.lease = ""
        promised = self._known.promised(self._env.now)
        for row in in_order(self._known.rows, promised, digest=DIGEST, dice=self._dice)[:TRIED]:
            if (yield from self._answers(self._boxes[row.name])):
                return self._boxes[row.name]
        raise ServeError("full", "no box has the session's artifact", retry_after=AGAIN_S)

    def _answers(self, box: Box) -> Steps:
        """Return whether a box answers. If nothing listens at its address, its entry in the directory is removed."""
        self._traffic.count(BOX)
        if not box.alive:
            if box.silent:
                yield self._env.timeout(CONNECT_S)
            else:
                self._rows.withdraw(box.name)
                self._known.remove(box.name)
        return box.alive

    def _read(self) -> list[BoxFacts]:
        if self._known.stale(self._env.now):
            self._known.update(self._rows.boxes(), self._env.now)
        return self._known.rows
