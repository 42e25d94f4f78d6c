"""The results of a simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seko_serve.load import percentile, shown
from seko_serve.simulation.meters import Meters
from seko_serve.simulation.session import Session
from seko_serve.simulation.traffic import BOX, DIRECTORY, GATEWAY, STORE, Traffic


@dataclass(frozen=True)
class Figures:
    """Figures over all viewers that arrived after the warm-up.

    Parameters
    ----------
    sessions, served : int
        Number of viewers that arrived, and number of viewers that saw a chunk.
    refused : mapping of str to int
        Number of viewers that were refused, by the error's code.
    lost, resumes : int
        Number of sessions without a snapshot that were lost because their box was lost; number of sockets that ended
        and were resumed.
    cpr : float or None
        Continuous playback rate as ``seko-serve load`` defines it. A viewer whose socket ended begins to play again;
        the first chunk then counts as late.
    ttfc_ms_p50, ttfc_ms_p99 : float or None
        Milliseconds from a viewer's request to the first frame, with the time in the queue.
    resume_s_p50, resume_s_p99 : float or None
        Seconds from a socket's end to the next frame.
    repeated_chunks : int
        Largest number of chunks that a viewer received twice after a socket's end, because the chunks were made after
        the last snapshot.
    gpu_use : float
        Share of the boxes' time in which their device was busy.
    mean_boxes, mean_sessions : float
        Mean number of boxes that ran, and of rows with a session, over time.
    span_s : float
        Length of the measured time in seconds, from the end of the warm-up to the last arrival.
    ended_boxes : int
        Number of boxes that failed or were replaced.
    gateway_rps, box_rps, directory_rps, store_rps : float
        Mean requests a second: from viewers to all gateways, from gateways to all boxes, commands to Redis, and
        snapshots to the store.
    gateway_rps_peak, box_rps_peak, directory_rps_peak, store_rps_peak : int
        Largest number of requests to gateways, boxes, Redis and the store in any second.
    """

    sessions: int
    served: int
    refused: dict[str, int]
    lost: int
    resumes: int
    cpr: float | None
    ttfc_ms_p50: float | None
    ttfc_ms_p99: float | None
    resume_s_p50: float | None
    resume_s_p99: float | None
    repeated_chunks: int
    gpu_use: float
    mean_boxes: float
    mean_sessions: float
    span_s: float
    ended_boxes: int
    gateway_rps: float
    gateway_rps_peak: int
    box_rps: float
    box_rps_peak: int
    directory_rps: float
    directory_rps_peak: int
    store_rps: float
    store_rps_peak: int

    @classmethod
    def of(
        cls,
        sessions: Sequence[Session],
        buffer: int,
        meters: Meters,
        traffic: Traffic,
        ended: int,
        now: float,
    ) -> Figures:
        """Return the figures of a simulation that ended at the time ``now``."""
        counted = [session for session in sessions if session.opened_at >= meters.begin]
        served = [session for session in counted if session.views and session.views[0].first_at is not None]
        shares = [share for session in served if (share := in_time(session, buffer)) is not None]
        ttfc = [
            1e3 * (first.first_at - first.opened_at)
            for first in (session.views[0] for session in served)
            if first.first_at is not None
        ]
        waits = [wait for session in counted for wait in session.waits]
        end = min(meters.end, now)
        rates: dict[str, Any] = {}
        for receiver in (GATEWAY, BOX, DIRECTORY, STORE):
            of_receiver = traffic.a_second(receiver, meters.begin, end)
            rates[f"{receiver}_rps"], rates[f"{receiver}_rps_peak"] = of_receiver
        return cls(
            sessions=len(counted),
            served=len(served),
            refused=dict(Counter(session.refused for session in counted if session.refused)),
            lost=sum(session.lost for session in counted),
            resumes=len(waits),
            cpr=sum(shares) / len(shares) if shares else None,
            ttfc_ms_p50=percentile(ttfc, 50),
            ttfc_ms_p99=percentile(ttfc, 99),
            resume_s_p50=percentile(waits, 50),
            resume_s_p99=percentile(waits, 99),
            repeated_chunks=max((chunks for session in counted for chunks in session.again), default=0),
            gpu_use=meters.busy.seconds / meters.boxes.seconds if meters.boxes.seconds else 0.0,
            mean_boxes=meters.boxes.seconds / (end - meters.begin) if end > meters.begin else 0.0,
            mean_sessions=meters.rows.span.seconds / (end - meters.begin) if end > meters.begin else 0.0,
            span_s=end - meters.begin,
            ended_boxes=ended,
            **rates,
        )

    def text(self) -> str:
        """Return the figures as text for a terminal."""
        refused = ", ".join(f"{count} {code}" for code, count in self.refused.items()) or "none"
        lines = [
            f"viewers   {self.served} of {self.sessions} served; refused: {refused}",
            f"CPR       {shown(self.cpr, 4)}",
            f"TTFC      p50 {shown(self.ttfc_ms_p50, 0)} ms, p99 {shown(self.ttfc_ms_p99, 0)} ms",
            f"GPU use   {100 * self.gpu_use:.1f} % of {self.mean_boxes:.1f} boxes; {self.mean_sessions:.1f} sessions "
            f"at a time in {self.span_s:.0f} s",
            f"boxes     {self.ended_boxes} ended; {self.resumes} sockets resumed after "
            f"p50 {shown(self.resume_s_p50, 1)} s, p99 {shown(self.resume_s_p99, 1)} s; {self.lost} sessions lost",
            "a second  mean, and in the busiest second:",
            f"          {self.gateway_rps:.1f}, {self.gateway_rps_peak} requests to the gateways",
            f"          {self.box_rps:.1f}, {self.box_rps_peak} requests from gateways to boxes",
            f"          {self.directory_rps:.1f}, {self.directory_rps_peak} commands to Redis",
            f"          {self.store_rps:.1f}, {self.store_rps_peak} snapshots to the store",
        ]
        return "\n".join(lines)


def in_time(session: Session, buffer: int) -> float | None:
    """Return the share of a session's chunks that were in time; None if no chunk had a due time."""
    is_late = [late > 0 for view in session.views for late in view.late(buffer)]
    is_late += [True] * sum(bool(view.came_at) for view in session.views[1:])
    return 1 - sum(is_late) / len(is_late) if is_late else None
