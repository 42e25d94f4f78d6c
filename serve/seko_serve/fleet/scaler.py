"""The scaler, which starts boxes of a model when the load needs more boxes, and ends surplus boxes that have no
session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from seko_serve.fleet.directory import BoxFacts
from seko_serve.fleet.scaling import Bounds, Scaling


class ScaledBoxes(Protocol):
    """The interface by which the scaler starts boxes of a model, makes boxes refuse new sessions, and ends boxes."""

    async def all(self) -> dict[str, bool]:
        """Return for each box, by name, whether it has started."""

    async def start(self) -> None:
        """Start a box, without waiting for it."""

    async def admit(self, box: str, takes: bool) -> int | None:
        """Make a box accept or refuse new sessions; return the number of the box's sessions and videos, or None if the
        box does not answer.
        """

    async def end(self, box: str) -> None:
        """End a box."""


class Scaler:
    """The scaler of one model. To remove a box (one `seko-serve` process), the scaler makes the box refuse new
    sessions, and ends the box once the box has no session or video left.

    Parameters
    ----------
    group : str
        Name of the group of the model's boxes.
    bounds : Bounds
        Bounds of the number of boxes.
    boxes : ScaledBoxes
        The boxes.
    clock : callable
        Function that returns seconds.
    """

    def __init__(self, group: str, bounds: Bounds, boxes: ScaledBoxes, clock: Callable[[], float]) -> None:
        self._group, self._boxes, self._clock = group, boxes, clock
        self._scaling = Scaling(bounds, clock())

    async def step(self, rows: Sequence[BoxFacts]) -> None:
        """Read the entries of all boxes, then start and end boxes as needed; call `step` every few seconds."""
        boxes = await self._boxes.all()
        starting = [name for name, started in boxes.items() if not started]
        own = [row for row in rows if row.group == self._group]
        plan = self._scaling.plan(own, boxes, self._clock(), starting)
        await asyncio.gather(*(self._boxes.admit(box, True) for box in plan.resume))
        await asyncio.gather(*map(self._close, plan.close), *map(self._boxes.end, plan.end))
        for _ in range(plan.start):
            await self._boxes.start()

    async def _close(self, box: str) -> None:
        if await self._boxes.admit(box, False) == 0:
            await self._boxes.end(box)
