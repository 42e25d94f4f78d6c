"""The control ``camera``: a camera that a person steers with keys, or that follows poses or a recorded path."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import islice
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from seko_runtime.arguments import LARGEST, flag, mapping_of, shown, whole_number
from seko_runtime.controls.base import (
    CHUNKS_BACK,
    INPUTS,
    Control,
    ControlOption,
    Event,
    one_of,
    parameters_of,
)
from seko_runtime.controls.camera_steps import STEPS, Flight, KeySettings, Stand, finite_numbers
from seko_runtime.controls.key_text import KEYS_OPTION, MAX_STEPS, held_keys, key_letters, key_steps
from seko_runtime.controls.poses import (
    VIDEO_PER_LATENT,
    Array,
    checked_poses,
    checked_unit,
    framewise,
    magnitudes_checked,
    recorded_intrinsics,
)
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import ControlSpec, InputSpec
from seko_runtime.format.records import Within
from seko_runtime.media_files.arrays import load_array

# Words of the two inputs, float32: poses [F, 3, 4] and intrinsics [F, 4].
POSES, INTRINSICS = "poses", "intrinsics"
# The usual keys of a camera, which a family may replace; they are those of lingbot-world's authors, and the arrows.
KEYS: Mapping[str, str] = {
    "KeyW": "ahead",
    "KeyA": "left",
    "KeyS": "back",
    "KeyD": "right",
    "KeyI": "look_up",
    "KeyJ": "look_left",
    "KeyK": "look_down",
    "KeyL": "look_right",
    "ArrowUp": "look_up",
    "ArrowLeft": "look_left",
    "ArrowDown": "look_down",
    "ArrowRight": "look_right",
}
MAX_SIDE = 1 << 16  # pixels
MAX_POSES = 256  # latent frames of one event
MAX_POSES_AHEAD = 4_096  # latent frames that wait
_USUAL_FOCAL_LENGTH = 500.0  # in pixels, for every picture size
_REST = np.eye(4)[:3]


@dataclass(frozen=True)
class CameraParameters:
    """The parameters of a camera in the manifest.

    Parameters
    ----------
    height, width : int
        The video's size in pixels.
    keys : mapping of str to str
        The direction of each key, by `KeyboardEvent.code`.
    settings : KeySettings
        How keys move the camera.
    world : bool
        Whether the model takes poses from the camera to the world, which is the stream's first camera, rather than to
        the camera of the frame before.
    free : bool
        Whether the camera flies: keys turn and move it along its own axes, rather than over the ground.
    focal : tuple of float
        The usual focal lengths x and y in pixels of the video; default: 500 for every size.
    """

    height: Annotated[int, Within(1, MAX_SIDE)]
    width: Annotated[int, Within(1, MAX_SIDE)]
    keys: Mapping[str, str]
    settings: KeySettings = field(default_factory=KeySettings)
    world: bool = False
    free: bool = False
    focal: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.focal) not in (0, 2) or not all(0 < length <= LARGEST for length in self.focal):
            raise UsageError(f"focal is {[*self.focal]}, expected two positive lengths")


class CameraControl(Control):
    """A camera, whose poses each chunk takes: those that were sent in advance; where none is left, those to which the
    held keys move it. A key that is pressed and released between two chunks counts for one latent frame.

    The first latent frame of a stream shows the camera's start. Before each later latent frame the camera makes
    `KeySettings.steps_per_frame` steps. `events` has what it takes.
    """

    kind = "camera"
    options: ClassVar = (
        KEYS_OPTION,
        ControlOption(
            "--poses",
            "FILE.npy",
            "a recorded camera: [N, 4, 4], camera to world, x right, y down, z forward",
            INPUTS,
            file=True,
        ),
        ControlOption(
            "--intrinsics",
            "FILE.npy",
            "focal lengths x, y and centre x, y, [4] or [N, 4], in pixels of a picture of 480x832",
            INPUTS,
            file=True,
        ),
    )

    def __init__(self, spec: ControlSpec, inputs: Mapping[str, InputSpec]) -> None:
        super().__init__(spec, inputs)
        p = parameters_of(CameraParameters, spec)
        for code, direction in p.keys.items():
            if direction not in STEPS:
                raise UsageError(f"key {code!r} means {direction!r}, expected one of {', '.join(STEPS)}")
        self._chunk_frames = inputs[POSES].shape[0] if inputs[POSES].shape else 0
        for word, row in ((POSES, (3, 4)), (INTRINSICS, (4,))):
            if inputs[word].shape != (self._chunk_frames, *row) or inputs[word].dtype != "float32":
                raise UsageError(
                    f"its input {inputs[word].name!r} is {inputs[word].dtype} {list(inputs[word].shape)}, expected "
                    f"float32 {[self._chunk_frames or 'F', *row]}"
                )
        self._size, self._codes, self.settings = (p.height, p.width), dict(p.keys), p.settings
        self._names = self._codes | key_letters(self._codes)
        self._world = p.world
        self._rest: Stand | Flight = Flight() if p.free else Stand()
        self._intrinsics = np.array([*(p.focal or (_USUAL_FOCAL_LENGTH,) * 2), p.width / 2, p.height / 2])
        self._active = False
        self._held: frozenset[str] = frozenset()  # directions
        self._clear()

    def _clear(self) -> None:
        self._frame = 0  # latent frame with which the next chunk begins
        self._stand = self._rest
        self._shown = np.eye(4)  # pose to the world of the last latent frame, in the model's unit
        self._taps = self._held
        self._steps: deque[frozenset[str]] = deque()  # directions held in steps that are still to come
        self._poses: deque[tuple[Array, Array | None]] = deque()  # relative pose [3, 4], intrinsics [4]
        self._pose_before: Array | None = None  # [4, 4], the last that was sent
        self._path_ends = False  # whether the poses are a path beyond which there is nothing
        # of the last chunks: the frame with which each began, where the camera stood before, and what it had shown
        self._before: deque[tuple[int, Stand | Flight, Array]] = deque(maxlen=CHUNKS_BACK)

    @staticmethod
    def declared(
        height: int,
        width: int,
        poses: str,
        intrinsics: str,
        keys: Mapping[str, str] = KEYS,
        *,
        world: bool = False,
        free: bool = False,
        focal: tuple[float, ...] = (),
        **settings: Any,
    ) -> ControlSpec:
        """Return the manifest's entry of a camera.

        Parameters
        ----------
        height, width : int
            The video's size in pixels.
        poses, intrinsics : str
            Names of the model's inputs [F, 3, 4] and [F, 4].
        keys : mapping of str to str
            The direction of each key, by `KeyboardEvent.code`.
        world, free, focal
            Fields of `CameraParameters`.
        **settings
            Fields of `KeySettings`.
        """
        how = asdict(KeySettings(**settings))
        height, width = whole_number(height, "height", 1, MAX_SIDE), whole_number(width, "width", 1, MAX_SIDE)
        parameters = {"height": height, "width": width, "keys": dict(keys), "settings": how}
        own = {"world": world, "free": free, "focal": [*focal]}
        parameters |= {name: value for name, value in own.items() if value}
        return ControlSpec("camera", "camera", {POSES: poses, INTRINSICS: intrinsics}, parameters)

    @classmethod
    def without_artifact(cls, height: int, width: int, chunk_frames: int, **settings: Any) -> CameraControl:
        """Return a camera with the usual keys, whose inputs are called ``camera`` and ``intrinsics``, for chunks of so
        many latent frames; the other parameters are those of `declared`."""
        spec = cls.declared(height, width, "camera", "intrinsics", **settings)
        chunk_frames = whole_number(chunk_frames, "chunk_frames", 1, MAX_POSES_AHEAD)
        shapes = {POSES: (chunk_frames, 3, 4), INTRINSICS: (chunk_frames, 4)}
        inputs = {
            word: InputSpec(name, shapes[word], "float32", name, "chunk")
            for word, name in spec.inputs.items()
        }
        return cls(spec, inputs)

    @property
    def pose(self) -> Array:
        """The pose [4, 4], camera to world, to which the keys have moved the camera."""
        return self._stand.pose

    # -- events ------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the events with their schemas, the keys with what they do, and the settings."""
        numbers = {"type": "array", "items": {"type": "number"}}
        four, matrix = numbers | {"minItems": 4, "maxItems": 4}, numbers | {"minItems": 16, "maxItems": 16}
        names = {"type": "array", "items": {"type": "string", "maxLength": 32}, "maxItems": 32}
        return {
            "events": {
                "held": {"held": names},
                "keys": {"keys": {"type": "string"}},
                "poses": {
                    "poses": {"type": "array", "items": matrix, "maxItems": MAX_POSES},
                    "intrinsics": four,
                },
                "path": {
                    "path": {"type": "array", "items": matrix},
                    "intrinsics": numbers,
                    "unit": {"type": "number"},
                    "own_intrinsics": {"type": "boolean"},
                },
                "intrinsics": {"intrinsics": four},
                "settings": {"settings": {"type": "object"}},
            },
            "keys": _described_keys(self._codes),
            "settings": asdict(self.settings),
            "limits": {"poses": MAX_POSES, "poses_ahead": MAX_POSES_AHEAD, "steps": MAX_STEPS},
        }

    def check(self, event: Event) -> Event:
        """Return an event with checked values.

        Parameters
        ----------
        event : mapping
            One of the following. Intrinsics are focal lengths and centre in pixels of a picture of 480 x 832.

            ``held``: the keys that are held from now on, by `KeyboardEvent.code` or letter; keys that steer nothing are
            ignored. ``keys``: a text of steps, such as ``w-10,iw-15,none-5``; held keys follow after it.

            ``poses``: [N, 4, 4] or [N, 16], camera to world, one for each of the coming latent frames, whose
            translation of length 1 is the model's unit; ``intrinsics`` [4], default: the last ones.

            ``path``: a recorded camera, [N, 4, 4], one pose for each video frame; ``intrinsics`` [4] or [N, 4];
            ``unit``, the length that becomes 1, default: that of the settings for a model that takes poses to the
            world, for others the longest move between two latent frames; and
            ``own_intrinsics``, whether each frame has its own instead of the first one's. Poses that fill no whole
            chunk are left out.

            ``intrinsics``: [4] for the chunks that keys steer. ``settings``: fields of `KeySettings`.
        """
        known = {
            "held": (),
            "keys": ("intrinsics",),
            "poses": ("intrinsics",),
            "path": ("intrinsics", "unit", "own_intrinsics"),
            "intrinsics": (),
            "settings": (),
        }
        which, values = one_of(event, known, "a camera")
        if which == "held":
            self._directions(values["held"])
            values["held"] = [*values["held"]]
        elif which == "keys":
            key_steps(values["keys"], key_letters(self._codes))
        elif which == "poses":
            values["poses"] = checked_poses(_matrices(values["poses"]))
            if len(values["poses"]) > MAX_POSES:
                raise UsageError(f"poses are {len(values['poses'])}, at most {MAX_POSES} in an event")
        elif which == "path":
            self._path(values)
        elif which == "settings":
            self._changed(values["settings"])
        if which != "path" and values.get("intrinsics") is not None:
            self._recorded(values["intrinsics"])
        return values

    def _path(self, values: Mapping[str, Any]) -> tuple[Array, Array]:
        """Return the relative poses [N, 3, 4] of the latent frames of a recorded path, and their intrinsics [N, 4]."""
        every = checked_poses(_matrices(values["path"]))
        if values.get("intrinsics") is None:
            raise UsageError("a path needs intrinsics: focal lengths and centre for 480 x 832 pixels")
        intrinsics = self._recorded(values["intrinsics"], len(every))
        count = ((len(every) - 1) // VIDEO_PER_LATENT + 1) // self._chunk_frames * self._chunk_frames
        if not count:
            need = VIDEO_PER_LATENT * (self._chunk_frames - 1) + 1
            raise UsageError(
                f"{len(every)} poses, expected {need} or more for a chunk of {self._chunk_frames} latent frames"
            )
        moved = framewise(every[::VIDEO_PER_LATENT][:count])
        unit = values.get("unit")
        if unit is None:
            longest = float(np.linalg.norm(moved[:, :, 3], axis=1).max()) or 1.0
            unit = (self._world and self.settings.unit) or longest
        moved[:, :, 3] /= checked_unit(unit)
        own = flag(values.get("own_intrinsics", False), "own_intrinsics")
        each = intrinsics[::VIDEO_PER_LATENT][:count] if own else intrinsics[:1].repeat(count, 0)
        magnitudes_checked(moved, each)
        return moved, each

    def _apply(self, event: Event) -> None:
        if "held" in event:
            self._held = self._directions(event["held"])
            self._taps |= self._held
        elif "keys" in event:
            steps = key_steps(event["keys"], key_letters(self._codes))
            if len(self._steps) + len(steps) > MAX_STEPS:
                raise UsageError(f"keys for more than {MAX_STEPS} steps: give fewer")
            self._steps.extend(steps)
        elif "poses" in event:
            if len(self._poses) + len(event["poses"]) > MAX_POSES_AHEAD:
                raise UsageError(
                    f"{len(self._poses)} poses wait, at most {MAX_POSES_AHEAD} do: send them as they are shown"
                )
            self._poses.extend((moved, None) for moved in framewise(event["poses"], self._pose_before))
            self._pose_before = event["poses"][-1]
        elif "path" in event:
            self._poses, self._pose_before = deque(zip(*self._path(event), strict=True)), None
        elif "settings" in event:
            self.settings = self._changed(event["settings"])
        if "path" not in event and event.get("intrinsics") is not None:
            self._intrinsics = self._recorded(event["intrinsics"])[0]
        self._path_ends = "path" in event
        self._active = True

    def _directions(self, keys: object) -> frozenset[str]:
        """Return the directions of held keys; other keys of a keyboard steer nothing."""
        return frozenset(self._names[key] for key in held_keys(keys, self._names, letters=True))

    def _changed(self, settings: object) -> KeySettings:
        names = {entry.name for entry in fields(KeySettings)}
        changes = mapping_of(settings, "settings")
        if odd := [name for name in changes if name not in names]:
            raise UsageError(
                f"settings have the unknown field {shown(odd[0])}, expected {', '.join(sorted(names))}"
            )
        return replace(self.settings, **changes)

    def _recorded(self, intrinsics: object, count: int | None = None) -> Array:
        return recorded_intrinsics(intrinsics, *self._size, count)

    # -- chunks ------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the camera has taken an event."""
        return self._active

    @property
    def chunks(self) -> int | None:
        """Number of chunks for which the steps of a text of keys, or poses, last."""
        if not (self._steps or self._poses):
            return None
        frames = len(self._poses)
        if self._steps:
            frames = max(frames, -(-len(self._steps) // self.settings.steps_per_frame) + (not self._frame))
        return -(-frames // self._chunk_frames)

    def check_lasts(self, chunks: int) -> None:
        """Raise a UsageError if a recorded path ends before so many chunks."""
        own = self.chunks or 0
        if self._path_ends and chunks > own:
            raise UsageError(f"a camera's path of {own} chunks ends before chunk {chunks}: give more poses")

    def next_chunk(self) -> Mapping[str, NDArray[np.float32]]:
        """Return the camera inputs of the next chunk by name, poses [F, 3, 4] and intrinsics [F, 4]. If poses end
        inside the chunk, the camera rests from there on.

        Raises
        ------
        UsageError
            If a recorded path ends before the chunk, or the camera moves too far.
        """
        if not self._active:
            return {}
        if self._path_ends and not self._poses:
            raise UsageError("the camera's path has ended: give more poses")
        moved, intrinsics = self._moved()
        magnitudes_checked(moved, intrinsics)
        if self._world:
            moved = np.stack(self._seen(moved))[:, :3]
            magnitudes_checked(moved, intrinsics)
        return {
            self.inputs[POSES].name: moved.astype(np.float32),
            self.inputs[INTRINSICS].name: intrinsics.astype(np.float32),
        }

    def _moved(self) -> tuple[Array, Array]:
        """Return the poses of the next chunk's latent frames relative to the frame before, [F, 3, 4] in the model's
        unit, and their intrinsics [F, 4]."""
        intrinsics = np.tile(self._intrinsics, (self._chunk_frames, 1))
        if self._poses:
            moved = np.tile(_REST, (self._chunk_frames, 1, 1))
            for place, (pose, own) in enumerate(islice(self._poses, self._chunk_frames)):
                moved[place] = pose
                if own is not None:
                    intrinsics[place:] = own
        else:
            views, _, _ = self._walk()
            moved = framewise(np.stack(views), self._stand.pose if self._frame else None)
            moved[:, :, 3] /= self.settings.length
        return moved, intrinsics

    def _seen(self, moved: Array) -> list[Array]:
        """Return the poses to the world [4, 4] of frames with poses [F, 3, 4] relative to the frame before."""
        poses = [self._shown]
        for step in moved:
            poses.append(poses[-1] @ np.concatenate((step, [[0.0, 0.0, 0.0, 1.0]])))
        return poses[1:]

    def advance(self) -> None:
        """Move the camera on by a chunk: keys move it also while it follows poses."""
        self._before.append((self._frame, self._stand, self._shown))
        if not self._active:
            self._frame += self._chunk_frames
            return
        if self._world:
            self._shown = self._seen(self._moved()[0])[-1]
            # Rotations of a file are rounded, and their product is less and less of a rotation: one step of Newton's
            # method to the nearest one.
            turn = self._shown[:3, :3]
            self._shown[:3, :3] = turn @ (3 * np.eye(3) - turn.T @ turn) / 2
        _, self._stand, taken = self._walk()
        self._frame += self._chunk_frames
        self._taps = frozenset()
        for _ in range(taken):
            self._steps.popleft()
        if not self._poses:
            self._pose_before = None
        for _ in range(min(self._chunk_frames, len(self._poses))):
            self._poses.popleft()

    def go_to(self, frame: int) -> None:
        """Go on with a chunk that begins at this latent frame. After a step back the camera stands where it stood
        then."""
        while self._before and self._frame > frame:
            self._frame, self._stand, self._shown = self._before.pop()
        self._frame = frame

    def _walk(self) -> tuple[list[Array], Stand | Flight, int]:
        """Return the poses [4, 4] of the next chunk's latent frames by keys, where the camera then stands, and how many
        steps of a text that takes."""
        stand, taken, poses = self._stand, 0, []
        taps = self._taps
        for frame in range(self._chunk_frames):
            if self._frame or frame:
                for _ in range(self.settings.steps_per_frame):
                    left = taken < len(self._steps)
                    stand = stand.stepped(self._steps[taken] if left else self._held | taps, self.settings)
                    taken += left
                taps = frozenset()
            poses.append(stand.pose)
        return poses, stand, taken

    def reset(self) -> None:
        """Return the camera to its start, and drop steps and poses that were sent; held keys and the lens stay."""
        self._clear()

    def state(self) -> dict[str, Any]:
        """Return the camera's state as a JSON value, for `load`."""
        return {
            **self._stand.state(),
            **({"shown": self._shown.tolist()} if self._world else {}),
            "held": sorted(self._held),
            "taps": sorted(self._taps),
            "steps": [sorted(step) for step in self._steps],
            "poses": [[pose.tolist(), None if own is None else own.tolist()] for pose, own in self._poses],
            "pose_before": None if self._pose_before is None else self._pose_before.tolist(),
            "path_ends": self._path_ends,
            "intrinsics": self._intrinsics.tolist(),
            "settings": asdict(self.settings),
            "frame": self._frame,
            "before": [[frame, stand.state(), shown.tolist()] for frame, stand, shown in self._before],
            "active": self._active,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state` returned; UsageError if the value is no state of a camera."""
        try:
            if not isinstance(state, Mapping):
                raise TypeError(f"a {type(state).__name__}")
            settings = self._changed(state["settings"])
            stand = type(self._rest).load(state)
            shown_pose = (
                checked_poses(finite_numbers(state["shown"], (4, 4))[None])[0] if self._world else np.eye(4)
            )
            held, taps = _words(state["held"]), _words(state["taps"])
            steps = deque(map(_words, islice(state["steps"], MAX_STEPS)))
            poses = deque(
                (finite_numbers(pose, (3, 4)), None if own is None else finite_numbers(own, (4,)))
                for pose, own in state["poses"]
            )
            before = state["pose_before"]
            pose_before = None if before is None else finite_numbers(before, (4, 4))
            intrinsics = finite_numbers(state["intrinsics"], (4,))
            path_ends, active = (flag(state[name], name) for name in ("path_ends", "active"))
            frame = whole_number(state["frame"], "frame", 0)
            chunks_before = [
                (
                    whole_number(first, "frame", 0),
                    type(self._rest).load(stood),
                    checked_poses(finite_numbers(seen, (4, 4))[None])[0],
                )
                for first, stood, seen in state["before"]
            ]
        except (KeyError, TypeError, ValueError, OverflowError, UsageError) as fault:
            raise UsageError(f"this is no state of a camera: {fault}; take what state() gave") from None
        self.settings, self._stand, self._held, self._taps = settings, stand, held, taps
        self._shown = shown_pose
        self._steps, self._poses, self._pose_before = steps, poses, pose_before
        self._intrinsics, self._path_ends, self._active = intrinsics, path_ends, active
        self._frame, self._before = frame, deque(chunks_before, CHUNKS_BACK)

    @classmethod
    def events_of(cls, given: Mapping[str, Any]) -> list[Event]:
        """Return the events of ``--keys``, ``--poses`` and ``--intrinsics``."""
        keys, poses, intrinsics = (given.get(name) for name in ("--keys", "--poses", "--intrinsics"))
        if keys is not None and poses is not None:
            raise UsageError("--keys and --poses both say where the camera goes; give one")
        if keys is None and poses is None:
            raise UsageError("--intrinsics belongs to --poses or --keys: give one of them")
        lens = None if intrinsics is None else load_array(intrinsics, "--intrinsics")
        if poses is None:
            return [{"keys": keys} | ({} if lens is None else {"intrinsics": lens})]
        if lens is None:
            raise UsageError(
                "--poses needs --intrinsics FILE.npy: focal lengths and centre for 480 x 832 pixels"
            )
        return [{"path": load_array(poses, "--poses"), "intrinsics": lens}]


_PADS = {
    "ahead": ("Move", "ahead"),
    "left": ("Move", "left"),
    "back": ("Move", "back"),
    "right": ("Move", "right"),
    "up": ("Move", "up"),
    "down": ("Move", "down"),
    "look_up": ("Look", "up", "\N{UPWARDS ARROW}"),
    "look_left": ("Look", "left", "\N{LEFTWARDS ARROW}"),
    "look_down": ("Look", "down", "\N{DOWNWARDS ARROW}"),
    "look_right": ("Look", "right", "\N{RIGHTWARDS ARROW}"),
}


def _described_keys(codes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return each direction that has keys: the pad on which it is drawn, what is on the button, its words for people,
    and its keys."""
    described = []
    for direction, (pad, words, *sign) in _PADS.items():
        own = [code for code, means in codes.items() if means == direction]
        if own:
            face = sign[0] if sign else own[0].removeprefix("Key")
            described.append({"pad": pad, "face": face, "label": f"{pad} {words}", "codes": own})
    return described


def _matrices(poses: object) -> object:
    """Return poses [N, 16], matrices by rows, as [N, 4, 4]; others as they are, to be checked."""
    try:
        array = np.asarray(poses)
    except (TypeError, ValueError, OverflowError):
        return poses
    return array.reshape(-1, 4, 4) if array.ndim == 2 and array.shape[1] == 16 else array


def _words(directions: Iterable[str]) -> frozenset[str]:
    if not all(word in STEPS for word in directions):
        raise ValueError(f"{shown(directions)} are no directions")
    return frozenset(directions)
