"""Every public call takes an argument of a wrong type or size with an error of ours, and can be used afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import seko_runtime
from seko_runtime.controls.camera import CameraControl
from seko_runtime.controls.masks import MasksControl
from seko_runtime.controls.recording import CHANGES, Entry
from seko_runtime.errors import SekoRuntimeError, UsageError
from seko_runtime.format.manifest import InputSpec
from tests.support.voices import voice_control

from . import toy, toy_inputs, toy_pool, toy_whole
from .eager_backend import EagerBackend, write_whole

SIZE = {"height": toy_whole.HEIGHT, "width": toy_whole.WIDTH, "chunk_frames": toy.CHUNK}
POSES = np.stack([np.eye(4)] * 21)
INTRINSICS = np.array([500.0, 500.0, 416.0, 240.0])
FLAGS = ("copy_weights", "overlap", "recache", "last", "own_intrinsics")


def circular() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


WRONG: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "seven": lambda: 7,
    "negative": lambda: -7,
    "beyond int64": lambda: 2**70,
    "of 5000 digits": lambda: 10**5000,
    "of 5000 digits below 0": lambda: -(10**5000),
    "nan": lambda: float("nan"),
    "infinite": lambda: float("inf"),
    "fraction": lambda: 0.5,
    "1e308": lambda: 1e308,
    "complex": lambda: 1j,
    "empty text": lambda: "",
    "text": lambda: "x",
    "text with a zero byte": lambda: "a\0b",
    "surrogate": lambda: "\ud800",
    "long text": lambda: "x" * 5000,
    "bytes": lambda: b"x",
    "bytearray": lambda: bytearray(b"x"),
    "empty list": list,
    "empty tuple": lambda: (),
    "empty mapping": dict,
    "mapping": lambda: {"a": 1},
    "mapping of numbers": lambda: {1: 2},
    "mapping of 5000 digits": lambda: {10**5000: 1},
    "list of none": lambda: [None],
    "list of texts": lambda: ["x"],
    "list of 5000 digits": lambda: [10**5000],
    "list of nan": lambda: [float("nan")],
    "ragged": lambda: [[1], [1, 2]],
    "in itself": circular,
    "set": lambda: {"x"},
    "generator": lambda: (letter for letter in "xyz"),
    "object": object,
    "type": lambda: int,
    "function": lambda: len,
    "path": lambda: Path("x"),
    "lock": threading.Lock,
    "nan array": lambda: np.array([np.nan]),
    "scalar array": lambda: np.array(3),
    "object array": lambda: np.array([object()], object),
    "array of texts": lambda: np.array(["x"]),
    "array of times": lambda: np.array(["2020-01-01"], "datetime64[s]"),
    "structured array": lambda: np.zeros(1, [("a", "i4")]),
    "empty array": lambda: np.zeros((0, 4, 4), np.float32),
    "time difference": lambda: np.timedelta64(3, "s"),
    "numpy integer": lambda: np.int64(1),
    "huge numbers": lambda: np.full((1, 5, 4), 3e38, np.float32),
}

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    # the package
    "open_artifact path": lambda _, x: seko_runtime.open_artifact(x),
    "open_artifact device": lambda at, x: seko_runtime.open_artifact(at.folder, x).close(),
    "open_artifact trust": lambda at, x: seko_runtime.open_artifact(at.folder, trust=x).close(),
    "open_artifact copy_weights": lambda at, x: seko_runtime.open_artifact(at.folder, copy_weights=x).close(),
    "open_artifact ranks": lambda at, x: seko_runtime.open_artifact(at.folder, ranks=x).close(),
    "read_manifest path": lambda _, x: seko_runtime.read_manifest(x),
    "read_manifest trust": lambda at, x: seko_runtime.read_manifest(at.folder, trust=x),
    # an artifact
    **{
        f"artifact.open_session {name}": lambda at, x, name=name: at.artifact.open_session(
            **{name: x}
        ).close()
        for name in (
            *("seed", "text", "prompt", "steps", "shift", "image", "conditioning_latents", "reference"),
            *("inputs", "controls", "prompt_cache", "overlap"),
        )
    },
    **{
        f"artifact.open_pool {name}": lambda at, x, name=name: at.artifact.open_pool(**{name: x}).close()
        for name in ("steps", "shift", "prompt_cache", "overlap", "snapshot_key")
    },
    "artifact.beginning row": lambda at, x: at.artifact.beginning(x),
    "artifact.beginning inputs": lambda at, x: at.artifact.beginning(0, inputs=x),
    "artifact.golden_text": lambda at, x: at.artifact.golden_text(x),
    "artifact.golden_inputs row": lambda at, x: at.artifact.golden_inputs(0, x),
    "artifact.open_together prompt": lambda at, x: entered(at.artifact.open_together(prompt=x)),
    "artifact.open_together image": lambda at, x: entered(at.artifact.open_together(image=x)),
    "artifact.golden_inputs": lambda at, x: at.artifact.golden_inputs(x),
    "artifact.chunk_error number": lambda at, x: at.artifact.chunk_error(x, at.latents),
    "artifact.chunk_error latents": lambda at, x: at.artifact.chunk_error(0, x),
    "artifact.chunk_error video": lambda at, x: at.artifact.chunk_error(0, at.latents, video=x),
    # a session
    "session.run_chunk inputs": lambda at, x: at.session.run_chunk(x),
    "session.controls": lambda at, x: at.session.controls[x],
    "session.controls of another kind": lambda at, x: setattr(at.session, "controls", x),
    "session.replay": lambda at, x: at.session.replay(x),
    **{
        f"session.replay {what}": lambda at, x, what=what: at.session.replay(Entry(0, what, x))
        for what in ("begin", "event", *CHANGES)
    },
    "session.controls.load": lambda at, x: at.session.controls.load(x),
    "session.stream prompt": lambda at, x: next(at.session.stream(x, chunks=1)),
    "session.stream chunks": lambda at, x: next(at.session.stream(chunks=x), None),
    "session.stream recache": lambda at, x: next(at.session.stream("red", chunks=1, recache=x)),
    "session.stream inputs": lambda at, x: next(at.session.stream(chunks=1, inputs=x), None),
    "session.set_prompt": lambda at, x: at.session.set_prompt(x),
    "session.set_text": lambda at, x: at.session.set_text(x),
    "session.set_inputs": lambda at, x: at.session.set_inputs(x),
    "session.rewind": lambda at, x: at.session.rewind(x),
    "session.set_prompt recache": lambda at, x: at.session.set_prompt("red", recache=x),
    "session.check_prompt": lambda at, x: at.session.check_prompt(x),
    "session.check_prompt recache": lambda at, x: at.session.check_prompt("red", recache=x),
    "session.set_text recache": lambda at, x: at.session.set_text(toy.toy_text(), recache=x),
    "session.cut": lambda at, x: at.session.cut(frames=x),
    "session.restart seed": lambda at, x: at.session.restart(seed=x),
    "session.restart image": lambda at, x: at.session.restart(image=x),
    "session.restart reference": lambda at, x: at.session.restart(reference=x),
    "pool.cache_sample": lambda at, x: at.pool.cache_sample(x),
    # a pool and its sessions
    **{
        f"pool.open_session {name}": lambda at, x, name=name: at.pool.open_session(
            **{"prompt": "red"} | {name: x}
        ).close()
        for name in (
            *("seed", "text", "prompt", "image", "conditioning_latents", "reference", "inputs", "name"),
            *("controls", "lease_s", "tenant"),
        )
    },
    "pool.run sessions": lambda at, x: at.pool.run(x),
    "pool.run inputs": lambda at, x: at.pool.run([at.pooled], x),
    "pool.run input": lambda at, x: at.pool.run([at.pooled], [x]),
    "pool.serve_next": lambda at, x: at.pool.serve_next(x),
    "pooled.request_chunk due": lambda at, x: at.pooled.request_chunk(x),
    "pooled.request_chunk inputs": lambda at, x: at.pooled.request_chunk(0.0, x),
    "pool.restore": lambda at, x: at.pool.restore(x).close(),
    "pool.restore name": lambda at, x: at.pool.restore(at.saved, name=x).close(),
    "pool.restore lease_s": lambda at, x: at.pool.restore(at.saved, lease_s=x).close(),
    "pool.restore tenant": lambda at, x: at.pool.restore(at.saved, tenant=x).close(),
    "pooled.run_chunk inputs": lambda at, x: at.pooled.run_chunk(x),
    "pooled.stream inputs": lambda at, x: next(at.pooled.stream(chunks=1, inputs=x), None),
    "pooled.set_prompt": lambda at, x: at.pooled.set_prompt(x),
    "pooled.set_text": lambda at, x: at.pooled.set_text(x),
    "pooled.set_inputs": lambda at, x: at.pooled.set_inputs(x),
    "pooled.rewind": lambda at, x: at.pooled.rewind(x),
    "pooled.restart seed": lambda at, x: at.pooled.restart(seed=x),
    "pooled.restart image": lambda at, x: at.pooled.restart(image=x),
    "pooled.save": lambda at, x: at.pooled.save(x),
    # inputs of the caller, and a voice
    **{
        f"steered.run_chunk {spec.name}": lambda at, x, name=spec.name: at.steered.run_chunk(
            {"camera": np.zeros(toy_inputs.CHANNELS, np.float32)} | {name: x}
        )
        for spec in toy_inputs.INPUTS
    },
    **{
        f"steered.set_inputs {spec.name}": lambda at, x, name=spec.name: at.steered.set_inputs({name: x})
        for spec in toy_inputs.INPUTS
    },
    "voice.take": lambda at, x: at.voice.take(x),
    **{
        f"voice.take {name}": lambda at, x, name=name: at.voice.take({name: x})
        for name in ("samples", "pcm16", "end")
    },
    **{
        f"voice.take samples {name}": lambda at, x, name=name: at.voice.take(
            {"samples": np.zeros(0, np.float32), name: x}
        )
        for name in ("at", "last")
    },
    "voice.load": lambda at, x: at.voice.load(x),
    **{
        f"voice.load {name}": lambda at, x, name=name: at.voice.load(at.voice.state() | {name: x})
        for name in ("first", "ended", "active", "frame", "samples")
    },
    # cameras
    "camera.take": lambda at, x: at.camera.take(x),
    **{
        f"camera.take {name}": lambda at, x, name=name: at.camera.take({name: x})
        for name in ("held", "keys", "poses", "path", "intrinsics", "settings", "fog")
    },
    **{
        f"camera.take {event} {name}": lambda at, x, event=event, name=name: at.camera.take(
            {event: POSES, "intrinsics": INTRINSICS} | {name: x}
        )
        for event, name in (
            *(("poses", "intrinsics"), ("path", "intrinsics"), ("path", "unit"), ("path", "own_intrinsics")),
        )
    },
    **{
        f"camera settings {name}": lambda at, x, name=name: at.camera.take({"settings": {name: x}})
        for name in ("steps_per_frame", "move", "yaw", "pitch", "pitch_limit", "unit")
    },
    "camera.load": lambda at, x: at.camera.load(x),
    **{
        f"camera.load {name}": lambda at, x, name=name: at.camera.load(at.camera.state() | {name: x})
        for name in CameraControl.without_artifact(**SIZE).state()
    },
    **{
        f"camera {name}": lambda _, x, name=name: CameraControl.without_artifact(**SIZE | {name: x})
        for name in SIZE
    },
    "masks.take": lambda at, x: at.masks.take({"masks": x}),
    "masks.take picture": lambda at, x: at.masks.take({"masks": [x] * 2}),
    "masks.load": lambda at, x: at.masks.load(x),
    "masks.load masks": lambda at, x: at.masks.load({"masks": x}),
    "pool.check_prompt": lambda at, x: at.pool.check_prompt(x),
}


def entered(context: AbstractContextManager[object]) -> None:
    with context:
        pass


def masks_control() -> MasksControl:
    spec = MasksControl.declared("masks", height=32, width=48, rows=2, columns=3)
    return MasksControl(spec, {"masks": InputSpec("masks", (2, 6), "float32", "input.masks", "session")})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """One of everything that has public methods."""
    place = tmp_path_factory.mktemp("made")
    folder = write_whole(place / "whole", toy_whole.whole_manifest(golden=toy_whole.GOLDEN))
    with pytest.MonkeyPatch.context() as patch, ExitStack() as opened:
        patch.chdir(tmp_path_factory.mktemp("here"))  # where a file that is named `x` may be made
        patch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: EagerBackend())
        at = SimpleNamespace(folder=folder)
        at.artifact = opened.enter_context(seko_runtime.open_artifact(folder))
        at.session = opened.enter_context(at.artifact.open_session())
        at.latents = at.session.run_chunk().to_host()
        at.pool = opened.enter_context(toy_pool.open_pool())
        at.pooled = opened.enter_context(at.pool.open_session(prompt="red"))
        at.saved = place / "saved.seko"
        at.pooled.save(at.saved)
        inputs = {"place": np.zeros(toy_inputs.CHANNELS, np.float32)}
        steering = opened.enter_context(toy_inputs.open_pool())
        at.steered = opened.enter_context(steering.open_session(text=toy.toy_text(), inputs=inputs))
        at.voice = voice_control()
        at.camera = CameraControl.without_artifact(**SIZE)
        at.masks = masks_control()
        yield at


@pytest.mark.parametrize("call", CALLS)
def test_only_errors_of_ours_come_out(world: SimpleNamespace, call: str) -> None:
    foreign = {}
    for name, value in WRONG.items():
        try:
            CALLS[call](world, value())
        except SekoRuntimeError:
            pass
        except Exception as fault:
            foreign[name] = f"{type(fault).__name__}: {fault}"[:160]
    assert foreign == {}
    for session in (world.session, world.pooled):  # a refused call leaves them as they were
        assert np.isfinite(session.run_chunk().to_host()).all()


@pytest.mark.parametrize("call", [name for name in CALLS if name.endswith((*FLAGS,))])
def test_a_flag_is_true_or_false(world: SimpleNamespace, call: str) -> None:
    """Python takes the text "False" for true."""
    for value in ("False", 0, 1.0, None, float("nan"), [], np.array([True])):
        with pytest.raises(UsageError, match="expected True or False"):
            CALLS[call](world, value)


@pytest.mark.parametrize(
    "prompts",
    [
        {"red": 1},
        b"red",
        {"red"},
        (word for word in ["red"]),
        {"red": 1}.keys(),
        7,
        np.array("red"),
        ["red"],
    ],
)
def test_a_prompt_is_a_text(world: SimpleNamespace, prompts: Any) -> None:
    """All but the numbers can be iterated: a mapping's keys were taken for prompts."""
    for call in (world.session.set_prompt, world.pooled.set_prompt):
        with pytest.raises(UsageError, match="a prompt is a text"):
            call(prompts)


