"""The run of a simulation: starts the fleet, lets viewers arrive and boxes fail, and ends with the last viewer."""

from __future__ import annotations

import random
from functools import partial

from simpy import Environment, Event, Interrupt, Process

from seko_serve.fleet.directory import BEAT_S
from seko_serve.fleet.scaling import Bounds, Scaling
from seko_serve.load import arrivals
from seko_serve.simulation.box import Box
from seko_serve.simulation.directory import Rows
from seko_serve.simulation.durations import BoxTimes
from seko_serve.simulation.figures import Figures
from seko_serve.simulation.gateway import Gateway
from seko_serve.simulation.meters import Meters
from seko_serve.simulation.scenario import Scenario
from seko_serve.simulation.session import Session, Steps
from seko_serve.simulation.traffic import Traffic
from seko_serve.simulation.viewer import watch

HOUR_S = 3600.0


def simulate(scenario: Scenario, times: BoxTimes, draw: int = 0) -> Figures:
    """Simulate a fleet and return its figures.

    Equal arguments give equal figures.

    Parameters
    ----------
    scenario : Scenario
        The fleet, its viewers and its failures.
    times : BoxTimes
        Measured durations of a box.
    draw : int
        Number of the draw. With another number viewers arrive at the same times, but gateways choose other boxes, and
        durations and failures are drawn anew.
    """
    return _Fleet(scenario, times, draw).run()


class _Fleet:
    def __init__(self, scenario: Scenario, times: BoxTimes, draw: int) -> None:
        seed = f"{scenario.seed}.{draw}" if draw else f"{scenario.seed}"
        self._env, self._scenario, self._times = Environment(), scenario, times
        self._arrivals = arrivals(scenario.sessions, scenario.arrivals, scenario.seed)
        self._dice = random.Random(f"{seed} boxes")
        self._failures = random.Random(f"{seed} failures")
        self._viewers = random.Random(f"{seed} viewers")
        begin, last = scenario.warm_up_s, self._arrivals[-1]
        clock = partial(getattr, self._env, "now")
        self._meters = Meters(begin, last if last > begin else float("inf"), clock)
        self._traffic = Traffic(clock)
        self._rows = Rows(clock, self._traffic)
        self._boxes: dict[str, Box] = {}
        self._gateways = [
            Gateway(
                self._env,
                random.Random(f"{seed} gateway {number}"),
                self._rows,
                self._boxes,
                self._traffic,
            )
            for number in range(scenario.gateways)
        ]
        self._slots = [self._new_box() for _ in range(scenario.boxes)]
        self._starting = 0
        self._adding: dict[str, Process] = {}  # by a name, the start of each further box
        self._sessions: list[Session] = []
        self._left, self._ended = scenario.sessions, 0
        self._over: Event = self._env.event()

    def run(self) -> Figures:
        """Run the simulation until the last viewer has left."""
        scenario, env = self._scenario, self._env
        env.process(self._arrive())
        if scenario.box_failure_h:
            for slot in range(scenario.boxes):
                env.process(self._fail([slot], scenario.box_failure_h, silent=False))
        if scenario.machine_failure_h:
            for first in range(0, scenario.boxes, scenario.boxes_per_machine):
                slots = list(range(first, min(first + scenario.boxes_per_machine, scenario.boxes)))
                env.process(self._fail(slots, scenario.machine_failure_h, silent=True))
        if scenario.drained:
            env.process(self._replace_boxes())
        if scenario.max_boxes:
            env.process(self._scale())
        env.run(until=self._over)
        for box in self._slots:
            box.finish()
        self._meters.rows.change(0)
        return Figures.of(self._sessions, scenario.buffer, self._meters, self._traffic, self._ended, env.now)

    def _new_box(self) -> Box:
        name = f"box-{len(self._boxes):06}"
        scenario = self._scenario
        self._boxes[name] = Box(
            self._env,
            name,
            self._times,
            scenario.queue,
            scenario.snapshot_every,
            self._rows,
            self._dice,
            self._traffic,
            self._meters,
        )
        return self._boxes[name]

    def _arrive(self) -> Steps:
        scenario = self._scenario
        for number, at in enumerate(self._arrivals):
            yield self._env.timeout(at - self._env.now)
            seconds = scenario.seconds
            if scenario.lengths == "exponential":
                seconds = self._viewers.expovariate(1 / scenario.seconds)
            session = Session(self._env, f"session-{number}", self._times, seconds, scenario.buffer)
            self._sessions.append(session)
            self._env.process(self._view(session, self._gateways[number % len(self._gateways)]))

    def _view(self, session: Session, gateway: Gateway) -> Steps:
        connect_s = partial(self._viewers.choice, self._times.connect_s)
        yield from watch(self._env, gateway, session, self._scenario.wait_s, connect_s)
        self._left -= 1
        if not self._left:
            self._over.succeed()

    def _fail(self, slots: list[int], hours: float, *, silent: bool) -> Steps:
        """Kill the boxes in these slots, all at once, again and again at random times."""
        while True:
            yield self._env.timeout(self._failures.expovariate(1 / (hours * HOUR_S)))
            for slot in slots:
                if self._slots[slot].alive:
                    self._slots[slot].kill(silent=silent)
                    self._env.process(self._start(slot))

    def _replace_boxes(self) -> Steps:
        """Replace boxes one after another."""
        yield self._env.timeout(self._scenario.drain_at_s)
        for slot in range(self._scenario.drained):
            box = self._slots[slot]
            if box.alive:
                yield from box.drain()
                if self._slots[slot] is box:
                    yield from self._start(slot)

    def _start(self, slot: int) -> Steps:
        """Start a box that replaces one that has ended."""
        self._ended += 1
        self._slots[slot] = yield from self._started()

    def _started(self) -> Steps:
        """Return a new box, after the time that its start takes."""
        self._starting += 1
        try:
            yield self._env.timeout(self._dice.choice(self._times.start_s))
        finally:
            self._starting -= 1
        return self._new_box()

    # -- the number of boxes -----------------------------------------------------------------------------------

    def _scale(self) -> Steps:
        """Add and end boxes, as the scaler of a fleet does."""
        scenario = self._scenario
        scaling = Scaling(Bounds(scenario.boxes, scenario.max_boxes, scenario.shrink_after_s), self._env.now)
        while True:
            yield self._env.timeout(BEAT_S)
            names = {box.name for box in self._slots if box.alive}
            self._adding = {name: start for name, start in self._adding.items() if start.is_alive}
            names |= {f"again-{number}" for number in range(self._starting - len(self._adding))}
            plan = scaling.plan(self._rows.boxes(), {*names, *self._adding}, self._env.now, self._adding)
            for name in plan.end:
                self._adding.pop(name).interrupt()
            for name in plan.resume:
                self._boxes[name].closed = False
            for name in plan.close:
                self._boxes[name].closed = True
                if not self._boxes[name].sessions:
                    self._boxes[name].end()
            for number in range(plan.start):
                start = self._env.process(self._add())
                self._adding[f"starting-{self._env.now:012.1f}-{number}"] = start

    def _add(self) -> Steps:
        """Start a further box."""
        scenario = self._scenario
        try:
            box = yield from self._started()
        except Interrupt:  # it is not needed any more
            return
        slot = len(self._slots)
        self._slots.append(box)
        if scenario.box_failure_h:
            self._env.process(self._fail([slot], scenario.box_failure_h, silent=False))
        if scenario.machine_failure_h:
            self._env.process(self._fail([slot], scenario.machine_failure_h, silent=True))
