"""Controls of a session: what they take, when they move, and where their kinds come from."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime import Pool, doors
from seko_runtime.controls import Control, Event, controls_of, registry
from seko_runtime.controls.camera import CameraControl
from seko_runtime.errors import EnvironmentLacksError, ManifestError, UsageError
from seko_runtime.format.manifest import ControlSpec, FileEntry
from seko_runtime.video.manifest import VideoManifest, parse_video_manifest
from tests.serve.toys import CAMERA, toy_manifest, world_opener

PROMPT = "a b c"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with world_opener() as pool:
        yield pool


class Dial(Control):
    """A kind from outside: a number that moves by one a chunk."""

    kind = "dial"

    def __init__(self, spec: ControlSpec, inputs: Mapping[str, Any]) -> None:
        super().__init__(spec, inputs)
        self.at: float | None = None

    def describe(self) -> dict[str, Any]:
        return {"events": {"turn": {"turn": {"type": "number"}}}}

    def check(self, event: Event) -> Event:
        return event

    def _apply(self, event: Event) -> None:
        self.at = event["turn"]

    @property
    def active(self) -> bool:
        return self.at is not None

    def reset(self) -> None:
        self.at = None

    def state(self) -> dict[str, Any]:
        return {"at": self.at}

    def load(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


def with_controls(*specs: ControlSpec) -> VideoManifest:
    manifest = toy_manifest(CAMERA)
    tables = (*manifest.engines, *manifest.weights)
    paths = (*(entry.file for entry in tables), *manifest.workload.files)
    files = dict.fromkeys(paths, FileEntry("0" * 64, 1))
    return replace(manifest, controls=specs, files=files)


def outside(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    point = EntryPoint("dial", target, registry.KINDS.group)
    monkeypatch.setattr(doors, "_installed", lambda _: {"dial": (point,)})


def test_a_kind_from_outside_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    outside(monkeypatch, f"{__name__}:Dial")
    controls = controls_of(with_controls(ControlSpec("dial", "knob")))
    controls["knob"].take({"turn": 3.0})
    assert controls.describe() == {"knob": {"kind": "dial", "events": {"turn": {"turn": {"type": "number"}}}}}
    assert controls.state() == {"knob": {"at": 3.0}}
    assert [control.name for control in controls.of_kind("dial")] == ["knob"]


def test_a_state_is_read_and_set_while_the_owner_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither makes a chunk nor takes an event of another thread."""
    outside(monkeypatch, f"{__name__}:Dial")
    controls, lock, held = controls_of(with_controls(ControlSpec("dial", "knob"))), threading.Lock(), []
    controls.owned(lambda: lock)
    monkeypatch.setattr(Dial, "state", lambda _: {"held": lock.locked()})
    monkeypatch.setattr(Dial, "load", lambda _, __: held.append(lock.locked()))
    assert controls.state() == {"knob": {"held": True}}
    controls.load({"knob": {}})
    assert held == [True]


@pytest.mark.parametrize("target", ["nowhere.at_all:Dial", f"{__name__}:PROMPT", f"{__name__}:Pool"])
def test_a_broken_kind_that_is_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    outside(monkeypatch, target)
    with pytest.raises(EnvironmentLacksError, match="'dial'"):
        controls_of(with_controls(ControlSpec("dial", "knob")))


def test_a_kind_that_nobody_has_is_an_error_when_it_is_asked_for() -> None:
    """Its inputs may be given as arrays, so the artifact opens."""
    controls = controls_of(with_controls(ControlSpec("dial", "knob")))
    assert "knob" not in controls
    with pytest.raises(EnvironmentLacksError, match="kind of control 'dial' is not known"):
        controls["knob"]


