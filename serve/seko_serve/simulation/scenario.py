"""The settings of a simulation: its boxes, viewers and failures."""

from __future__ import annotations

from dataclasses import dataclass

LENGTHS = ("exponential", "fixed")
LEAST_FAILURE_H = (
    0.001  # 3.6 s, in which no process starts: more failures would only take the simulation's time
)


@dataclass(frozen=True)
class Scenario:
    """A fleet and its viewers.

    Parameters
    ----------
    boxes : int
        Number of boxes; with ``max_boxes`` the number of boxes at the beginning, which is also the smallest number.
    max_boxes : int
        Largest number of boxes, if the number of boxes changes with the load; 0: the number does not change.
    shrink_after_s : float
        Seconds for which there must have been one box more than needed before a box is ended.
    sessions : int
        Number of viewers that arrive.
    arrivals : float
        Mean number of viewers that arrive in a second, as a Poisson process; 0: all arrive at once.
    seconds : float
        Mean seconds of video that a viewer watches.
    lengths : str
        Distribution of the seconds that viewers watch: ``exponential`` (random) or ``fixed``.
    buffer : int
        Number of chunks that a viewer collects before it plays.
    wait_s : float
        Seconds for which a viewer waits in the queue of a full fleet; 0: the viewer leaves at once.
    queue : int
        Largest number of requests that wait at a box.
    snapshot_every : int
        Number of chunks between two snapshots of a session; 0: no snapshots while the session runs.
    gateways : int
        Number of gateways.
    box_failure_h : float
        Mean hours until a box's process is killed, at least `LEAST_FAILURE_H`; 0: never.
    machine_failure_h : float
        Mean hours until a machine with all its boxes is lost, at least `LEAST_FAILURE_H`; 0: never. A lost
        machine answers nothing from then on.
    boxes_per_machine : int
        Number of boxes of a machine. A box that is added for the load is the only one of its machine.
    drain_at_s : float
        Time in seconds at which boxes begin to be replaced one after another, as after a change of their settings.
    drained : int
        Number of boxes that are replaced.
    warm_up_s : float
        Seconds at the beginning that figures leave out.
    seed : int
        Seed of all random numbers.

    Raises
    ------
    ValueError
        If a field is out of range; the message names the option.
    """

    boxes: int = 3
    max_boxes: int = 0
    shrink_after_s: float = 300.0
    sessions: int = 1000
    arrivals: float = 1.0
    seconds: float = 60.0
    lengths: str = "exponential"
    buffer: int = 1
    wait_s: float = 0.0
    queue: int = 16
    snapshot_every: int = 8
    gateways: int = 1
    box_failure_h: float = 0.0
    machine_failure_h: float = 0.0
    boxes_per_machine: int = 8
    drain_at_s: float = 0.0
    drained: int = 0
    warm_up_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("boxes", 1),
            ("max_boxes", 0),
            ("shrink_after_s", 0),
            ("sessions", 1),
            ("arrivals", 0),
            ("seconds", 1e-3),
            ("buffer", 1),
            ("wait_s", 0),
            ("queue", 0),
            ("snapshot_every", 0),
            ("gateways", 1),
            ("box_failure_h", 0),
            ("machine_failure_h", 0),
            ("boxes_per_machine", 1),
            ("drain_at_s", 0),
            ("drained", 0),
            ("warm_up_s", 0),
        ):
            value = getattr(self, name)
            if not least <= value < 1e9:
                raise ValueError(f"{option(name)} is {value}, expected {least} or more, and less than 1e9")
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


def option(field: str) -> str:
    """Return the option of the command line for a field of `Scenario`."""
    return "--" + field.removesuffix("_s").removesuffix("_h").replace("_", "-")
