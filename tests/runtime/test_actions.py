"""Actions: keys, taps, axes and recordings by the bindings of an artifact, as rows of a chunk."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_runtime.cli.video.controls import fed_controls, read_controls
from seko_runtime.controls.actions import AXES, BITS, ActionsControl, Axis, Binding
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import ControlSpec, InputSpec

F = 3  # latent frames of a chunk
WASD = tuple(
    Binding(name, (f"Key{letter}",), bit=letter)
    for name, letter in zip(("ahead", "back", "left", "right"), "WSAD", strict=True)
)
LOOK = tuple(
    Binding(name, (f"Key{letter}", arrow), axis=axis, step=step, pad="Look", face=arrow[-1])
    for name, letter, arrow, axis, step in (
        ("up", "I", "ArrowUp", "pitch", 0.1),
        ("down", "K", "ArrowDown", "pitch", -0.1),
        ("look_left", "J", "ArrowLeft", "yaw", -0.1),
        ("look_right", "L", "ArrowRight", "yaw", 0.1),
    )
)
OPPOSITES = (("ahead", "back"), ("left", "right"))
WORLD: dict[str, Any] = {
    "bindings": (*WASD, *LOOK),
    "bits": ("W", "S", "A", "D"),
    "axes": (Axis("pitch", 0.2), Axis("yaw", 0.2)),
    "rows": "video",
    "sampled": "video",
    "history": 12,
    "opposites": OPPOSITES,
    "gamepad": {"axis1-": "KeyW", "axis1+": "KeyS", "axis2": "yaw", "axis3": "-pitch", "button0": "KeyW"},
    "mouse": {"x": "yaw", "y": "-pitch"},
}
BY_LATENT: dict[str, Any] = {
    "bindings": WASD,
    "bits": ("W", "A", "S", "D"),
    "rows": "latent",
    "sampled": "chunk",
    "opposites": OPPOSITES,
}
GAME: dict[str, Any] = {
    "bindings": (
        Binding("run", ("KeyQ",), bit="none"),
        Binding("jump", ("KeyW",), bit="jump"),
        Binding("slide", ("KeyS",), bit="slide"),
    ),
    "bits": ("none", "jump", "slide"),
    "rows": "chunk",
    "exclusive": True,
}


def spec_and_inputs(world: Mapping[str, Any]) -> tuple[ControlSpec, dict[str, InputSpec]]:
    own = {"video": 4 * F, "latent": F, "chunk": 1}[world.get("rows", "latent")]
    rows = own + world.get("history", 0)
    names = {word: word for word, of in ((BITS, "bits"), (AXES, "axes")) if world.get(of)}
    spec = ActionsControl.declared(inputs=names, chunk_frames=F, **world)
    widths = {BITS: len(world["bits"]), AXES: len(world.get("axes", ()))}
    return spec, {
        word: InputSpec(word, (rows, widths[word]), "float32", f"input.{word}", "chunk") for word in names
    }


def actions(world: Mapping[str, Any] = WORLD, **changes: Any) -> ActionsControl:
    spec, inputs = spec_and_inputs({**world, **changes})
    # the manifest is JSON
    return ActionsControl(replace(spec, parameters=json.loads(json.dumps(spec.parameters))), inputs)


def chunk(control: ActionsControl) -> dict[str, np.ndarray]:
    inputs = dict(control.next_chunk())
    control.advance()
    return inputs


def pressed(rows: np.ndarray, control: ActionsControl) -> list[str]:
    return ["".join(np.array(control.parameters.bits)[row > 0]) for row in rows]


def test_a_step_back_has_the_past_that_was() -> None:
    """Also after the state was loaded, and beyond a jump of the frames; what is held stays held."""
    control, made = actions(), []
    for code in ("KeyW", "KeyA", "KeyD", "KeyS"):
        control.take({"held": [code]})
        made.append(chunk(control)[BITS])
    loaded = actions()
    loaded.load(json.loads(json.dumps(control.state())))
    for one in (control, loaded):
        for back in (2, 1):
            one.go_to(back * F)
            assert np.array_equal(one.next_chunk()[BITS][:12], made[back][:12])
        one.go_to(0)
        assert pressed(one.next_chunk()[BITS], one) == ["S"] * 24  # before the stream is its first frame
    control.take({"held": ["KeyW"]})
    for _ in range(2):
        control.advance()
    control.go_to(100)  # a cut to another scene: the past goes on
    assert pressed(control.next_chunk()[BITS][:12], control) == ["W"] * 12
    fresh = actions()
    fresh.go_to(30)  # of a snapshot whose control was not saved
    fresh.take({"held": ["KeyW"]})
    assert pressed(chunk(fresh)[BITS], fresh) == ["W"] * 24


def test_a_step_back_over_many_chunks_has_the_past_that_was() -> None:
    control, made = actions(), []
    for _ in range(15):
        for code in ("KeyW", "KeyA", "KeyD", "KeyS"):
            control.take({"held": [code]})
            made.append(chunk(control)[BITS])
    control.go_to(3 * F)
    assert np.array_equal(control.next_chunk()[BITS][:12], made[3][:12])


def test_a_chunk_knows_when_its_last_event_came() -> None:
    control = actions()
    assert control.heard_at() is None
    before = time.monotonic()
    control.take({"tap": ["KeyW"]})
    came = control.heard_at()
    assert came is not None
    assert before <= came <= time.monotonic()
    control.advance()
    assert control.heard_at() is None  # the next chunk shows nothing new


def test_nothing_is_held_without_an_event() -> None:
    control = actions()
    assert not control.active
    for _ in range(2):
        inputs = chunk(control)
        assert inputs[BITS].shape == (24, 4)
        assert inputs[AXES].shape == (24, 2)
        assert not any(values.any() for values in inputs.values())


def test_held_keys_fill_a_chunk_and_become_the_past_of_the_next() -> None:
    control = actions()
    control.take({"held": ["KeyW", "KeyQ", "ArrowLeft"]})
    first = chunk(control)
    assert pressed(first[BITS], control) == ["W"] * 24  # the past of a stream equals its first frame
    np.testing.assert_allclose(first[AXES], np.tile([0, -0.1], (24, 1)), rtol=1e-6)
    control.take({"held": ["KeyD"]})
    assert pressed(chunk(control)[BITS], control) == ["W"] * 12 + ["D"] * 12
    assert pressed(chunk(control)[BITS], control) == ["D"] * 24


def test_a_tap_counts_for_one_chunk() -> None:
    presses: list[list[dict[str, Any]]] = [[{"tap": ["KeyW"]}], [{"held": ["KeyW"]}, {"held": []}]]
    for events in presses:
        control = actions(BY_LATENT)
        for one in events:
            control.take(one)
        assert pressed(chunk(control)[BITS], control) == ["W"] * F
        assert pressed(chunk(control)[BITS], control) == [""] * F


@pytest.mark.parametrize(
    ("events", "wanted"),
    [
        ([["KeyW"], ["KeyW", "KeyS"]], ["W", "S", "WS"]),  # a new one beats a held one; then both are held
        ([[], ["KeyW", "KeyS"]], ["", "WS", "WS"]),  # both are new
        ([["KeyA", "KeyW"], ["KeyA", "KeyD", "KeyW"]], ["WA", "WD", "WAD"]),
        ([["KeyW"], ["KeyD"]], ["W", "D", "D"]),
    ],
)
def test_of_opposite_keys_the_new_one_counts(events: list[list[str]], wanted: list[str]) -> None:
    control = actions(BY_LATENT)
    found = []
    for at in range(3):
        if at < len(events):
            control.take({"held": events[at]})
        found.append("".join(sorted(pressed(chunk(control)[BITS], control)[0], key="WASD".index)))
    assert found == ["".join(sorted(keys, key="WASD".index)) for keys in wanted]


def test_one_action_at_a_time_is_the_newest() -> None:
    control = actions(GAME)
    assert pressed(chunk(control)[BITS], control) == ["none"]
    control.take({"held": ["KeyW"]})
    assert pressed(chunk(control)[BITS], control) == ["jump"]
    control.take({"held": ["KeyS", "KeyW"]})
    assert pressed(chunk(control)[BITS], control) == ["slide"]
    control.take({"tap": ["KeyQ"]})
    assert pressed(chunk(control)[BITS], control) == ["none"]
    assert pressed(chunk(control)[BITS], control) == ["slide"]


def test_sticks_stay_and_the_mouse_counts_once() -> None:
    control = actions()
    control.take({"axes": {"yaw": 0.5}})
    control.take({"moved": {"yaw": 0.25, "pitch": -2}})
    control.take({"moved": {"yaw": -0.5}})
    np.testing.assert_allclose(chunk(control)[AXES][-1], [-0.2, 0.05], rtol=1e-6)
    np.testing.assert_allclose(chunk(control)[AXES][-1], [0, 0.1], rtol=1e-6)
    control.take({"held": ["KeyL"]})
    control.take({"axes": {"yaw": 1.0}})
    np.testing.assert_allclose(chunk(control)[AXES][-1], [0, 0.2], rtol=1e-6)  # never beyond the limit


def test_a_text_has_a_step_for_each_video_frame() -> None:
    control = actions()
    control.take({"held": ["KeyD"]})
    control.take({"keys": "w-4,s-1,wa-6"})
    assert control.chunks == 2  # a first chunk has nine video frames, of eleven steps
    first = pressed(chunk(control)[BITS], control)
    assert first == ["W"] * 12 + ["W"] * 3 + ["W"] * 4 + ["S"] + ["WA"] * 4
    assert pressed(chunk(control)[BITS], control) == first[12:] + ["WA"] * 2 + ["D"] * 10
    assert control.chunks is None


@pytest.mark.parametrize(
    "recorded",
    [
        [[], ["W"], {"keys": ["KeyW", "D"]}, {"keys": {"D": True, "W": False}}],
        {
            "total_frames": 4,
            "fps": 16,
            "frames": [
                {"keys": {}},
                {"keys": {"W": True}},
                {"keys": {"W": True, "D": True}},
                {"keys": {"D": True}},
            ],
        },
    ],
)
def test_a_recording_has_the_keys_of_each_frame(recorded: Any) -> None:
    control = actions(history=0)
    control.take({"recorded": recorded})
    assert pressed(chunk(control)[BITS], control) == [""] * 4 + ["W", "WD", "D"] + [""] * 5
    assert control.chunks is None


def test_a_recording_is_resampled_and_looked_at_as_often_as_the_model_was_trained() -> None:
    every = [["W"] if at % 2 else ["D"] for at in range(40)]
    control = actions(history=0, fps=32)
    control.take({"recorded": every, "fps": 16})
    assert control.chunks == 1 + -(-(80 - 9) // 12)
    assert pressed(chunk(control)[BITS], control)[3:] == ["D", "D", "W", "W", "D", "D", "W", "W", "D"]
    by_latent = actions({**BY_LATENT, "sampled": "latent"})
    by_latent.take({"recorded": every})
    assert pressed(chunk(by_latent)[BITS], by_latent) == ["D", "W", "W"]  # video frames 0, 1 and 5
    by_chunk = actions(BY_LATENT)
    by_chunk.take({"recorded": every})
    assert pressed(chunk(by_chunk)[BITS], by_chunk) == ["D"] * 3
    assert pressed(chunk(by_chunk)[BITS], by_chunk) == ["W"] * 3  # video frame 9


def test_recorded_axes_are_as_those_of_a_stick() -> None:
    control = actions(history=0)
    control.take({"recorded": [{"axes": {"yaw": -0.5}}, {"keys": ["L"], "axes": {"pitch": 1}}]})
    np.testing.assert_allclose(chunk(control)[AXES][[3, 4]], [[0, -0.1], [0.2, 0.1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"held": "KeyW"}, "keys are"),
        ({"held": ["w w"]}, "is not known"),
        ({"axes": {"roll": 1}}, "expected one of pitch, yaw"),
        ({"axes": {"yaw": 1.5}}, "from -1 to 1"),
        ({"moved": {"yaw": "far"}}, "moved 'yaw'"),
        ({"recorded": []}, "expected a list of frames"),
        ({"recorded": {"frames": "w"}}, "expected a list of frames"),
        ({"recorded": [["W"]], "fps": 0}, "fps is 0"),
        ({"recorded": [["W"]], "fps": 1e-310}, "at most 1000000"),
        ({"recorded": [{"keys": {"W": 1}}]}, "expected True or False"),
        ({"recorded": [{}, {"W": True}]}, r"frame 1 has the fields \['W'\], expected keys or axes"),
        ({"keys": "x-1"}, "expected keys of"),
        ({"held": [], "tap": []}, "expected one of"),
        ({"jump": 1}, "expected one of"),
    ],
)
def test_an_impossible_event_is_refused_and_changes_nothing(event: dict[str, Any], words: str) -> None:
    control = actions()
    control.take({"held": ["KeyA"]})
    before = control.state()
    with pytest.raises(UsageError, match=words):
        control.take(event)
    assert control.state() == before


def test_two_actions_at_once_are_refused_where_the_model_takes_one() -> None:
    control = actions(GAME)
    for event in ({"keys": "ws-1"}, {"recorded": [["W", "S"]]}):
        with pytest.raises(UsageError, match="one action at a time"):
            control.take(event)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": ("W", "W", "S", "A", "D")}, "occurs twice"),
        ({"axes": (Axis("pitch", 0.2), Axis("yaw", 0.05))}, "at most its limit"),
        ({"axes": (Axis("pitch", 0.2), Axis("yaw", -1.0))}, "expected a number above 0"),
        ({"opposites": (("ahead", "up", "down"),)}, "two bindings"),
        ({"opposites": (("ahead", "fly"),)}, "two bindings"),
        ({"gamepad": {"button0": "KeyZ"}}, "expected an axis or a key"),
        ({"mouse": {"x": "KeyW"}}, "expected an axis or a key"),
        (
            {"bindings": (Binding("ahead", ("w",), bit="W"),), "opposites": (), "gamepad": {}},
            "expected codes",
        ),
        ({"bits": ()}, "expected one of"),
    ],
)
def test_contradicting_bindings_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        actions(**change)


def test_inputs_of_another_shape_are_refused() -> None:
    spec, inputs = spec_and_inputs(WORLD)
    for changed in (
        {**inputs, BITS: replace(inputs[BITS], shape=(23, 4))},
        {**inputs, AXES: replace(inputs[AXES], dtype="int64")},
        {BITS: inputs[BITS]},
        {**inputs, "legs": inputs[BITS]},
    ):
        with pytest.raises(UsageError, match="expected"):
            ActionsControl(spec, changed)


def test_a_page_can_draw_what_it_describes() -> None:
    told = json.loads(json.dumps(actions().describe()))
    assert {key["pad"] for key in told["keys"]} == {"Move", "Look"}
    assert told["keys"][0] == {
        "name": "ahead",
        "pad": "Move",
        "face": "W",
        "label": "Move ahead",
        "codes": ["KeyW"],
        "bit": "W",
    }
    assert told["keys"][4]["axis"] == "pitch"
    assert told["axes"] == [{"name": "pitch", "limit": 0.2}, {"name": "yaw", "limit": 0.2}]
    assert told["gamepad"]["axis3"] == "-pitch"
    assert told["mouse"] == {"x": "yaw", "y": "-pitch", "pixels": 200}
    assert {"held", "tap", "axes", "moved", "recorded", "keys"} == set(told["events"])
    assert "axes" not in actions(GAME).describe()["events"]


def test_recorded_files_are_options_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "actions.json"
    file.write_text(json.dumps({"fps": 16, "frames": [{"keys": {"W": True}}]}))
    (event,) = ActionsControl.events_of({"--actions": file})
    control = actions(history=0)
    control.take(event)
    assert pressed(chunk(control)[BITS], control)[3] == "W"
    with pytest.raises(UsageError, match="--keys and --actions"):
        ActionsControl.events_of({"--actions": file, "--keys": "w-1"})


def fed(world: Mapping[str, Any], **given: Any) -> ActionsControl:
    """The control of a run whose artifact has actions alone."""
    spec, inputs = spec_and_inputs(world)
    manifest = SimpleNamespace(caller_inputs=(*inputs.values(),), control_specs=(spec,), call_rows=1)
    options = argparse.Namespace(chunks=None, **given)
    (controls,) = fed_controls(options, manifest, read_controls(options), ())  # type: ignore[arg-type]
    control = controls["actions"]
    assert isinstance(control, ActionsControl)
    return control


def test_keys_are_an_option_of_several_kinds(tmp_path: Path) -> None:
    """The same ``--keys`` steers a camera or actions; an option of an absent kind is refused."""
    control = fed(BY_LATENT, keys="w-9,d-3")
    assert control.chunks == 2
    assert pressed(chunk(control)[BITS], control) == ["W"] * F
    np.save(tmp_path / "lens.npy", np.ones(4))
    with pytest.raises(UsageError, match="this artifact's model has no camera"):
        fed(BY_LATENT, keys="w-9", intrinsics=tmp_path / "lens.npy")


KEYS = ["KeyW", "KeyS", "KeyA", "KeyD", "KeyI", "KeyL", "KeyZ"]
MOVES = st.one_of(
    st.none(),
    st.just("restart"),
    st.lists(st.sampled_from(KEYS), max_size=4).map(lambda keys: {"held": keys}),
    st.lists(st.sampled_from(KEYS), max_size=2).map(lambda keys: {"tap": keys}),
    st.floats(-1, 1).map(lambda value: {"axes": {"yaw": value}}),
    st.floats(-9, 9).map(lambda value: {"moved": {"pitch": value}}),
    st.lists(st.lists(st.sampled_from(KEYS[:6]), max_size=2), min_size=1, max_size=30).map(
        lambda frames: {"recorded": frames}
    ),
)


def taken(control: ActionsControl, move: Any) -> None:
    if move == "restart":
        control.reset()
    elif move is not None:
        control.take(move)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(MOVES, st.booleans()), min_size=1, max_size=12), st.sampled_from([WORLD, BY_LATENT])
)
def test_asking_moves_nothing_and_a_state_goes_on(
    moves: Sequence[tuple[Any, bool]], world: dict[str, Any]
) -> None:
    """The same chunks, whether asked twice or taken over by a control that loaded the state; the past of a chunk is
    what the chunks before it showed, and numbers stay within their limits."""
    one, other = actions(world), actions(world)
    seen: list[np.ndarray] = []
    for move, makes_chunk in moves:
        if not world.get("axes") and isinstance(move, dict) and {"axes", "moved"} & set(move):
            continue
        if isinstance(move, dict) and not world.get("axes"):
            move = {
                name: [key for key in keys if key not in ("KeyI", "KeyL")]
                if name != "recorded"
                else [[key for key in frame if key not in ("KeyI", "KeyL")] for frame in keys]
                for name, keys in move.items()
            }
        taken(one, move)
        taken(other, move)
        if move == "restart":
            seen = []
        if not makes_chunk:
            continue
        one.next_chunk()
        fresh = actions(world)
        fresh.load(json.loads(json.dumps(other.state())))
        other = fresh
        got, wanted = chunk(one), chunk(other)
        for name in got:
            assert np.array_equal(got[name], wanted[name])
        history = one.parameters.history
        past, own = got[BITS][:history], got[BITS][history:]
        shown = (
            np.concatenate([np.tile(own[:1], (history, 1)), *seen])[-history:]
            if not seen
            else np.concatenate([np.tile(seen[0][:1], (history, 1)), *seen])[len(np.concatenate(seen)) :]
        )
        assert np.array_equal(past, shown)
        seen.append(own)
        assert set(np.unique(got[BITS])) <= {0, 1}
        if AXES in got:
            assert np.abs(got[AXES]).max() <= np.float32(0.2)


@pytest.mark.parametrize(
    "change",
    [
        {"held": ["KeyZ"]},
        {"steps": [[["fly"], []]]},
        {"past": [[1.0]]},
        {"frame": -1},
        {"before": [[0]]},
        {"active": 1},
        {"pushed": [0.0]},
        {"moved": None},
    ],
)
def test_another_value_is_no_state(change: dict[str, Any]) -> None:
    control = actions()
    before = control.state()
    states: list[Any] = [{**before, **change}, [], {}]
    for state in states:
        with pytest.raises(UsageError, match="no state of actions"):
            control.load(state)
    assert control.state() == before
