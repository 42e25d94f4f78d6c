"""The options of `run` that feed an artifact's controls: those of the kinds themselves, and ``--control NAME=FILE``."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from seko_runtime.cli.output import note
from seko_runtime.controls import Controls, Event, controls_of
from seko_runtime.controls.base import ControlOption
from seko_runtime.controls.recording import Entry, read_events
from seko_runtime.controls.registry import control_class, control_classes
from seko_runtime.errors import UsageError, one_line
from seko_runtime.video.manifest import VideoManifest

DEFAULT_CHUNKS = 4


def control_options() -> Iterator[ControlOption]:
    """Yield the options of all kinds of controls; kinds may share an option, such as ``--keys``."""
    options = (option for kind in control_classes().values() for option in kind.options)
    yield from {option.name: option for option in options}.values()


def attribute(option: ControlOption) -> str:
    """Return the name of an option's value in a parsed command line."""
    return option.name.removeprefix("--").replace("-", "_")


def read_controls(options: argparse.Namespace) -> tuple[dict[str, list[Event]], dict[str, list[Event]]]:
    """Return the events that options say, by kind of control, and those of ``--control``, by name of the control.

    Raises
    ------
    UsageError
        If options contradict each other, or a file cannot be read.
    """
    by_kind = {}
    for kind, own in control_classes().items():
        values = {option.name: getattr(options, attribute(option), None) for option in own.options}
        given = {name: value for name, value in values.items() if value is not None}
        if given:
            by_kind[kind] = own.events_of(given)
    by_name: dict[str, list[Event]] = {}
    for argument in getattr(options, "control", None) or ():
        name, equals, file = argument.partition("=")
        if not (name and equals and file):
            raise UsageError(f"--control {argument[:200]!r}: expected NAME=FILE.json")
        by_name.setdefault(name, []).extend(read_events(Path(file), "--control"))
    return by_kind, by_name


def fed_controls(
    options: argparse.Namespace,
    manifest: VideoManifest,
    events: tuple[dict[str, list[Event]], dict[str, list[Event]]],
    files: Collection[str],
    entries: Sequence[Entry] = (),
) -> list[Controls]:
    """Return the controls of each of a run's sessions, which have taken the events of its options. Without ``--chunks``
    the function sets ``options.chunks`` to the number of chunks for which the events last; if they have no end, to 4.
    The controls go on from the beginning of the recording that ``entries`` are, if there are any. A recording is
    replayed by one session, unless each call of the artifact carries several.

    Raises
    ------
    UsageError
        If the artifact has no such control, an event is invalid, or ``files``, the inputs of ``--input``, has an input
        of a control with events.
    """
    by_kind, by_name = events
    rows = 1 if entries and manifest.pool is not None else manifest.call_rows
    each = [controls_of(manifest) for _ in range(rows)]
    replays = bool(entries) and entries[0].has_controls
    for controls in each:
        if replays:
            controls.load(entries[0].event["controls"])
        taken = {name for kind in by_kind if controls.of_kind(kind) for name in _given(kind, options)}
        for kind, own in by_kind.items():
            found = controls.of_kind(kind)
            untaken = [name for name in _given(kind, options) if name not in taken]
            if untaken:
                kinds = [other for other in by_kind if untaken[0] in _given(other, options)]
                lacking = control_class(kind).lacking(manifest.caller_inputs)
                raise UsageError(f"{untaken[0]}: {lacking.replace(kind, ' or '.join(kinds), 1)}")
            if not found:  # another kind has taken the same options
                continue
            option = _given(kind, options)[0]
            for event in own:
                try:
                    found[0].take(event)
                except UsageError as error:
                    told = str(error)
                    raise UsageError(told if told.startswith("--") else f"{option}: {told}") from None
        for name, own in by_name.items():
            for event in own:
                controls[name].take(event)
    controls = each[0]
    for control in controls.values():
        if control.active and (both := sorted(control.input_names & set(files))):
            option = _options_of(control.kind, options) or f"--control {control.name}"
            raise UsageError(f"--input {both[0]} contradicts {option}; give one")
        lacks = [
            spec.name
            for spec in control.inputs.values()
            if spec.default == "required" and spec.name not in files
        ]
        if lacks and not (replays or control.active or control.fits_recording):
            raise UsageError(
                f"this artifact's model needs a {control.kind}: give {control.options[0].name} "
                f"{control.options[0].metavar}, or --input {lacks[0]}=FILE.npy"
            )
    lasting = [control.chunks for control in controls.values() if control.chunks is not None]
    options.chunks = options.chunks or max(lasting, default=DEFAULT_CHUNKS)
    if not replays:  # to which more events come
        for control in (control for own_controls in each for control in own_controls.values()):
            control.check_lasts(options.chunks)
    for called, done in (line for control in controls.values() for line in control.notes):
        option, _, path = called.partition(" ")
        note(one_line(f"{option.removeprefix('--'):8} {Path(path).name} {done}"))
    return each


def _options_of(kind: str, options: argparse.Namespace) -> str:
    return next(iter(_given(kind, options)), "")


def _given(kind: str, options: argparse.Namespace) -> list[str]:
    """Return the names of the options of a kind that a command line has."""
    own = control_class(kind).options
    return [option.name for option in own if getattr(options, attribute(option), None) is not None]