def test_a_prompt_of_numbers_that_overflow_is_refused(world: SimpleNamespace) -> None:
    """The squares of 1e38 are infinite, and NaN decodes to black pictures without a word."""
    text = toy.toy_text()
    for huge in (np.full_like(text, 1e38), -np.full_like(text, 1e38), torch.full(text.shape, 1e38)):
        with pytest.raises(
            UsageError, match=r"text holds a number of magnitude 1e\+38, expected at most 1e\+06"
        ):
            world.session.set_text(huge)
    world.session.set_text(text * 1e6)
    assert np.isfinite(world.session.run_chunk().to_host()).all()


def test_pictures_cameras_and_voices_of_numbers_that_overflow_are_refused(world: SimpleNamespace) -> None:
    latents = np.full((toy.CHANNELS, 1, toy.ROWS, toy.COLUMNS), -1e38, np.float32)
    shaken = POSES.copy()
    shaken[3:, 0, 3] = 1e38
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: world.artifact.open_session(conditioning_latents=latents), "conditioning_latents holds"),
        (lambda: world.voice.take({"samples": np.full(9, 1e38, np.float32)}), "audio holds"),
        (
            lambda: world.camera.take({"path": shaken, "intrinsics": INTRINSICS, "unit": 1.0}),
            "movement, in its unit, holds",
        ),
        (lambda: world.camera.take({"path": POSES, "intrinsics": INTRINSICS * 1e38}), "intrinsics holds"),
        (lambda: world.camera.take({"intrinsics": INTRINSICS * 1e38}), "intrinsics holds"),
        (lambda: world.camera.take({"settings": {"move": 1e38}}), r"move is 1e\+38"),
        (lambda: world.steered.run_chunk({"camera": np.full(4, 1e38, np.float32)}), "input 'camera' holds"),
    ]
    for call, words in refused:
        with pytest.raises(UsageError, match=words):
            call()
