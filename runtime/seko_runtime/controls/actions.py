"""The control ``actions``: keys, mouse and sticks as the numbers of a world model, by the artifact's own bindings.

A key sets a bit or moves an axis. The model's inputs have a row of bits and a row of axes for each video frame, each
latent frame or each chunk, and may begin with rows of the past.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import flag, mapping_of, real_number, shown, whole_number
from seko_runtime.controls.base import (
    CHUNKS_BACK,
    INPUTS,
    Control,
    ControlOption,
    Event,
    one_of,
    parameters_of,
)
from seko_runtime.controls.key_text import (
    CODE,
    KEYS_OPTION,
    MAX_STEPS,
    held_keys,
    key_letters,
    key_steps,
)
from seko_runtime.controls.recording import read_json
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.format.records import OneOf, Within

BITS, AXES = (
    "bits",
    "axes",
)  # words of the two inputs, [rows, bits] and [rows, axes]; an artifact may lack one
VIDEO, LATENT, CHUNK = (
    "video",
    "latent",
    "chunk",
)  # what a row stands for, and how often live keys are looked at
_SPANS = (VIDEO, LATENT, CHUNK)
_DTYPES = ("uint8", "float32")
_MOST = 1 << 10  # rows, frames, codes


@dataclass(frozen=True)
class Binding:
    """What some keys do: they set a bit, or move an axis by a step.

    Parameters
    ----------
    name : str
        The binding's name, such as ``ahead``.
    codes : tuple of str
        The keys, by `KeyboardEvent.code`; the first one is shown.
    bit : str
        Name of the bit that is set; empty for a binding of an axis. A key may also set no bit and move no axis: the key
        for nothing of a game.
    axis : str
        Name of the axis that is moved.
    step : float
        The number that the axis has while a key is held.
    label : str
        Words for people; default: the name.
    pad : str
        The group of buttons among which the binding is drawn.
    face : str
        What is on the button; default: its first key.
    """

    name: str
    codes: tuple[str, ...]
    bit: str = ""
    axis: str = ""
    step: float = 0.0
    label: str = ""
    pad: str = "Move"
    face: str = ""


@dataclass(frozen=True)
class Axis:
    """An axis of the model, such as the mouse's yaw.

    Parameters
    ----------
    name : str
        The axis' name.
    limit : float
        Largest magnitude of the number that the model gets: that of a stick that is pushed to its end.
    """

    name: str
    limit: float


@dataclass(frozen=True)
class ActionParameters:
    """The parameters of actions in the manifest.

    Parameters
    ----------
    bindings : tuple of Binding
        What the keys do.
    chunk_frames, temporal_stride : int
        Number of latent frames in a chunk, and of video frames in a latent frame.
    fps : int
        Video frames per second, to which recordings are resampled.
    bits : tuple of str
        Names of the numbers of the input ``bits``, in order.
    axes : tuple of Axis
        The numbers of the input ``axes``, in order.
    rows : str
        What a row of the inputs stands for: a video frame, a latent frame, or the whole chunk.
    sampled : str
        How often a recording is looked at: at the beginning of each video frame, latent frame or chunk.
    history : int
        Number of rows before the chunk's own, with which the inputs begin. What a stream has before its first frame
        equals its first frame.
    exclusive : bool
        Whether exactly one bit is set in each row, the first one if no key says another; the newest key counts.
    opposites : tuple of pairs of str
        Names of two bindings of which a newly pressed one beats a held one. If both are new, or both are held, both
        count.
    gamepad : mapping of str to str
        What a gamepad of the standard layout does: ``button0`` and ``axis0-``, ``axis0+`` (the two halves of a stick's
        axis) press a key, by its code; ``axis0`` moves the axis with this name, or with ``-`` in front against it.
    mouse : mapping of str to str
        The axis that the mouse moves along ``x`` (right) and ``y`` (down); with ``-`` in front against it.
    mouse_pixels : int
        By how many pixels in a chunk the mouse moves an axis to its limit.
    """

    bindings: tuple[Binding, ...]
    chunk_frames: Annotated[int, Within(1, _MOST)]
    temporal_stride: Annotated[int, Within(1, _MOST)] = 4
    fps: Annotated[int, Within(1, _MOST)] = 16
    bits: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    rows: Annotated[str, OneOf(_SPANS)] = LATENT
    sampled: Annotated[str, OneOf(_SPANS)] = CHUNK
    history: Annotated[int, Within(0, _MOST)] = 0
    exclusive: bool = False
    opposites: tuple[tuple[str, ...], ...] = ()
    gamepad: Mapping[str, str] = field(default_factory=dict)
    mouse: Mapping[str, str] = field(default_factory=dict)
    mouse_pixels: Annotated[int, Within(1, 1 << 16)] = 200

    @property
    def own_rows(self) -> int:
        """Number of rows of a chunk, without the past."""
        return {VIDEO: self.chunk_frames * self.temporal_stride, LATENT: self.chunk_frames, CHUNK: 1}[
            self.rows
        ]

    def check(self) -> None:
        """Raise a UsageError if a name is not known, or occurs twice."""
        names = [binding.name for binding in self.bindings]
        codes = [code for binding in self.bindings for code in binding.codes]
        limits = {axis.name: axis.limit for axis in self.axes}
        for what, several in (("binding", names), ("key", codes), ("bit", self.bits), ("axis", [*limits])):
            for name in several:
                if several.count(name) > 1 or not name:
                    raise UsageError(f"{what} {name!r} occurs twice or has no name, expected different names")
        if len(limits) != len(self.axes):
            raise UsageError("two axes have one name, expected different names")
        for axis, limit in limits.items():
            if not 0 < limit < math.inf:
                raise UsageError(f"axis {axis!r} has the limit {limit}, expected a number above 0")
        for binding in self.bindings:
            if not binding.codes or not all(CODE.fullmatch(code) for code in binding.codes):
                raise UsageError(
                    f"binding {binding.name!r} has the keys {shown(binding.codes)}, expected codes"
                )
            if (binding.bit and binding.bit not in self.bits) or (binding.bit and binding.axis):
                raise UsageError(
                    f"binding {binding.name!r} sets {binding.bit!r}, expected one of {', '.join(self.bits) or 'none'}, "
                    "and no axis"
                )
            if binding.axis and not 0 < abs(binding.step) <= limits.get(binding.axis, 0):
                raise UsageError(
                    f"binding {binding.name!r} moves the axis {binding.axis!r} by {binding.step}, expected one of "
                    f"{', '.join(limits) or 'none'}, by at most its limit"
                )
        for pair in self.opposites:
            if len(pair) != 2 or not set(pair) <= set(names):
                raise UsageError(f"opposites {list(pair)}: expected the names of two bindings")
        for device, place, target in (
            *(("gamepad", *entry) for entry in self.gamepad.items()),
            *(("mouse", *entry) for entry in self.mouse.items()),
        ):
            if target.removeprefix("-") not in limits and (device == "mouse" or target not in codes):
                raise UsageError(f"{device} {place!r} means {target!r}, expected an axis or a key")
        if self.exclusive and not self.bits:
            raise UsageError("exclusive bits of a model without bits: expected bits")


@dataclass(frozen=True)
class _Step:
    """What counts in a frame: names of bindings, the newest last, and the numbers of axes beside those of keys."""

    names: tuple[str, ...] = ()
    axes: tuple[float, ...] = ()


class ActionsControl(Control):
    """Keys, mouse and sticks, by the bindings of the artifact.

    Live keys are looked at once a chunk: those that are held, and those that were pressed since the last chunk, so a
    tap counts for one whole chunk. A text of keys and a recording have their own value for each video frame; live keys
    follow when it has ended. Without any event nothing is held. `check` has the events.
    """

    kind = "actions"
    options: ClassVar = (
        KEYS_OPTION,
        ControlOption(
            "--actions",
            "FILE.json",
            'recorded actions: a list of the keys held in each video frame, such as [[], ["W"], ["W", "D"]], or '
            '{"fps": 12, "frames": [{"keys": {"W": true}}]}',
            INPUTS,
            file=True,
        ),
    )

    def __init__(self, spec: ControlSpec, inputs: Mapping[str, InputSpec]) -> None:
        super().__init__(spec, inputs)
        p = self.parameters = parameters_of(ActionParameters, spec)
        p.check()
        rows = p.history + p.own_rows
        widths = {BITS: len(p.bits), AXES: len(p.axes)}
        for word, taken in inputs.items():
            if word not in widths:
                raise UsageError(f"it fills an input as {word!r}, expected {BITS} or {AXES}")
            if taken.shape != (rows, widths[word]) or taken.dtype not in _DTYPES or taken.per != "chunk":
                raise UsageError(
                    f"its input {taken.name!r} is {taken.dtype} {list(taken.shape)} per {taken.per}, expected "
                    f"{' or '.join(_DTYPES)} {[rows, widths[word]]} per chunk"
                )
        if {word for word, width in widths.items() if width} != set(inputs):
            raise UsageError(
                f"it fills {', '.join(inputs) or 'no input'}, and has {widths}: expected inputs for these"
            )
        self._bindings = {binding.name: binding for binding in p.bindings}
        self._codes = {code: binding.name for binding in p.bindings for code in binding.codes}
        letters = key_letters(self._codes)
        self._letters = letters
        self._names = {
            **{name: name for name in self._bindings},
            **letters,
            **{letter.upper(): name for letter, name in letters.items()},
            **self._codes,
        }
        self._axes = [axis.name for axis in p.axes]
        self._active = False
        self._held: tuple[str, ...] = ()  # codes, in the order in which they were pressed
        self._pushed = [0.0] * len(self._axes)  # sticks, -1 to 1
        self._clear()

    def _clear(self) -> None:
        self._frame = 0  # latent frame with which the next chunk begins
        self._pressed: tuple[str, ...] = self._held  # codes pressed since the last chunk
        self._moved = [0.0] * len(self._axes)  # of the mouse since the last chunk, in limits
        self._steps: deque[_Step] = deque()
        self._past: NDArray[np.float64] | None = None  # [history, bits + axes]
        self._came: float | None = None  # when the last live event came that no chunk shows yet
        # of the last chunks: the frame with which each began, and the past that it had
        self._before: deque[tuple[int, NDArray[np.float64] | None]] = deque(maxlen=CHUNKS_BACK)

    @staticmethod
    def declared(
        bindings: Sequence[Binding], inputs: Mapping[str, str], *, name: str = "actions", **parameters: Any
    ) -> ControlSpec:
        """Return the manifest's entry of actions.

        Parameters
        ----------
        bindings : sequence of Binding
            What the keys do.
        inputs : mapping of str to str
            Names of the model's inputs by `BITS` and `AXES`: [history + rows of a chunk, bits or axes] uint8 or
            float32, per chunk.
        name : str
            The control's name.
        **parameters
            Fields of `ActionParameters`.
        """
        checked = ActionParameters(tuple(bindings), **parameters)
        checked.check()
        return ControlSpec("actions", name, dict(inputs), _json_of(asdict(checked)))

    # -- events ------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the events with their schemas, and what a page needs to draw: keys, axes, gamepad and mouse."""
        p = self.parameters
        names = {"type": "array", "items": {"type": "string", "maxLength": 32}, "maxItems": 32}
        numbers = {
            "type": "object",
            "properties": {axis: {"type": "number"} for axis in self._axes},
            "additionalProperties": False,
        }
        events: dict[str, Any] = {
            "held": {"held": names},
            "tap": {"tap": names},
            "keys": {"keys": {"type": "string"}},
            "recorded": {"recorded": {"type": ["array", "object"]}, "fps": {"type": "number"}},
        }
        if self._axes:
            events |= {"axes": {"axes": numbers}, "moved": {"moved": numbers}}
        return {
            "events": events,
            "keys": [_described(binding) for binding in p.bindings],
            "axes": [asdict(axis) for axis in p.axes],
            "gamepad": dict(p.gamepad),
            "mouse": {**p.mouse, "pixels": p.mouse_pixels} if p.mouse else {},
            "opposites": [list(pair) for pair in p.opposites],
            "exclusive": p.exclusive,
            "limits": {"steps": MAX_STEPS},
        }

    def check(self, event: Event) -> Event:
        """Return an event with checked values.

        Parameters
        ----------
        event : mapping
            One of the following. Keys are named by `KeyboardEvent.code`, letter or the binding's name.

            ``held``: the keys that are held from now on, the newest last; keys that do nothing are ignored. ``tap``:
            keys that were pressed and released. ``keys``: a text of steps, one for each video frame, such as
            ``w-10,wd-15,none-5``.

            ``axes``: where sticks stand from now on, by the axis' name, -1 to 1; axes that are left out stay.
            ``moved``: by how much the mouse has moved, in limits of the axis; it counts once, in the next chunk.

            ``recorded``: a list with the keys of each frame, ``["W", "D"]`` or ``{"keys": {"W": true}, "axes":
            {"yaw": 0.5}}``, or an object with such ``frames`` and ``fps``. ``fps`` beside it is the recording's rate;
            default: the video's.
        """
        known = {"held": (), "tap": (), "keys": (), "axes": (), "moved": (), "recorded": ("fps",)}
        which, values = one_of(event, known, "actions")
        if which in ("held", "tap"):
            values[which] = self._known_codes(values[which])
        elif which == "keys":
            self._of_text(values["keys"])
        elif which in ("axes", "moved"):
            values[which] = self._numbers(values[which], which)
        else:
            self._recorded(values)
        return values

    def _apply(self, event: Event) -> None:
        if "held" in event:
            now = event["held"]
            new = [code for code in now if code not in self._held]
            self._held = (*(code for code in self._held if code in now), *new)
            self._press(new)
        elif "tap" in event:
            self._press(event["tap"])
        elif "axes" in event:
            for axis, value in event["axes"].items():
                self._pushed[self._axes.index(axis)] = value
        elif "moved" in event:
            for axis, value in event["moved"].items():
                place = self._axes.index(axis)
                self._moved[place] = _within(self._moved[place] + value)
        else:
            steps = self._of_text(event["keys"]) if "keys" in event else self._recorded(event)
            if len(self._steps) + len(steps) > MAX_STEPS:
                raise UsageError(f"actions for more than {MAX_STEPS} video frames: give fewer")
            self._steps.extend(steps)
        self._active = True
        self._came = time.monotonic()

    def _press(self, codes: Collection[str]) -> None:
        self._pressed = (*(code for code in self._pressed if code not in codes), *dict.fromkeys(codes))

    def _known_codes(self, keys: object) -> list[str]:
        """Return the codes of keys that do something; other keys of a keyboard do nothing."""
        found = (
            key if key in self._codes else self._bindings[self._names[key]].codes[0]
            for key in held_keys(keys, self._names, letters=False)
        )
        return list(dict.fromkeys(found))

    def _numbers(self, values: object, what: str) -> dict[str, float]:
        by_axis = mapping_of(values, what)
        for axis in by_axis:
            if axis not in self._axes:
                raise UsageError(
                    f"{what} has {shown(axis)}, expected one of {', '.join(self._axes) or 'no axis'}"
                )
        each = {axis: real_number(value, f"{what} {axis!r}") for axis, value in by_axis.items()}
        if what == "axes" and any(abs(value) > 1 for value in each.values()):
            raise UsageError(f"axes are {shown(each)}, expected numbers from -1 to 1")
        return {axis: _within(value) for axis, value in each.items()}

    def _of_text(self, text: object) -> list[_Step]:
        nothing = (0.0,) * len(self._axes)
        steps = [_Step(self._in_order(held), nothing) for held in key_steps(text, self._letters)]
        self._check_exclusive(steps)
        return steps

    def _in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        wanted = set(names)
        return tuple(name for name in self._bindings if name in wanted)

    def _check_exclusive(self, steps: Sequence[_Step]) -> None:
        for place, step in enumerate(steps):
            bits = [name for name in step.names if self._bindings[name].bit]
            if self.parameters.exclusive and len(bits) > 1:
                raise UsageError(
                    f"frame {place} has {' and '.join(bits)}, this model takes one action at a time: give one"
                )

    def _recorded(self, event: Event) -> list[_Step]:
        """Return a recording's values, one for each video frame."""
        frames, rate = event["recorded"], event.get("fps")
        if isinstance(frames, Mapping):
            rate = frames.get("fps") if rate is None else rate
            frames = frames.get("frames")
        if not isinstance(frames, list | tuple) or not frames:
            raise UsageError(
                f"recorded is {shown(event['recorded'])}, expected a list of frames, or an object with it"
            )
        own = self.parameters.fps
        rate = own if rate is None else real_number(rate, "fps", "a positive number")
        if not 0 < rate <= _MOST:
            raise UsageError(f"fps is {rate}, expected a number above 0, at most {_MOST}")
        length = len(frames) * own / rate - 1e-9  # infinite for a rate of almost 0
        if length > MAX_STEPS:
            raise UsageError(
                f"recorded actions for {length:.0f} video frames, at most {MAX_STEPS}: give fewer"
            )
        count = math.ceil(length)
        steps = [self._recorded_frame(frame, place) for place, frame in enumerate(frames)]
        self._check_exclusive(steps)
        return [steps[min(len(steps) - 1, int(at * rate / own + 1e-9))] for at in range(count)]

    def _recorded_frame(self, frame: object, place: int) -> _Step:
        axes: Mapping[str, float] = {}
        keys: object = frame
        if isinstance(frame, Mapping):
            if frame and "keys" not in frame and "axes" not in frame:
                raise UsageError(
                    f"recorded frame {place} has the fields {shown([*frame])}, expected keys or axes"
                )
            keys = frame.get("keys", ())
            axes = self._numbers(frame.get("axes"), "axes")
        if isinstance(keys, Mapping):
            keys = [
                key for key, held in keys.items() if flag(held, f"recorded frame {place}, key {shown(key)}")
            ]
        names = self._in_order(self._codes[code] for code in self._known_codes(keys))
        return _Step(names, tuple(axes.get(axis, 0.0) for axis in self._axes))

    # -- chunks ------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the control has taken an event."""
        return self._active

    @property
    def chunks(self) -> int | None:
        """Number of chunks for which a text of keys or a recording lasts."""
        if not self._steps:
            return None
        left, p = len(self._steps), self.parameters
        later = p.chunk_frames * p.temporal_stride
        return 1 + -(-max(0, left - self._video_frames) // later)

    def next_chunk(self) -> Mapping[str, NDArray[Any]]:
        """Return the inputs of the next chunk by name: the rows of the past, then the chunk's own."""
        rows = self._rows()
        past = np.tile(rows[:1], (self.parameters.history, 1)) if self._past is None else self._past
        both, count = np.concatenate((past, rows)), len(self.parameters.bits)
        parts = {BITS: both[:, :count], AXES: both[:, count:]}
        return {taken.name: parts[word].astype(taken.dtype) for word, taken in self.inputs.items()}

    def advance(self) -> None:
        """Move on by a chunk: its rows become the past, and taps have counted."""
        rows, history = self._rows(), self.parameters.history
        past = np.tile(rows[:1], (history, 1)) if self._past is None else self._past
        self._before.append((self._frame, self._past))
        self._past = np.concatenate((past, rows))[len(rows) :] if history else past
        for _ in range(min(self._video_frames, len(self._steps))):
            self._steps.popleft()
        self._frame += self.parameters.chunk_frames
        self._pressed, self._moved, self._came = (), [0.0] * len(self._axes), None

    def go_to(self, frame: int) -> None:
        """Go on with a chunk that begins at this latent frame. After a step back the chunk has the past that it had; a
        stream that begins behind its beginning, for which no state was loaded, has its first row for a past."""
        while self._before and self._frame > frame:
            self._frame, self._past = self._before.pop()
        if self._frame > frame:
            self._past = None
        self._frame = frame

    def heard_at(self) -> float | None:
        """Return the time, by `time.monotonic`, of the last event that the next chunk is the first to show."""
        return self._came

    @property
    def _missing(self) -> int:
        """Number of video frames that the next chunk's first latent frame lacks: a stream's first one has one."""
        return 0 if self._frame else self.parameters.temporal_stride - 1

    @property
    def _video_frames(self) -> int:
        """Number of video frames of the next chunk."""
        return self.parameters.chunk_frames * self.parameters.temporal_stride - self._missing

    def _starts(self, span: str) -> list[int]:
        """Return the first video frame, within the chunk, of each video frame, latent frame or chunk in it. A stream's
        first latent frame has one video frame, which stands for as many rows as another's."""
        p = self.parameters
        width = {VIDEO: 1, LATENT: p.temporal_stride, CHUNK: p.chunk_frames * p.temporal_stride}[span]
        whole = range(0, p.chunk_frames * p.temporal_stride, width)
        return [max(0, start - self._missing) for start in whole]

    def _rows(self) -> NDArray[np.float64]:
        """Return the chunk's own rows [rows, bits + axes]."""
        p, live = self.parameters, self._live()
        looked = self._starts(p.sampled)
        recorded = list(islice(self._steps, self._video_frames))
        at = [max(start for start in looked if start <= first) for first in self._starts(p.rows)]
        return np.stack([self._values(recorded[one] if one < len(recorded) else live) for one in at])

    def _live(self) -> _Step:
        """Return what keys, sticks and mouse say: the held keys, and those pressed since the last chunk."""
        order = [code for code in self._held if code not in self._pressed] + [*self._pressed]
        names = dict.fromkeys(self._codes[code] for code in order)
        new = {self._codes[code] for code in self._pressed}
        for one, other in self.parameters.opposites:
            if one in names and other in names and (one in new) != (other in new):
                names.pop(other if one in new else one)
        axes = (_within(push + move) for push, move in zip(self._pushed, self._moved, strict=True))
        return _Step(tuple(names), tuple(axes))

    def _values(self, step: _Step) -> NDArray[np.float64]:
        """Return the numbers [bits + axes] of what is held."""
        p, bound = self.parameters, [self._bindings[name] for name in step.names]
        values = np.zeros(len(p.bits) + len(p.axes))
        set_bits = [p.bits.index(binding.bit) for binding in bound if binding.bit]
        if p.exclusive:
            set_bits = set_bits[-1:] or [0]
        values[set_bits] = 1
        for place, axis in enumerate(p.axes):
            steps = sum(binding.step for binding in bound if binding.axis == axis.name)
            values[len(p.bits) + place] = np.clip(
                steps + axis.limit * step.axes[place], -axis.limit, axis.limit
            )
        return values

    def reset(self) -> None:
        """Return to the beginning of a stream: drop steps and the past; held keys stay held."""
        self._clear()

    def state(self) -> dict[str, Any]:
        """Return the state as a JSON value, for `load`."""
        return {
            "held": list(self._held),
            "pressed": list(self._pressed),
            "pushed": list(self._pushed),
            "moved": list(self._moved),
            "steps": [[list(step.names), list(step.axes)] for step in self._steps],
            "frame": self._frame,
            "past": _listed(self._past),
            "before": [[frame, _listed(past)] for frame, past in self._before],
            "active": self._active,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned; UsageError if the value is no state of these actions."""
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"a {type(state).__name__}")
            held, pressed = (self._loaded(state[name], self._codes) for name in ("held", "pressed"))
            pushed, moved = (self._loaded_axes(state[name]) for name in ("pushed", "moved"))
            steps = deque(
                _Step(self._loaded(names, self._bindings), tuple(self._loaded_axes(axes)))
                for names, axes in islice(state["steps"], MAX_STEPS)
            )
            past, frame = self._loaded_past(state["past"]), whole_number(state["frame"], "frame", 0)
            before = [
                (whole_number(first, "frame", 0), self._loaded_past(rows)) for first, rows in state["before"]
            ]
            active = flag(state["active"], "active")
        except (KeyError, TypeError, ValueError, OverflowError, UsageError) as fault:
            raise UsageError(f"this is no state of actions: {fault}; take what state() gave") from None
        self._held, self._pressed, self._pushed, self._moved = held, pressed, pushed, moved
        self._steps, self._past, self._frame, self._active = steps, past, frame, active
        self._before, self._came = deque(before, CHUNKS_BACK), None

    def _loaded(self, names: object, known: Collection[str]) -> tuple[str, ...]:
        if not isinstance(names, list | tuple) or not all(
            isinstance(name, str) and name in known for name in names
        ):
            raise ValueError(f"{shown(names)} are none of {', '.join(known)}")
        return tuple(dict.fromkeys(names))

    def _loaded_past(self, rows: object) -> NDArray[np.float64] | None:
        if rows is None:
            return None
        p = self.parameters
        past = np.array(rows, np.float64).reshape(p.history, len(p.bits) + len(p.axes))
        if not np.isfinite(past).all():
            raise ValueError("past holds a number that is not finite")
        return past

    def _loaded_axes(self, values: object) -> list[float]:
        if not isinstance(values, list | tuple) or len(values) != len(self._axes):
            raise ValueError(f"{shown(values)} are no numbers of {len(self._axes)} axes")
        return [_within(real_number(value, "an axis")) for value in values]

    @classmethod
    def events_of(cls, given: Mapping[str, Any]) -> list[Event]:
        """Return the events of ``--keys`` and ``--actions``."""
        keys, file = given.get("--keys"), given.get("--actions")
        if keys is not None and file is not None:
            raise UsageError("--keys and --actions both say what is pressed; give one")
        if file is None:
            return [{"keys": keys}]
        return [{"recorded": read_json(file, "--actions")}]


def _listed(past: NDArray[np.float64] | None) -> list[list[float]] | None:
    return None if past is None else past.tolist()


def _described(binding: Binding) -> dict[str, Any]:
    face = binding.face or binding.codes[0].removeprefix("Key")
    label = binding.label or f"{binding.pad} {binding.name}"
    moves = {"axis": binding.axis, "step": binding.step} if binding.axis else {"bit": binding.bit}
    return {
        "name": binding.name,
        "pad": binding.pad,
        "face": face,
        "label": label,
        "codes": [*binding.codes],
        **moves,
    }


def _json_of(value: Any) -> Any:
    """Return a value with lists in place of tuples, as JSON gives it back."""
    if isinstance(value, Mapping):
        return {name: _json_of(item) for name, item in value.items()}
    return [_json_of(item) for item in value] if isinstance(value, list | tuple) else value


def _within(value: float) -> float:
    return min(1.0, max(-1.0, value))
