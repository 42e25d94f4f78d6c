"""The interface through which a `LiveSession` uses one kind of workload, such as video."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Protocol

from seko_runtime.errors import EnvironmentLacksError, LibraryMissingError, UsageError
from seko_runtime.sessions.session import PendingResult, RowSession
from seko_serve.errors import ServeError
from seko_serve.protocol import Codec, Control, Media


def answer_to(error: Exception, otherwise: str) -> ServeError:
    """Return the error that a client sees for an error of the runtime. If the client's request is at fault, such as a
    text that is too long, the error is ``bad_request`` with the runtime's sentence; if the server's machine is, it is
    ``not_installed``, with the sentence that names the library, or ``exhausted``. Any other error becomes ``internal``
    with the sentence ``otherwise``."""
    if isinstance(error, UsageError):
        return ServeError("bad_request", str(error))
    if isinstance(error, LibraryMissingError):
        return ServeError("not_installed", str(error))
    if isinstance(error, EnvironmentLacksError):  # its sentence may have a path
        return ServeError("exhausted", "the server's machine lacks what this needs; its log says what")
    return ServeError("internal", otherwise)


class Piece(Protocol):
    """A result of a session's call (a chunk of video, a patch of sound) that is to be sent to the viewer. A worker
    thread calls `read`, then `encode`."""

    def read(self) -> int:
        """Wait for the result, and return its length in units of the viewer's clock: video frames or sound samples."""

    def encode(self, number: int, first: int) -> Iterable[Media]:
        """Return an iterator of encoded messages in sending order, which yields each message as soon as the message is
        encoded. The caller sets the serial numbers.

        Parameters
        ----------
        number : int
            Number of the chunk in the session.
        first : int
            Number of the chunk's first unit (video frame or sample) in the session.
        """


class Content(Protocol):
    """The stream of one session and the effect of the client's controls on the stream."""

    @property
    def rate(self) -> float:
        """Units of the viewer's clock (video frames or sound samples) per second."""

    @property
    def period_s(self) -> float:
        """Seconds in which the viewer plays one chunk."""

    # -- the event loop

    def check(self, control: Control) -> None:
        """Raise a ServeError for a control that the artifact does not support."""

    def codecs(self, hello: Control) -> tuple[Codec, ...]:
        """Return the codecs for a client; ServeError if the server can encode none of the codecs that the client
        supports."""

    def attach(self, codecs: Sequence[Codec]) -> None:
        """Begin or continue the stream with the codecs ``codecs``; the viewer's decoder can begin with the next
        message."""

    def ready(self, codecs: Sequence[Codec]) -> dict[str, object]:
        """Return the fields that describe the stream in the message ``ready``."""

    def preparation(self) -> Callable[[Any], Generator[None, None, None]] | None:
        """Return the work of a client's size that must be done before `open`, such as encoding a voice; None if there
        is none. The device's thread runs it part by part between calls for other sessions; see `Device.in_parts`."""

    def facts(self) -> dict[str, object]:
        """Return what the description of a session tells of its content."""
        return {}

    def recording(self) -> str:
        """Return what has happened to the session, as lines of JSON; ServeError if it is not recorded."""

    # -- the device's thread

    def open(self, pool: Any, name: str, tenant: str) -> RowSession:
        """Open a session of the pool; errors of the pool are raised unchanged."""

    def check_with(self, row: Any, control: Control) -> None:
        """Raise the error of the runtime that `apply` would raise for a control, as far as the error can be known
        before the next chunk. The content does not change."""

    def apply(self, row: Any, control: Control) -> str | None:
        """Apply a control: change the stream from the next chunk on. If no chunk follows, the result is a sentence for
        the client that says why. The method raises errors of the runtime unchanged."""

    def starved(self) -> bool:
        """Return whether the next chunk lacks something that the viewer must still send, such as sound."""

    def ask(self, row: Any, due: float) -> PendingResult:
        """Request the session's next chunk from the pool; a repeated request changes the due time alone."""

    def accept_chunk(self, result: Any) -> Piece:
        """Accept the requested chunk, which the device has made."""

    def state(self) -> dict[str, Any]:
        """Return the part of the session's state that a snapshot of the session's row in the pool does not contain: a
        JSON value that holds arrays, which are not changed afterwards and which the writer of the snapshot encodes."""

    def load(self, row: Any, state: Mapping[str, Any]) -> None:
        """Continue from a value that `state` returned, with a session of the pool that was restored from the snapshot
        of the same moment.
        """
