"""The interface of a control. The modules beside this one have the kinds; `registry` finds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from seko_runtime.arguments import shown
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.format.records import Document

Event = Mapping[str, Any]
"""One message of a person to a control: JSON values by name. Sound and pictures may also be bytes or arrays."""

ParametersT = TypeVar("ParametersT")


# Headings of options in `seko-run run --help`
MEDIA = "Media (pictures and sound)"
INPUTS = "Camera and other inputs"  # all that keys steer
# Chunks to which a control can go back as it was before them: more than a cache holds, beyond which no session rewinds.
CHUNKS_BACK = 256


@dataclass(frozen=True)
class ControlOption:
    """An option of `seko-run` that feeds controls of a kind.

    Parameters
    ----------
    name : str
        The option, such as ``--keys``.
    metavar, help : str
        What the help shows for it.
    heading : str
        The heading of the help under which it stands.
    file : bool
        Whether the value is the path of a file.
    repeatable : bool
        Whether the option may be given several times; its value is then a list.
    """

    name: str
    metavar: str
    help: str
    heading: str
    file: bool = False
    repeatable: bool = False


class Control(ABC):
    """What a person steers one session with: takes events, and gives the inputs of the session's next chunk.

    Nothing that a control gives moves it: `next_chunk` may be asked any number of times, and `advance` moves on when
    the chunk is on its way.

    Parameters
    ----------
    spec : ControlSpec
        The manifest's entry for this control.
    inputs : mapping of str to InputSpec
        The model's inputs that the control fills, by the words of ``spec.inputs``.

    Raises
    ------
    ManifestError
        If a parameter or an input does not fit the kind.
    """

    kind: ClassVar[str]
    """The kind, as the manifest names it."""

    options: ClassVar[Sequence[ControlOption]] = ()
    """The options of `seko-run` for this kind."""

    sound_rate: ClassVar[int | None] = None
    """Samples a second of the sound that is played with the chunks; None for a control without sound."""

    fits_recording: ClassVar[bool] = True
    """Whether the inputs that a build recorded go with what the control gives."""

    def __init__(self, spec: ControlSpec, inputs: Mapping[str, InputSpec]) -> None:
        self.spec, self.inputs = spec, dict(inputs)
        self.lock: Callable[[], AbstractContextManager[object]] = (
            nullcontext  # of the owner, held for each event
        )
        self.notes: list[tuple[str, str]] = []  # what an event is called, and what was done to it, for people
        self.heard: Callable[[str, Event], None] | None = None  # records the events that were taken

    @property
    def name(self) -> str:
        """The control's name in its artifact."""
        return self.spec.name

    @property
    def input_names(self) -> set[str]:
        """Names of the model's inputs that the control fills."""
        return {spec.name for spec in self.inputs.values()}

    def take(self, event: Event) -> None:
        """Take an event, from the next chunk on.

        Raises
        ------
        UsageError
            If the event is invalid, or does not fit what was taken before; the control has not changed.
        """
        self.apply(self.check(event))

    def apply(self, event: Event) -> None:
        """Take an event that `check` returned."""
        with self.lock():
            self._apply(event)
            self.record(event)

    def record(self, event: Event) -> None:
        """Record an event that was checked, if events are recorded."""
        if self.heard is not None:
            self.heard(self.name, self._as_recorded(event))

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what a page, a client or a schema needs to know, as a JSON object: the ``events`` by name, each with a
        JSON schema, and what the kind says of bindings, units, limits and defaults. A page draws ``keys`` as key pads,
        ``pictures`` as wells of pictures and ``sound`` as a microphone."""

    @abstractmethod
    def check(self, event: Event) -> Event:
        """Return the event in the form that `apply` takes; UsageError if it is invalid. The control does not change."""

    @abstractmethod
    def _apply(self, event: Event) -> None:
        """Take an event that was checked; UsageError, without a change, if it does not fit what was taken before."""

    def _as_recorded(self, event: Event) -> Event:
        """Return what a recording has of an event that was checked."""
        return event

    @property
    @abstractmethod
    def active(self) -> bool:
        """Whether the control has taken events, so that it gives its inputs; otherwise the caller may give them."""

    @property
    def chunks(self) -> int | None:
        """Number of chunks for which what was taken lasts; None if nothing that was taken has an end."""
        return None

    def check_lasts(self, chunks: int) -> None:  # noqa: B027  most events have no end
        """Raise a UsageError if what was taken ends before so many chunks, and nothing can follow."""

    def ready(self) -> bool:
        """Return whether the next chunk has all that it needs of this control."""
        return True

    def opening(self) -> dict[str, Any]:
        """Return the arguments of the pool's `open_session` that follow from the events so far."""
        return {}

    def next_chunk(self) -> Mapping[str, Any]:
        """Return the inputs of the session's next chunk by name; empty for a control without inputs per chunk.

        Raises
        ------
        UsageError
            If the chunk needs an event that has not come.
        """
        return {}

    def advance(self) -> None:  # noqa: B027  nothing per chunk
        """Move on by the chunk that `next_chunk` gave."""

    def go_to(self, frame: int) -> None:  # noqa: B027  most events are not numbered
        """Go on with a chunk that begins at this latent frame, after a step back or from a snapshot."""

    def heard_at(self) -> float | None:
        """Return the time, by `time.monotonic`, at which the last event came on which the next chunk depends; None if
        the control does not know."""
        return None

    def sound(self, first_frame: int) -> Any:
        """Return the sound that is played with the chunk that begins at a latent frame, float32 [N] at `sound_rate`;
        None for a control without sound."""
        del first_frame
        return None

    def sound_track(self) -> Any:
        """Return the whole sound that has come, float32 [N] at `sound_rate`; None without sound."""
        return None

    @property
    def counts(self) -> Mapping[str, int]:
        """What the control has counted of its events so far, by words for people; empty for a control that counts
        nothing."""
        return {}

    def lateness(self, times: Sequence[float]) -> list[float]:
        """Return for each chunk by how many seconds it came after the last event that it needed, if the events had come
        live; empty for a control without a clock.

        Parameters
        ----------
        times : sequence of float
            Time at which chunk 0 began, then the time at which each chunk was ready, in seconds.
        """
        del times
        return []

    @abstractmethod
    def reset(self) -> None:
        """Return to the beginning of a stream."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the control's state for `load`: JSON values, and arrays, of which `recording.as_json` makes JSON.
        Snapshots of a session do not contain it."""

    def beside_state(self) -> Sequence[Event]:
        """Return the events that still act, and of which `state` has nothing; a recording begins with them."""
        return ()

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` of a control with the same parameters returned; UsageError for any other
        value."""

    @classmethod
    def lacking(cls, inputs: Sequence[InputSpec]) -> str:
        """Return the sentence with which an artifact that takes these inputs refuses events of this kind."""
        names = ", ".join(spec.name for spec in inputs) or "none"
        return f"this artifact's model has no {cls.kind}; its inputs: {names}"

    @classmethod
    def events_of(cls, given: Mapping[str, Any]) -> list[Event]:
        """Return the events that options of `seko-run` say.

        Parameters
        ----------
        given : mapping of str to object
            The values of `options` that the command line has, by the option's name, such as ``--keys``.

        Raises
        ------
        UsageError
            If options contradict each other, or a file cannot be read.
        """
        del given
        return []


def parameters_of(kind: type[ParametersT], spec: ControlSpec) -> ParametersT:
    """Return a control's parameters as a frozen dataclass; ManifestError if one is missing or of a wrong type."""
    return Document({}).read(kind, dict(spec.parameters), f"controls.{spec.name}.parameters")


def one_of(event: object, known: Mapping[str, Sequence[str]], what: str) -> tuple[str, dict[str, Any]]:
    """Return which of several events a mapping is, and its values.

    Parameters
    ----------
    event : object
        What is called an event.
    known : mapping of str to sequence of str
        The field that makes an event, and the further fields that it may have.
    what : str
        Name of the control, for messages.

    Raises
    ------
    UsageError
        If it is no mapping, has none or several of the fields of ``known``, or a field that is unknown.
    """
    if not isinstance(event, Mapping):
        raise UsageError(
            f"an event of {what} is {shown(event)}, expected a mapping such as {{{next(iter(known))!r}: ...}}"
        )
    found = [name for name in known if name in event]
    named = [name for name in found if not any(name in known[other] for other in found)]
    if len(named) != 1:
        raise UsageError(
            f"an event of {what} has the fields {shown([*event])}, expected one of {', '.join(known)}"
        )
    for field_name in event:
        if field_name != named[0] and field_name not in known[named[0]]:
            raise UsageError(
                f"an event {named[0]} of {what} has the unknown field {shown(field_name)}, expected "
                f"{', '.join((named[0], *known[named[0]]))}"
            )
    return named[0], dict(event)
