"""The settings of a simulation: its boxes, viewers and failures."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

LENGTHS = ("exponential", "fixed")
LEAST_FAILURE_H = (
    0.001  # 3.6 s, in which no process starts: more failures would only take the simulation's time
)


def _setting(default: Any, meaning: str, least: float | None = 0) -> Any:
    """Return a field of `Scenario`, which is also an option of the command line; None: it has no least value."""
    return field(default=default, metadata={"meaning": meaning, "least": least})


@dataclass(frozen=True)
class Scenario:
    """A fleet and its viewers.

    Viewers arrive as a Poisson process. A lost machine takes all its boxes with it and answers nothing from then on; a
    box that is added for the load is the only one of its machine.

    Raises
    ------
    ValueError
        If a field is out of range; the message names the option.
    """

    boxes: int = _setting(3, "boxes, each one GPU; with --max-boxes the smallest number", 1)
    max_boxes: int = _setting(0, "the largest number of boxes, if it changes with the load; 0: it does not")
    shrink_after_s: float = _setting(300.0, "seconds with a box too many before one ends")
    sessions: int = _setting(1000, "viewers that arrive", 1)
    arrivals: float = _setting(1.0, "viewers a second, at random; 0: all at once")
    seconds: float = _setting(60.0, "of video that a viewer watches, as a mean", 1e-3)
    lengths: str = _setting("exponential", "whether these seconds are random", None)
    buffer: int = _setting(1, "chunks collected before playing, 1 to 8", 1)
    wait_s: float = _setting(0.0, "seconds for which a viewer waits in the queue; 0: it leaves")
    queue: int = _setting(16, "requests that may wait at a box")
    snapshot_every: int = _setting(8, "chunks from a snapshot of a session to the next; 0: none")
    gateways: int = _setting(1, "gateways", 1)
    box_failure_h: float = _setting(
        0.0, "mean hours until a box's process is killed, 0.001 or more; 0: never"
    )
    machine_failure_h: float = _setting(0.0, "mean hours until a machine is lost, 0.001 or more; 0: never")
    boxes_per_machine: int = _setting(8, "boxes that a machine takes with it", 1)
    drain_at_s: float = _setting(0.0, "second from which boxes are replaced, one after another")
    drained: int = _setting(0, "boxes that are replaced")
    warm_up_s: float = _setting(0.0, "seconds that figures leave out")
    seed: int = _setting(0, "of all random numbers", None)

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, least = getattr(self, entry.name), entry.metadata["least"]
            if least is not None and not least <= value < 1e9:
                raise ValueError(
                    f"{option(entry.name)} is {value}, expected {least} or more, and less than 1e9"
                )
        for name in ("box_failure_h", "machine_failure_h"):
            if 0 < getattr(self, name) < LEAST_FAILURE_H:
                raise ValueError(
                    f"{option(name)} is {getattr(self, name):g}, expected {LEAST_FAILURE_H:g} hours "
                    f"({3600 * LEAST_FAILURE_H:g} s) or more, or 0 for never"
                )
        if self.buffer > 8:
            raise ValueError(f"{option('buffer')} is {self.buffer}, expected 1 to 8")
        if self.drained > self.boxes:
            raise ValueError(f"{option('drained')} is {self.drained}, and there are {self.boxes} boxes")
        if self.max_boxes and self.max_boxes < self.boxes:
            raise ValueError(
                f"{option('max_boxes')} is {self.max_boxes}, expected {self.boxes} or more, or 0"
            )
        if self.max_boxes and self.drained:
            raise ValueError(f"{option('drained')} needs a number of boxes that does not change")
        if self.lengths not in LENGTHS:
            raise ValueError(f"{option('lengths')} is {self.lengths}, expected {' or '.join(LENGTHS)}")


def option(name: str) -> str:
    """Return the option of the command line for a field of `Scenario`."""
    return "--" + name.removesuffix("_s").removesuffix("_h").replace("_", "-")