DECLARED = CameraControl.declared(4, 6, "camera", "intrinsics")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"inputs": {"poses": "camera", "intrinsics": "lens"}},
            "the input 'lens' (intrinsics), which the artifact",
        ),
        ({"inputs": {"poses": "camera"}}, "cannot be made: 'intrinsics'"),
        ({"inputs": {"poses": "intrinsics", "intrinsics": "camera"}}, "expected float32"),
        ({"parameters": {}}, "controls.camera.parameters has no field 'height'"),
        ({"parameters": {**DECLARED.parameters, "height": 0}}, "parameters.height"),
        (
            {"parameters": {**DECLARED.parameters, "keys": {"KeyW": "sideways"}}},
            "key 'KeyW' means 'sideways', expected one of",
        ),
        ({"parameters": {**DECLARED.parameters, "settings": {"move": -1.0}}}, "move is -1.0"),
        ({"parameters": {**DECLARED.parameters, "settings": {"yaw": "far"}}}, "settings.yaw"),
    ],
)
def test_a_manifest_that_does_not_fit_its_kind_is_refused(change: dict[str, Any], words: str) -> None:
    manifest = with_controls(replace(DECLARED, **change))
    assert parse_video_manifest(manifest_json(manifest)) == manifest
    with pytest.raises(ManifestError, match=re.escape(words)):
        controls_of(manifest)


def frames_of(pool: Pool, moves: list[Any], *, disturb: bool) -> list[np.ndarray]:
    """The chunks of a stream whose camera takes these events, each before a chunk; disturbed: each chunk is requested
    before and after its event, with two due times, and a call that fails comes between."""
    frames = []
    with pool.open_session(seed=3, prompt=PROMPT) as session:
        camera = session.controls["camera"]
        camera.take({"held": []})
        for move in moves:
            if disturb:
                session.request_chunk(9.0)
                session.request_chunk(5.0)
                with pytest.raises(UsageError, match="does not exist"):
                    session.run_chunk({"fog": 1})
            if move == "restart":
                session.restart()
            elif move is not None:
                camera.take(move)
            if disturb:
                state = json.loads(json.dumps(session.controls.state()))
                session.request_chunk(7.0)
                session.controls.load(state)
                ((served, chunk),) = pool.serve_next()
                assert served is session
            else:
                chunk = session.run_chunk()
            frames.append(chunk.video()[0].copy())
    return frames


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                None,
                "restart",
                {"held": ["KeyW"]},
                {"held": ["KeyD", "KeyL"]},
                {"held": []},
                {"keys": "a-3,none-2"},
                {"poses": np.stack([np.eye(4)] * 3)},
            ]
        ),
        min_size=1,
        max_size=5,
    )
)
def test_requests_and_failures_move_nothing(moves: list[Any]) -> None:
    with world_opener() as pool:
        wanted = frames_of(pool, moves, disturb=False)
        for got, frames in zip(frames_of(pool, moves, disturb=True), wanted, strict=True):
            assert np.array_equal(got, frames)


def test_an_event_between_a_request_and_its_chunk_counts(pool: Pool) -> None:
    chunks = []
    for late in (False, True):
        with pool.open_session(seed=3, prompt=PROMPT) as session:
            camera = session.controls["camera"]
            camera.take({"held": []})
            session.run_chunk()
            if not late:
                camera.take({"held": ["KeyW"]})
            session.request_chunk(1.0)
            if late:
                camera.take({"held": ["KeyW"]})
            ((_, chunk),) = pool.serve_next()
            chunks.append(chunk.video()[0].copy())
    assert np.array_equal(*chunks)


def test_pictures_are_described_as_the_arrays_that_they_take(pool: Pool) -> None:
    """Not as the texts that a request to open a session holds."""
    control = controls_of(pool.manifest)["pictures"]
    assert control.describe()["events"]["start"]["start"]["type"] == "array"
    control.take({"start": np.zeros((40, 60, 3), np.uint8)})
    with pytest.raises(UsageError, match="expected uint8"):
        control.take({"start": "iVBORw0KGgo="})


def test_controls_may_take_events_before_the_session_begins(pool: Pool) -> None:
    controls = controls_of(pool.manifest)
    controls["camera"].take({"keys": "w-9"})
    with (
        pool.open_session(seed=3, prompt=PROMPT, controls=controls) as fed,
        pool.open_session(seed=3, prompt=PROMPT) as steered,
    ):
        steered.controls["camera"].take({"keys": "w-9"})
        for _ in range(2):
            one, other = pool.run([fed, steered])
            assert np.array_equal(one.video(), other.video())
