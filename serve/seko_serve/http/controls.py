"""The controls that a client sends over its socket or data channel."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from av import VideoFrame

from seko_serve.errors import ServeError
from seko_serve.http.access import Access
from seko_serve.http.workload import video_in
from seko_serve.live.manager import SessionManager
from seko_serve.live.session import LiveSession
from seko_serve.media.uploads import decoded_picture, fitted_frame
from seko_serve.protocol import FRAME, Control, message, parse_binary, parse_control

REMEMBERED_IDS = 1024  # of a client's controls


class ControlIntake:
    """Takes one client's controls, in order.

    Parameters
    ----------
    session : LiveSession
        The session that they change.
    manager : SessionManager
        The live sessions.
    access : Access
        The limits on how many controls come.
    acknowledges : bool
        Whether the client says what it has shown; otherwise the server knows, and such a control is rejected.
    """

    def __init__(
        self, session: LiveSession, manager: SessionManager, access: Access, *, acknowledges: bool = True
    ) -> None:
        self._session, self._manager, self._access = session, manager, access
        self._acknowledges = acknowledges
        self._ids: deque[str] = deque(maxlen=REMEMBERED_IDS)

    async def take(self, received: str | bytes) -> bool:
        """Take one control; return whether the client ends the session with it.

        Raises
        ------
        ServeError
            If the control cannot be read. A control that can be read and is refused is answered by ``rejected``.
        """
        control = parse_binary(received) if isinstance(received, bytes) else parse_control(received)
        if control.type == "close":
            return True
        session = self._session
        try:
            self._access.controls.take(session.name)
            if control.type == "ping":
                session.viewer.tell(message("pong", t=control.fields["t"], server_t=time.time()))
                return False
            if control.type == "hello":
                raise ServeError("conflict", "hello came before: to change it, resume on another socket")
            if control.type == "ack" and not self._acknowledges:
                raise ServeError("conflict", "the server itself knows what was shown: send no ack")
            if control.id and control.id in self._ids:
                raise ServeError("conflict", "a control of this id came before")
            if control.type == FRAME:
                control = await asyncio.to_thread(self._decoded, control)
            session.control(control)
            self._ids.append(control.id)
        except ServeError as error:
            self._manager.device.metrics.refused.labels(error.kind.code).inc()
            session.viewer.tell(message("rejected", id=control.id, **error.body()))
            if error.retry_after is not None:  # too many: what follows waits, and with it the client
                await asyncio.sleep(error.retry_after)
        return False

    @cached_property
    def _video_in(self) -> Mapping[str, int]:
        return video_in(self._manager.device.manifest)

    def _decoded(self, control: Control) -> Control:
        """Return a frame of an input video with its pixels, in the model's size; ServeError if it is no picture, or the
        artifact takes no video."""
        height, width = self._video_in["height"], self._video_in["width"]
        frame = VideoFrame.from_ndarray(decoded_picture(control.fields["picture"], "the frame"), "rgb24")
        fields = {"frame": fitted_frame(frame, height, width), "dropped": control.fields["dropped"]}
        return replace(control, fields=fields)
