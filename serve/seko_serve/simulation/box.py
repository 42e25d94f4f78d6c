"""A simulated box (server): its admission, the thread that owns the device, and the writing of snapshots."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping

from simpy import Environment, Event, Resource

from seko_runtime.sessions.call_times import KEPT, CallTimes
from seko_runtime.sessions.scheduler import Waiting, next_call
from seko_serve.errors import ServeError
from seko_serve.fleet.directory import BEAT_S, BoxFacts
from seko_serve.live.admission import Admission
from seko_serve.live.manager import AGAIN_S, DRAIN_S
from seko_serve.live.saving import WRITERS
from seko_serve.simulation.directory import Rows
from seko_serve.simulation.durations import BoxTimes
from seko_serve.simulation.meters import Meters
from seko_serve.simulation.session import KILLED, STOPPED, Session, Steps
from seko_serve.simulation.traffic import STORE, Traffic

MODEL, DIGEST = "model", "digest"


class Box:
    """A box of the simulated fleet.

    Parameters
    ----------
    env : Environment
        The simulation's clock.
    name : str
        Name of the box.
    times : BoxTimes
        Durations of the box's work.
    queue, snapshot_every : int
        Largest number of waiting requests, and number of chunks between two snapshots of a session.
    rows : Rows
        The entries of the simulated directory.
    dice : random.Random
        Generator from which the durations are drawn.
    traffic, meters : Traffic, Meters
        Counters of requests, and of the times of boxes.

    Attributes
    ----------
    alive : bool
        Whether the box's process runs.
    silent : bool
        Whether the box's machine is lost: clients get no answer, and no refused connection either.
    stopping : bool
        Whether the box refuses sessions because it is about to end.
    closed : bool
        Whether the box refuses sessions and ends after its last session.
    sessions : dict of str to Session
        The sessions that have a row in the box.
    """

    def __init__(
        self,
        env: Environment,
        name: str,
        times: BoxTimes,
        queue: int,
        snapshot_every: int,
        rows: Rows,
        dice: random.Random,
        traffic: Traffic,
        meters: Meters,
    ) -> None:
        self._env, self.name, self._times, self._every = env, name, times, snapshot_every
        self._rows, self._dice, self._traffic, self._meters = rows, dice, traffic, meters
        self.alive, self.silent, self.stopping, self.closed = True, False, False, False
        self.sessions: dict[str, Session] = {}
        self._born = env.now
        self._busy_since: float | None = None
        self._measured = CallTimes(sorted(times.call_s))
        for bucket in times.call_s:  # as `calibrate` does
            for _ in range(KEPT if bucket == max(times.call_s) else 1):
                self._measured.record(None, bucket, self._draw(times.call_s[bucket]))
        self.admission = Admission(times.rows, queue, self._measured.slowest, lambda: env.now, times.period_s)
        self._work: deque[tuple[float, Event]] = deque()
        self._ready: list[Session] = []
        self._asked: dict[Session, None] = {}  # in the order in which they asked
        self._bell: Event = env.event()
        self._writers = Resource(env, WRITERS)
        self._expected: Mapping[int, float] = self._measured.expected()
        self._free: int | None = None  # None: to be computed again
        env.process(self._device())
        env.process(self._beat())

    @property
    def takes(self) -> bool:
        """Whether the box takes sessions."""
        return not (self.stopping or self.closed)

    def facts(self) -> BoxFacts:
        """Return the box's entry in the directory."""
        return BoxFacts(
            self.name,
            "",
            "",
            "",
            MODEL,
            DIGEST,
            self._times.rows,
            self._free_rows() if self.takes else 0,
            self.admission.waiting,
            len(self.sessions),
            self.takes,
            self.name,
        )

    def _free_rows(self) -> int:
        if self._free is None:
            self._free = self.admission.free
        return self._free

    # -- sessions ----------------------------------------------------------------------------------------------

    def open(self, session: Session, token: str | None) -> Steps:
        """Give a new session a row; return False if the box ends before the session has its row. Errors are those of
        `Admission.ask`."""
        self._check_open()
        self.admission.ask(session.demand, token, session.name)
        self._claim(session)
        return bool((yield self._do(self._draw(self._times.open_s))))

    def reopen(self, session: Session) -> Steps:
        """Give a saved session a row; return False if the box ends before the session has its row. Errors are those of
        `Admission.ask`."""
        self._check_open()
        self.admission.ask(session.demand, f"session {session.name}", session.name)
        self._claim(session)
        yield self._env.timeout(self._draw(self._times.read_s))
        return self.alive

    def serve(self, session: Session) -> None:
        """Make the session's chunks from now on."""
        session.attach(self._take)

    def leave(self, session: Session) -> None:
        """Free the session's row."""
        if self.sessions.pop(session.name, None) is not None:
            self._meters.rows.change(-1)
            self.admission.finish(session.name)
            self._free = None
            session.lease = ""
            self._asked.pop(session, None)
            self._traffic.directory("release")

    def _claim(self, session: Session) -> None:
        self._traffic.directory("claim")
        session.lease, self._free = self.name, None
        self.sessions[session.name] = session
        self._meters.rows.change(1)

    def _check_open(self) -> None:
        if not self.takes:
            raise ServeError("stopping", "the server is shutting down", retry_after=AGAIN_S)

    # -- its end -----------------------------------------------------------------------------------------------

    def kill(self, *, silent: bool = False) -> None:
        """End the process at once. If ``silent``, the box's machine is lost, too: connections to the machine are not
        even refused."""
        if not self.alive:
            return
        self.finish()
        self.alive, self.silent = False, silent
        self._meters.rows.change(-len(self.sessions))
        for session in list(self.sessions.values()):
            session.detach(KILLED)
        self.sessions.clear()
        for _, done in self._work:
            done.succeed(False)
        self._ring()

    def end(self) -> None:
        """End the process of a box that has no session."""
        self._rows.withdraw(self.name)
        self.kill()

    def drain(self) -> Steps:
        """Save all sessions, end their sockets, and end the process."""
        self.stopping = True
        sessions, until = list(self.sessions.values()), self._env.now + DRAIN_S
        for session in sessions:
            session.on_hold = True
        for session in sessions:
            if self._env.now < until and self.alive and session.name in self.sessions:
                yield from self._save(session)
        for session in sessions:
            if self.alive and session.name in self.sessions:
                self.leave(session)
                session.detach(STOPPED)
        if self.alive:
            self.end()

    # -- the device's thread -----------------------------------------------------------------------------------

    def _take(self, session: Session) -> None:
        if self.alive and session.may_run(alone=self._saves(session)):
            session.asked = True
            self._ready.append(session)
            self._ring()

    def _saves(self, session: Session) -> bool:
        """Return whether a snapshot of a session is due."""
        return 0 < self._every <= session.unsaved and not session.saving

    def _do(self, seconds: float) -> Event:
        """Return the event at which the device's thread has done some work; its value is False if the box ends."""
        done = self._env.event()
        if self.alive:
            self._work.append((seconds, done))
            self._ring()
        else:
            done.succeed(False)
        return done

    def _ring(self) -> None:
        if not self._bell.triggered:
            self._bell.succeed()

    def _device(self) -> Steps:
        while self.alive:
            if self._work:
                seconds, done = self._work[0]
                yield from self._busy(seconds)
                if self.alive:
                    self._work.popleft()
                    done.succeed(True)
            elif self._ready or self._asked:
                yield from self._call()
            else:
                self._bell = self._env.event()
                yield self._bell

    def _busy(self, seconds: float) -> Steps:
        self._busy_since = began = self._env.now
        yield self._env.timeout(seconds)
        if self.alive:
            self._meters.busy.add(began, self._env.now)
            self._busy_since = None

    def _call(self) -> Steps:
        """Take snapshots that are due, then make one call for sessions that have requested a chunk."""
        ready, self._ready = self._ready, []
        for session in ready:
            if session.over.triggered or session.on_hold:
                continue
            self._asked[session] = None
            session.due()  # it waits from now on
            if self._saves(session):
                chunks, session.unsaved, session.saving = session.made_chunks, 0, True
                yield from self._busy(self._draw(self._times.capture_s))
                self._env.process(self._write(session, chunks))
        if not self._asked or not self.alive:
            return
        waiting = list(self._asked)
        if len(waiting) == 1:
            chosen, bucket = waiting, min(self._expected)
        else:
            variants = [session.variant for session in waiting]
            call = next_call(
                [Waiting(session.due(), variant) for session, variant in zip(waiting, variants, strict=True)],
                dict.fromkeys(variants, self._expected),
                self._env.now,
            )
            assert call is not None  # sessions wait
            chosen, bucket = [waiting[place] for place in call.sessions], call.bucket
        durations = self._times.call_s[bucket]
        seconds = self._draw(durations)
        yield from self._busy(seconds)
        if not self.alive:
            return
        if len(durations) > 1:  # else nothing new was measured
            self._measured.record(None, bucket, seconds)
            self._expected, self._free = self._measured.expected(), None
        for session in chosen:
            if session in self._asked:  # else it has left
                del self._asked[session]
                session.accept_chunk(self._draw(self._times.encode_s), self._draw(self._times.ack_s))
                self._take(session)

    # -- snapshots and the directory ---------------------------------------------------------------------------

    def _write(self, session: Session, chunks: int) -> Steps:
        with self._writers.request() as writer:
            yield writer
            self._traffic.count(STORE)
            yield self._env.timeout(self._draw(self._times.write_s))
        session.saving = False
        if self.alive and session.lease == self.name:
            session.saved = chunks

    def _save(self, session: Session) -> Steps:
        """Save a session after its last chunk."""
        if (yield self._do(self._draw(self._times.capture_s))):
            self._asked.pop(session, None)
            yield from self._write(session, session.made_chunks)

    def _beat(self) -> Steps:
        """Renew the box's entry in the directory and the leases of its sessions."""
        self._rows.enter(self.facts())
        yield self._env.timeout(self._dice.uniform(0, BEAT_S))
        while self.alive:
            self._rows.announce(self.facts())
            self._traffic.directory("renew", len(self.sessions))
            self._traffic.directory("renewals", bool(self.sessions))
            yield self._env.timeout(BEAT_S)

    def finish(self) -> None:
        """Count the box's time at the end of the simulation."""
        if self.alive:
            self._meters.boxes.add(self._born, self._env.now)
            if self._busy_since is not None:
                self._meters.busy.add(self._busy_since, self._env.now)

    def _draw(self, seconds: tuple[float, ...]) -> float:
        return seconds[0] if len(seconds) == 1 else self._dice.choice(seconds)
