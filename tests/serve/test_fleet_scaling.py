"""The number of boxes of a fleet: bounds, growth, shrinking, and constant loads, on simulated clocks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from seko_serve.fleet.directory import BoxFacts
from seko_serve.fleet.scaler import Scaler
from seko_serve.fleet.scaling import KNOWN_S, Bounds, Changes, Plan, Scaling, wanted_boxes

QUIET_S, TICK_S, START_S = 60.0, 2.0, 30.0


def row(name: str, rows: int, sessions: int, waiting: int = 0, *, accepts: bool = True) -> BoxFacts:
    free = rows - sessions if accepts else 0
    return BoxFacts(
        name, "", "", "group", "model", "digest", rows, free, waiting, sessions, accepts, f"app-{name}"
    )


@dataclass
class Model:
    """Boxes of equal rows that share a load: it fills the boxes that take sessions, and the rest waits."""

    scaling: Scaling
    rows_each: int
    now: float = 0.0
    started: int = 0
    boxes: dict[str, tuple[float, bool]] = field(default_factory=dict)  # when it takes sessions, and whether
    sessions: dict[str, int] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)

    def begin(self, boxes: int) -> Model:
        """Begin with boxes that run already."""
        for _ in range(boxes):
            self.boxes[self._name()] = 0.0, True
        return self

    def _name(self) -> str:
        self.started += 1
        return f"app-{self.started:04}"

    def step(self, load: int, *, leave: bool = False) -> None:
        """Let `TICK_S` pass; with ``leave`` the sessions of closed boxes end, and come again elsewhere."""
        taking = [box for box, (at, takes) in self.boxes.items() if takes and at <= self.now]
        closed = [box for box, (_, takes) in self.boxes.items() if not takes]
        for box in closed:
            self.sessions[box] = 0 if leave else min(self.sessions.get(box, 0), load)
        left = load - sum(self.sessions.get(box, 0) for box in closed)
        for number, box in enumerate(taking):
            share = max(0, left) // (len(taking) - number)
            self.sessions[box] = min(self.rows_each, share)
            left -= self.sessions[box]
        rows = [row(box[4:], self.rows_each, self.sessions[box]) for box in taking]
        rows += [row(box[4:], self.rows_each, self.sessions[box], accepts=False) for box in closed]
        if left > 0 and taking:
            rows[0] = replace(rows[0], waiting=left)
        plan = self.scaling.plan(rows, set(self.boxes), self.now)
        for box in plan.resume:
            self.boxes[box] = self.now, True
        for box in plan.close:
            self.boxes[box] = 0.0, False
            if not self.sessions.get(box):
                del self.boxes[box]
        for _ in range(plan.start):
            self.boxes[self._name()] = self.now + START_S, True
        self.counts.append(sum(takes for _, takes in self.boxes.values()))
        self.now += TICK_S


@given(
    boxes=st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 20), st.booleans()), max_size=12
    ),
    starting=st.integers(0, 4),
    unknown=st.integers(0, 2),
    least=st.integers(1, 6),
    more=st.integers(0, 6),
    quiet_s=st.floats(0, 1e4),
    changed=st.floats(-1e5, 0),
    needed=st.floats(-1e5, 0),
)
def test_the_number_stays_in_its_bounds_and_shrinks_by_one(
    boxes: list[tuple[int, int, int, bool]],
    starting: int,
    unknown: int,
    least: int,
    more: int,
    quiet_s: float,
    changed: float,
    needed: float,
) -> None:
    rows = [
        replace(row(f"{number:02}", 8, sessions, waiting, accepts=accepts), free=free if accepts else 0)
        for number, (sessions, free, waiting, accepts) in enumerate(boxes)
    ]
    count = sum(box.accepts for box in rows) + starting + unknown
    bounds = Bounds(least, least + more, quiet_s)
    wanted, changes = wanted_boxes(rows, count, bounds, Changes(changed, needed), 0.0, starting)
    assert bounds.least <= wanted <= bounds.most
    assert wanted >= min(count - 1, bounds.most)
    assert changes.changed_at == (changed if wanted == count else 0.0)
    if bounds.least <= count <= bounds.most:
        if wanted < count:
            assert -max(changed, needed) >= quiet_s
            assert not unknown
            assert not any(box.waiting for box in rows)
        taking = [box for box in rows if box.accepts]
        full = taking and not starting and not unknown and not any(box.free for box in taking)
        if full and any(box.waiting for box in taking) and count < bounds.most:
            assert wanted > count


@settings(max_examples=40)
@given(
    rows_each=st.integers(1, 8),
    load=st.integers(0, 40),
    begin=st.integers(1, 8),
    least=st.integers(1, 4),
    leave=st.booleans(),
)
def test_a_constant_load_changes_the_number_in_one_direction_and_then_no_more(
    rows_each: int, load: int, begin: int, least: int, leave: bool
) -> None:
    bounds = Bounds(least, 200, QUIET_S)
    model = Model(Scaling(bounds, 0.0), rows_each).begin(begin)
    for _ in range(int((begin + 2) * (QUIET_S + 2 * KNOWN_S) / TICK_S)):
        model.step(load, leave=leave)
    counts = model.counts
    assert counts in (sorted(counts), sorted(counts, reverse=True))
    settled = counts[-1]
    for _ in range(int(2 * QUIET_S / TICK_S)):
        model.step(load, leave=leave)
        assert model.counts[-1] == settled
    assert load <= 0.8 * rows_each * settled
    assert settled == least or load > 0.5 * rows_each * (settled - 1)


@settings(max_examples=40)
@given(load=st.integers(1, 100), most=st.integers(2, 10))
def test_a_queue_adds_as_many_boxes_as_it_needs_at_once_and_at_most_the_largest_number(
    load: int, most: int
) -> None:
    model = Model(Scaling(Bounds(1, most, QUIET_S), 0.0), 1).begin(1)
    model.step(load)
    assert model.counts[0] == min(most, -(-load * 5 // 4))
    while model.now < START_S:  # what starts is not started again
        model.step(load)
    assert set(model.counts) == {model.counts[0]}


@given(begin=st.integers(2, 6), least=st.integers(1, 4))
def test_without_load_the_number_falls_to_the_smallest_one_box_after_another(begin: int, least: int) -> None:
    model = Model(Scaling(Bounds(least, 20, QUIET_S), 0.0), 2).begin(begin)
    changes = []
    while model.now < (begin + 1) * (QUIET_S + TICK_S):
        before = len(model.boxes)
        model.step(0)
        if len(model.boxes) != before:
            changes.append((model.now - TICK_S, len(model.boxes)))
    if begin < least:
        assert changes == [(0.0, least)]
        return
    assert [count for _, count in changes] == list(range(begin - 1, least - 1, -1))
    assert [at for at, _ in changes] == [QUIET_S * (number + 1) for number in range(begin - least)]


def test_a_load_that_comes_again_within_the_quiet_time_ends_no_box() -> None:
    model = Model(Scaling(Bounds(1, 8, QUIET_S), 0.0), 2).begin(4)
    for _ in range(20):
        for _ in range(int(QUIET_S / TICK_S) - 1):
            model.step(0)
        model.step(4)  # with three boxes two thirds of the rows are needed
    assert set(model.counts) == {4}


def test_sessions_of_a_closed_box_are_not_cut_and_it_is_the_first_to_take_sessions_again() -> None:
    scaling = Scaling(Bounds(1, 4, QUIET_S), 0.0)
    rows = [row("a", 8, 2), row("b", 8, 1)]
    boxes = {"app-a", "app-b"}
    assert scaling.plan(rows, boxes, QUIET_S).close == ("app-b",)
    # Its row is older than what it was told, and after that its own row says so.
    assert scaling.plan(rows, boxes, QUIET_S + 2).close == ("app-b",)
    closed = [rows[0], row("b", 8, 1, accepts=False)]
    assert scaling.plan(closed, boxes, QUIET_S + 20).close == ("app-b",)
    busy = [row("a", 8, 8), closed[1]]
    assert scaling.plan(busy, boxes, QUIET_S + 22) == Plan(0, ("app-b",), ())
    # It is asked once: a box whose process ends stays closed, and another one is started.
    assert scaling.plan(busy, boxes, QUIET_S + 22 + KNOWN_S) == Plan(1, (), ("app-b",))


def test_boxes_without_a_row_keep_the_number_and_foreign_rows_count_for_nothing() -> None:
    scaling = Scaling(Bounds(1, 4, QUIET_S), 0.0)
    foreign = [row(f"x{number}", 1, 1, 5) for number in range(3)]
    assert scaling.plan(foreign, {"app-a", "app-b"}, 1e6) == Plan(0, (), ())
    assert scaling.plan([*foreign, row("a", 8, 0)], {"app-a", "app-b"}, 2e6) == Plan(0, (), ())
    both = [row("a", 8, 0), row("b", 8, 0)]
    assert scaling.plan(both, {"app-a", "app-b"}, 2e6 + QUIET_S - 1) == Plan(0, (), ())
    assert scaling.plan(both, {"app-a", "app-b"}, 2e6 + QUIET_S) == Plan(0, (), ("app-a",))


def test_a_box_that_starts_does_not_take_the_place_of_one_that_takes_sessions() -> None:
    scaling = Scaling(Bounds(1, 1, QUIET_S), 0.0)
    rows = [row("a", 8, 2), row("b", 8, 1)]
    assert scaling.plan(rows, {"app-a", "app-b", "app-c"}, 0.0) == Plan(0, (), ("app-b",))
    rows[1] = row("b", 8, 1, accepts=False)
    assert scaling.plan(rows, {"app-a", "app-b", "app-c"}, 2.0) == Plan(0, (), ("app-b",))
    started = [*rows, row("c", 8, 0)]
    assert scaling.plan(started, {"app-a", "app-b", "app-c"}, 4.0) == Plan(0, (), ("app-b", "app-c"))


def test_the_row_that_a_killed_box_has_left_beside_the_new_one_ends_no_box() -> None:
    scaling = Scaling(Bounds(2, 4, QUIET_S), 0.0)
    rows = [row("a", 8, 4), row("b", 8, 4), replace(row("b", 8, 0), name="b-again")]
    assert scaling.plan(rows, {"app-a", "app-b"}, 0.0) == Plan(0, (), ())


def test_boxes_that_no_gpu_is_free_for_end_before_those_that_take_sessions() -> None:
    scaling = Scaling(Bounds(1, 4, QUIET_S), 0.0)
    boxes, rows = {"app-a", "app-b", "app-c", "app-d"}, [row("a", 8, 7), row("b", 8, 7)]
    waiting = ["app-c", "app-d"]
    assert scaling.plan(rows, boxes, 0.0, waiting) == Plan(0, (), ())
    idle = [row("a", 8, 1), row("b", 8, 0)]
    assert scaling.plan(idle, boxes, QUIET_S, waiting) == Plan(0, (), (), ("app-c",))
    boxes -= {"app-c"}
    assert scaling.plan(idle, boxes, QUIET_S + 2, waiting[1:]) == Plan(0, (), ())
    # Without a row, but with a process: its sessions are unknown.
    assert scaling.plan(idle, boxes, 2 * QUIET_S + 1) == Plan(0, (), ())
    assert scaling.plan(idle, boxes, 3 * QUIET_S + 2, waiting[1:]) == Plan(0, (), (), ("app-d",))
    boxes -= {"app-d"}
    assert scaling.plan(idle, boxes, 4 * QUIET_S + 3) == Plan(0, (), ("app-b",))


class FakeBoxes:
    """Boxes with numbers of sessions, and a record of what was done to them."""

    def __init__(self, sessions: dict[str, int | None]) -> None:
        self.sessions, self.done = sessions, [""]
        self.waiting: set[str] = set()

    async def all(self) -> dict[str, bool]:
        return {**dict.fromkeys(self.sessions, True), **dict.fromkeys(self.waiting, False)}

    async def start(self) -> None:
        self.done.append("start")

    async def admit(self, box: str, takes: bool) -> int | None:
        self.done.append(f"{box} {takes}")
        return self.sessions[box]

    async def end(self, box: str) -> None:
        if box in self.waiting:
            self.waiting.remove(box)
            self.done.append(f"end {box}")
            return
        assert self.done[-1] == f"{box} False"
        assert self.sessions.pop(box) == 0
        self.done.append(f"end {box}")


def test_a_box_is_ended_only_when_it_says_itself_that_it_has_nothing_any_more() -> None:
    now = [0.0]
    boxes = FakeBoxes({"app-a": 0, "app-b": 1})
    scaler = Scaler("group", Bounds(1, 4, QUIET_S), boxes, lambda: now[0])

    def step(at: float, rows: list[BoxFacts]) -> list[str]:
        now[0], boxes.done = at, [""]
        asyncio.run(scaler.step(rows))
        return boxes.done[1:]

    # The rows are older than what the boxes say: a session has begun at box b meanwhile.
    idle = [row("a", 8, 1), row("b", 8, 0)]
    assert step(QUIET_S, idle) == ["app-b False"]
    closed = [idle[0], row("b", 8, 0, accepts=False)]
    assert step(QUIET_S + 20, closed) == ["app-b False"]
    boxes.sessions["app-b"] = None  # it does not answer
    assert step(QUIET_S + 22, closed) == ["app-b False"]
    busy = [row("a", 8, 8), closed[1]]
    assert step(QUIET_S + 24, busy) == ["app-b True"]
    boxes.sessions["app-b"] = 0
    assert step(QUIET_S + 26, busy) == []  # it was told to take sessions, whatever its row says yet
    assert step(2 * QUIET_S, [row("a", 8, 1), row("b", 8, 0)]) == []
    assert step(3 * QUIET_S, [row("a", 8, 1), row("b", 8, 0)]) == ["app-b False", "end app-b"]
    assert step(4 * QUIET_S + 2, [replace(row("a", 8, 8), waiting=9)]) == ["start"] * 2
    boxes.waiting = {"app-c", "app-d"}  # no GPU is free for them
    assert step(5 * QUIET_S + 2, [row("a", 8, 1)]) == ["end app-c"]
