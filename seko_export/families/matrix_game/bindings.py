"""What keys and mouse of each game mean to the model, as a control of the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seko_export.config.video import VideoBuild
from seko_export.families.matrix_game.actions import KEYBOARD_INPUT, MOUSE_INPUT, history_frames
from seko_export.families.matrix_game.model import GTA, TEMPLE_RUN, UNIVERSAL, MatrixGameModel
from seko_runtime.controls.actions import AXES, BITS, VIDEO, ActionsControl, Axis, Binding
from seko_runtime.format.manifest import ControlSpec

STEP = 0.1  # of the mouse, while a key is held; nothing beyond it was seen in training as far as is known
_PITCH, _YAW = "pitch", "yaw"
_AHEAD, _BACK, _LEFT, _RIGHT = "ahead", "back", "left", "right"
_LOOK = tuple(
    Binding(
        f"look_{way}",
        (f"Key{letter}", f"Arrow{way.title()}"),
        axis=axis,
        step=step,
        pad="Look",
        label=f"Look {way}",
        face=face,
    )
    for way, letter, axis, step, face in (
        ("up", "I", _PITCH, STEP, "\N{UPWARDS ARROW}"),
        ("left", "J", _YAW, -STEP, "\N{LEFTWARDS ARROW}"),
        ("down", "K", _PITCH, -STEP, "\N{DOWNWARDS ARROW}"),
        ("right", "L", _YAW, STEP, "\N{RIGHTWARDS ARROW}"),
    )
)
_MOUSE: Mapping[str, Any] = {
    "axes": (Axis(_PITCH, STEP), Axis(_YAW, STEP)),
    "mouse": {"x": _YAW, "y": f"-{_PITCH}"},
}
_STICKS = {"axis2": _YAW, "axis3": f"-{_PITCH}"}
_WASD = {"axis0-": "KeyA", "axis0+": "KeyD", "axis1-": "KeyW", "axis1+": "KeyS"}
_PAD = {"button12": "KeyW", "button13": "KeyS", "button14": "KeyA", "button15": "KeyD"}


def _moves(*ways: tuple[str, str]) -> tuple[Binding, ...]:
    return tuple(Binding(name, (f"Key{letter}",), bit=name) for name, letter in ways)


_GAMES: Mapping[str, Mapping[str, Any]] = {
    UNIVERSAL: {
        "bindings": (*_moves((_AHEAD, "W"), (_BACK, "S"), (_LEFT, "A"), (_RIGHT, "D")), *_LOOK),
        "bits": (_AHEAD, _BACK, _LEFT, _RIGHT),
        "opposites": ((_AHEAD, _BACK), (_LEFT, _RIGHT)),
        "gamepad": {**_WASD, **_PAD, **_STICKS},
        **_MOUSE,
    },
    GTA: {
        "bindings": (
            *_moves((_AHEAD, "W"), (_BACK, "S")),
            Binding("steer_left", ("KeyA", "ArrowLeft"), axis=_YAW, step=-STEP, label="Steer left"),
            Binding("steer_right", ("KeyD", "ArrowRight"), axis=_YAW, step=STEP, label="Steer right"),
        ),
        "bits": (_AHEAD, _BACK),
        "opposites": ((_AHEAD, _BACK), ("steer_left", "steer_right")),
        "gamepad": {"axis0": _YAW, "axis1-": "KeyW", "axis1+": "KeyS", "button7": "KeyW", "button6": "KeyS"},
        **_MOUSE,
    },
    TEMPLE_RUN: {
        "bindings": tuple(
            Binding(name, (f"Key{letter}",), bit=name, label=label)
            for name, letter, label in (
                ("none", "Q", "Run on"),
                ("jump", "W", "Jump"),
                ("slide", "S", "Slide"),
                ("turn_left", "Z", "Turn left"),
                ("turn_right", "C", "Turn right"),
                ("side_left", "A", "Step left"),
                ("side_right", "D", "Step right"),
            )
        ),
        "bits": ("none", "jump", "slide", "turn_left", "turn_right", "side_left", "side_right"),
        "exclusive": True,
        "gamepad": {
            **_WASD,
            **_PAD,
            "button4": "KeyZ",
            "button5": "KeyC",
            "button0": "KeyW",
            "button1": "KeyS",
        },
    },
}


def actions_of(config: VideoBuild) -> ControlSpec:
    """Return the manifest's entry of a build's keys and mouse."""
    model, s = MatrixGameModel.of(config.model), config.workload.stream
    inputs = {BITS: KEYBOARD_INPUT} | ({AXES: MOUSE_INPUT} if model.mouse else {})
    return ActionsControl.declared(
        inputs=inputs,
        chunk_frames=s.chunk_frames,
        temporal_stride=s.temporal_stride,
        fps=s.fps,
        rows=VIDEO,
        sampled=VIDEO,
        history=history_frames(config),
        **_GAMES[model.game],
    )
