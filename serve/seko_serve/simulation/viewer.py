"""A simulated viewer, who opens a session, waits in a queue if necessary, watches, and resumes after its socket
ended."""

from __future__ import annotations

from collections.abc import Callable

from simpy import Environment

from seko_serve.errors import ServeError
from seko_serve.simulation.box import Box
from seko_serve.simulation.gateway import Gateway
from seko_serve.simulation.session import DONE, Session, Steps

AGAIN_S = 0.1  # after a refusal that says nothing of it, or a box that ended meanwhile


def watch(
    env: Environment, gateway: Gateway, session: Session, wait_s: float, connect_s: Callable[[], float]
) -> Steps:
    """Open a session and watch the session to its end. The function `watch` is a SimPy process.

    Parameters
    ----------
    env : Environment
        The simulation's clock.
    gateway : Gateway
        The gateway that the viewer knows.
    session : Session
        The viewer's session.
    wait_s : float
        Seconds for which the viewer waits in a queue; with 0 the viewer does not wait.
    connect_s : callable
        Function that draws the seconds that network and client need for a new socket.
    """
    try:
        box: Box = yield from _opened(env, gateway, session, wait_s)
    except ServeError as error:
        session.refused = error.kind.code
        return
    yield env.timeout(connect_s())
    if not session.over.triggered:
        box.serve(session)
    while (yield session.over) != DONE:
        if session.saved is None:
            session.lost = True
            return
        box = yield from _resumed(env, gateway, session, connect_s)
    box.leave(session)


def _opened(env: Environment, gateway: Gateway, session: Session, wait_s: float) -> Steps:
    """Open a session and return its box; ServeError if the viewer is refused or has waited too long."""
    token, until = session.name if wait_s else None, env.now + wait_s
    while True:
        try:
            return (yield from gateway.open(session, token))
        except ServeError as error:
            again = error.retry_after or AGAIN_S
            if env.now + again > until:
                raise
            yield env.timeout(again)


def _resumed(env: Environment, gateway: Gateway, session: Session, connect_s: Callable[[], float]) -> Steps:
    """Resume a session and return the box that continues it."""
    while True:
        again = AGAIN_S
        try:
            box: Box = yield from gateway.find(session)
            if (yield from box.reopen(session)):
                yield env.timeout(connect_s())
                if box.alive:
                    box.serve(session)
                    return box
        except ServeError as error:
            again = error.retry_after or AGAIN_S
        yield env.timeout(again)
