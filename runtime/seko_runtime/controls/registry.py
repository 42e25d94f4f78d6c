"""The kinds of controls, and the controls of one session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from seko_runtime.arguments import mapping_of, shown
from seko_runtime.controls.base import Control
from seko_runtime.controls.recording import Recording
from seko_runtime.doors import Door
from seko_runtime.errors import EnvironmentLacksError, ManifestError, UsageError
from seko_runtime.format.manifest import ControlSpec, Manifest

# The kinds of controls: classes derived from Control.
KINDS: Door[type] = Door(
    "seko.controls",
    "kind of control",
    type,
    {
        "actions": "seko_runtime.controls.actions:ActionsControl",
        "camera": "seko_runtime.controls.camera:CameraControl",
        "pictures": "seko_runtime.controls.pictures:PicturesControl",
        "voice": "seko_runtime.controls.voice:VoiceControl",
        "speaker_masks": "seko_runtime.controls.masks:MasksControl",
        "video_in": "seko_runtime.controls.video_in:VideoInControl",
    },
    error=EnvironmentLacksError,
)


def control_class(kind: str) -> type[Control]:
    """Return the class of a kind of control.

    Raises
    ------
    EnvironmentLacksError
        If no installed distribution has the kind, or the one that has it cannot be loaded.
    """
    found = KINDS.find(kind)
    if not issubclass(found, Control) or found.kind != kind:
        raise EnvironmentLacksError(
            f"the entry point {kind!r} of {KINDS.group!r} is {shown(found)}, expected a class of this kind that is "
            "derived from Control"
        )
    return found


def control_classes() -> dict[str, type[Control]]:
    """Return the classes of all kinds of controls by kind; one of another distribution that cannot be loaded is left
    out with a `BrokenPluginWarning`."""
    return {kind: found for kind, found in KINDS.every() if issubclass(found, Control)}


def control_of(spec: ControlSpec, manifest: Manifest) -> Control:
    """Return a control of an artifact; ManifestError if its entry in the manifest does not fit its kind."""
    inputs = {input_spec.name: input_spec for input_spec in manifest.caller_inputs}
    for word, name in spec.inputs.items():
        if name not in inputs:
            raise ManifestError(
                f"the control {spec.name!r} fills the input {name!r} ({word}), which the artifact does not have; "
                "rebuild the artifact"
            )
    try:
        return control_class(spec.kind)(spec, {word: inputs[name] for word, name in spec.inputs.items()})
    except (UsageError, KeyError) as fault:
        raise ManifestError(
            f"the control {spec.name!r} of the kind {spec.kind!r} cannot be made: {fault}; rebuild the artifact"
        ) from None


class Controls(Mapping[str, Control]):
    """The controls of one session, by name.

    Parameters
    ----------
    controls : mapping of str to Control
        The controls.
    absent : mapping of str to str
        Kinds of the controls whose kind no installed distribution has, by name. Asking for one of them is an error; the
        caller may give its inputs as arrays.
    """

    def __init__(self, controls: Mapping[str, Control], absent: Mapping[str, str] = {}) -> None:
        self._controls, self._absent = dict(controls), dict(absent)
        self._lock: Callable[[], AbstractContextManager[object]] = nullcontext  # of the owner

    def __getitem__(self, name: str) -> Control:
        if isinstance(name, str) and name in self._absent:
            control_class(self._absent[name])
        if not isinstance(name, str) or name not in self._controls:
            known = ", ".join(map(repr, (*self._controls, *self._absent))) or "none"
            raise UsageError(f"this artifact has no control {shown(name)}; its controls: {known}")
        return self._controls[name]

    def __contains__(self, name: object) -> bool:
        return name in self._controls

    def __iter__(self) -> Iterator[str]:
        return iter(self._controls)

    def __len__(self) -> int:
        return len(self._controls)

    def of_kind(self, kind: str) -> list[Control]:
        """Return the controls of a kind."""
        return [control for control in self._controls.values() if control.spec.kind == kind]

    def taking(self, event: str) -> Control | None:
        """Return the first control that takes an event of this name; None if no control does."""
        return next(
            (control for control in self._controls.values() if event in control.describe()["events"]), None
        )

    def owned(self, lock: Callable[[], AbstractContextManager[object]]) -> None:
        """Give the controls an owner, whose lock is held while an event is taken, or a state read or set."""
        self._lock = lock
        for control in self._controls.values():
            control.lock = lock

    def recorded(self, recording: Recording) -> None:
        """Record each event from now on, and those before of which the controls' state has nothing."""
        for control in self._controls.values():
            control.heard = recording.heard
            for event in control.beside_state():
                control.record(event)

    def describe(self) -> dict[str, Any]:
        """Return what `Control.describe` says of each control, with its kind, by name."""
        return {name: {"kind": control.spec.kind, **control.describe()} for name, control in self.items()}

    def opening(self) -> dict[str, Any]:
        """Return the arguments of `open_session` that follow from the events so far; inputs of several controls are
        joined."""
        arguments: dict[str, Any] = {}
        inputs: dict[str, Any] = {}
        for control in self._controls.values():
            own = control.opening()
            inputs |= own.pop("inputs", {})
            arguments |= own
        return arguments | ({"inputs": inputs} if inputs else {})

    def inputs(self, given: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the inputs of the next chunk: what the caller gives, and what the controls give.

        Raises
        ------
        UsageError
            If the caller gives an input of a control that has taken events, or a control lacks an event.
        """
        by_name = mapping_of(given, "inputs")
        made: dict[str, Any] = {}
        for control in self._controls.values():
            both = sorted(control.input_names & set(by_name))
            if both and control.active:
                raise UsageError(
                    f"found the input {both[0]!r} and events of the control {control.name!r}, which makes the same "
                    "input; give one of them"
                )
            if not both:
                made.update(control.next_chunk())
        return {**by_name, **made} if made else given

    def ready(self) -> bool:
        """Return whether the next chunk has all that it needs of the controls."""
        return all(control.ready() for control in self._controls.values())

    def advance(self) -> None:
        """Move on by a chunk."""
        for control in self._controls.values():
            control.advance()

    def go_to(self, frame: int) -> None:
        """Go on with a chunk that begins at this latent frame."""
        for control in self._controls.values():
            control.go_to(frame)

    def heard_at(self) -> float | None:
        """Return the time of the last event on which the next chunk depends; None if no control knows it."""
        times = [control.heard_at() for control in self._controls.values()]
        return max((time for time in times if time is not None), default=None)

    def sounding(self) -> Control | None:
        """Return the control whose sound is played with the chunks; None without sound."""
        return next((control for control in self._controls.values() if control.sound_rate), None)

    def reset(self) -> None:
        """Return all controls to the beginning of a stream."""
        for control in self._controls.values():
            control.reset()

    def state(self) -> dict[str, Any]:
        """Return the state of all controls, with arrays; `recording.as_json` makes JSON of it. Other threads may give
        events meanwhile.

        Raises
        ------
        SessionClosedError
            If the pool of the controls' session is closed.
        """
        with self._lock():
            return {name: control.state() for name, control in self._controls.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a value that `state` returned; UsageError for any other value."""
        if not isinstance(state, Mapping) or set(state) != set(self._controls):
            raise UsageError(
                f"this is no state of the controls {', '.join(self._controls) or 'of an artifact without any'}; take "
                "what state() gave"
            )
        with self._lock():
            for name, control in self._controls.items():
                control.load(state[name])


def controls_of(manifest: Manifest) -> Controls:
    """Return new controls for a session of an artifact.

    Raises
    ------
    ManifestError
        If an entry of the manifest's ``controls`` does not fit its kind.
    EnvironmentLacksError
        If the distribution that has a control's kind cannot be loaded.
    """
    controls, absent = {}, {}
    for spec in manifest.control_specs:
        if spec.kind in KINDS.names():
            controls[spec.name] = control_of(spec, manifest)
        else:
            absent[spec.name] = spec.kind
    return Controls(controls, absent)


def unsteered(manifest: Manifest) -> dict[str, str]:
    """Return the inputs of controls whose kind is not installed here, by name, each with that kind."""
    return {
        name: spec.kind
        for spec in manifest.control_specs
        if spec.kind not in KINDS.names()
        for name in spec.inputs.values()
    }


def checked_controls(controls: object) -> Controls:
    """Return the controls of a session; UsageError for anything else."""
    if isinstance(controls, Controls):
        return controls
    raise UsageError(f"controls is {shown(controls)}, expected what controls_of(manifest) returns")
