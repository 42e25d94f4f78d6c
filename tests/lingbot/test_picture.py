"""A picture and a camera as a user gives them: the condition by the build's own engines, steered sessions, options."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import seko_runtime
from seko_export.artifact.describe import describe
from seko_export.backends import EAGER
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import dtype_name
from seko_export.errors import NumericError
from seko_export.errors import UsageError as BuildUsageError
from seko_export.families.base import MediaTensors
from seko_export.families.lingbot.family import FAMILY
from seko_export.families.registry import graph_of
from seko_export.families.wan_layout.picture_condition import picture_pieces
from seko_export.families.wan_layout.picture_sizes import TABLE_FRAMES
from seko_export.lowering import agree
from seko_export.media.wan_vae.keys import vae_shapes
from seko_export.media.wan_vae.modules import VaeEncode, latent_statistics
from seko_export.video.recording import eager_engine, golden_text
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.cli.video.controls import fed_controls, read_controls
from seko_runtime.controls import Controls
from seko_runtime.errors import SekoRuntimeError, UsageError
from seko_runtime.format.manifest import Weight
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.pool import Pool
from seko_runtime.video.session import Session
from tests.export.vae_oracle import SMALL
from tests.lingbot.condition_table import condition_table
from tests.lingbot.streams import given_of, lingbot_config, random_checkpoint
from tests.support.asked import resolved
from tests.support.cameras import camera, chunk_of
from tests.support.given_pictures import opening_with
from tests.support.rows import rows_of
from tests.support.stacked import open_rows, stacked_session
from tests.support.tolerances import ORACLE, relative_error

PICTURE = np.random.default_rng(5).integers(0, 256, (32, 48, 3), np.uint8)


def manifest_of(config: VideoBuild, weights: dict[str, torch.Tensor]) -> VideoManifest:
    table = tuple(
        Weight(name, tuple(weight.shape), dtype_name(weight.dtype)) for name, weight in weights.items()
    )
    return describe(config, EAGER, table, {})


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    config = lingbot_config(vae=SMALL)
    generator = torch.Generator().manual_seed(2)
    vae = latent_statistics(SMALL, torch.float32)
    for name, shape in vae_shapes(SMALL, "both").items():
        noise = torch.randn(shape, generator=generator)
        vae[name] = noise * prod(shape[1:]) ** -0.5 if name.endswith("weight") else 1 + 0.1 * noise
    tensors = dict(FAMILY.weights(graph_of(config).pieces, random_checkpoint(), MediaTensors(vae=vae)))
    return tensors | config.workload.schedule.tables(config.workload.stream)


@contextmanager
def opened(weights: dict[str, torch.Tensor], **more: object) -> Iterator[Session]:
    config = lingbot_config(vae=SMALL)
    engines = {name: eager_engine(piece) for name, piece in graph_of(config).pieces.items()}
    text = golden_text(config)
    with torch.no_grad(), stacked_session(
        manifest_of(config, weights), engines, weights, CpuMemory(), seeds=[3], text=text, **more
    ) as session:  # fmt: skip
        yield session


def condition_buffer(session: Session) -> torch.Tensor:
    return rows_of(session).device().buffers["input.condition"][0]


def test_the_table_of_a_picture_is_made_by_the_engines(weights) -> None:
    """Bit by bit that of the encoder call by call; its rows change up to the last one."""
    with opened(weights, image=PICTURE) as session:
        table = condition_buffer(session).clone()
    own = {name.removeprefix("vae."): weight for name, weight in weights.items() if name.startswith("vae.")}
    pixels = torch.from_numpy(PICTURE).permute(2, 0, 1).float() / 127.5 - 1
    names = VaeEncode(SMALL, first=True, frames=1).state_dict()
    wanted = condition_table({name: own[name] for name in names}, SMALL, pixels)
    assert torch.equal(table, wanted)
    assert table.shape == (20, TABLE_FRAMES, 4, 6)
    assert not torch.equal(table[4:, 1], table[4:, 2])
    assert torch.equal(table[:4, 0], torch.ones(4, 4, 6))


def test_a_picture_of_another_size_is_encoded_as_the_resize_leaves_it(weights) -> None:
    """As the original does: the bicubic resize of a picture in -1..1 goes beyond that range, and is not rounded."""
    photo = 255 * np.random.default_rng(8).integers(0, 2, (54, 80, 3), np.uint8)
    pixels = torch.from_numpy(photo).permute(2, 0, 1).float().div(255).sub(0.5).div(0.5)
    resized = torch.nn.functional.interpolate(pixels[None], size=(32, 48), mode="bicubic")[0]
    assert resized.abs().max() > 1.1
    own = {name.removeprefix("vae."): weight for name, weight in weights.items() if name.startswith("vae.")}
    own = {name: own[name] for name in VaeEncode(SMALL, first=True, frames=1).state_dict()}
    wanted = condition_table(own, SMALL, resized)
    as_bytes = condition_table(own, SMALL, ((resized + 1) * 127.5).round().clamp(0, 255) / 127.5 - 1)
    manifest = manifest_of(lingbot_config(vae=SMALL), weights)
    fitted = opening_with(manifest, start=photo)["image"]
    with opened(weights, image=fitted) as session:
        table = condition_buffer(session)
        assert relative_error(table, wanted) <= ORACLE[torch.float32]
        assert relative_error(table, as_bytes) > 100 * ORACLE[torch.float32]
        for level, words in (
            (np.nan, "a number that is not finite"),
            (1e38, r"a number of magnitude 1e\+38"),
        ):
            with pytest.raises(UsageError, match=f"image holds {words}"):
                session.restart_row(0, image=np.full((32, 48, 3), level, np.float32))
        with pytest.raises(UsageError, match="image is float64"):
            session.restart_row(0, image=PICTURE.astype(np.float64))


def test_a_stream_from_a_picture_is_the_stream_from_its_table(weights) -> None:
    """The first latent frame is made like the others: the picture is told, not given."""
    config = lingbot_config(vae=SMALL)
    steps = [{name: value.numpy() for name, value in given_of(config, number).items()} for number in range(2)]
    with opened(weights, image=PICTURE) as session:
        table = condition_buffer(session).numpy().copy()
        chunks = [session.run_chunk(step).to_host().copy() for step in steps]
        session.restart_row(0, image=PICTURE[::-1].copy())
        assert not np.array_equal(condition_buffer(session).numpy(), table)
        other = session.run_chunk(steps[0]).to_host().copy()
        session.restart_row(0, image=PICTURE)
        again = session.run_chunk(steps[0]).to_host().copy()
    with opened(weights, inputs={"condition": table}) as session:
        assert all(
            np.array_equal(session.run_chunk(step).to_host(), latents)
            for step, latents in zip(steps, chunks, strict=True)
        )
    assert np.array_equal(again, chunks[0])
    assert not np.array_equal(other, chunks[0])


def test_a_picture_that_a_control_takes_begins_the_stream_with_its_restart(weights) -> None:
    config = lingbot_config(vae=SMALL)
    step = {name: value.numpy() for name, value in given_of(config, 0).items()}
    photo = np.random.default_rng(8).integers(0, 256, (54, 80, 3), np.uint8)
    begins = opening_with(manifest_of(config, weights), start=photo)
    with opened(weights, **begins) as session:
        wanted = session.run_chunk(step).to_host().copy()
    with opened(weights, image=PICTURE) as session:
        first = session.run_chunk(step).to_host().copy()
        session.take("pictures", {"start": photo})
        for _ in range(2):
            session.restart_row(0)
            assert np.array_equal(session.run_chunk(step).to_host(), wanted)
    assert not np.array_equal(first, wanted)


def test_a_picture_and_its_input_exclude_each_other(weights) -> None:
    table = given_of(lingbot_config(), None)["condition"].numpy()
    with pytest.raises(UsageError, match="both image and the input 'condition'"), opened(
        weights, image=PICTURE, inputs={"condition": table}
    ):  # fmt: skip
        pass
    with pytest.raises(UsageError, match="input 'condition' is required per session"), opened(weights):
        pass


def test_a_camera_is_taken_by_each_chunk(weights) -> None:
    """As its inputs would be; a chunk that fails leaves it where it was."""
    alone = camera(32, 48, 2, "w-9,jl-9")
    with opened(weights, image=PICTURE) as session:
        session.take("camera", {"keys": "w-9,jl-9"})
        chunks = [session.run_chunk().to_host().copy() for _ in range(2)]
        controls = session.sessions[0].controls
        before = controls.state()
        with pytest.raises(UsageError, match="the input 'camera' and events of the control 'camera'"):
            session.run_chunk({"camera": np.zeros((2, 3, 4), np.float32)})
        with pytest.raises(UsageError, match="input 'fog' does not exist"):
            session.run_chunk({"fog": np.zeros(1, np.float32)})
        with pytest.raises(UsageError, match="no control 'fog'; its controls: 'camera', 'pictures'"):
            controls["fog"]
        assert controls.state() == before
    with opened(weights, image=PICTURE) as session:
        with pytest.raises(UsageError, match="input 'camera' is required for every chunk"):
            session.run_chunk()
        for latents in chunks:
            assert np.array_equal(session.run_chunk(chunk_of(alone)).to_host(), latents)


def test_sessions_get_cameras_of_their_own_as_the_page_says(weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's second snippet, run: each session's video is that of the camera that steered it."""
    page = (Path(__file__).parents[2] / "docs" / "world-models.md").read_text(encoding="utf-8")
    (snippet,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "open_pool" in block]
    config = lingbot_config(vae=SMALL, layout={"batch": 2})
    tables = weights | config.workload.schedule.tables(config.workload.stream)
    engines = {name: eager_engine(piece) for name, piece in graph_of(config).pieces.items()}
    manifest, text = manifest_of(config, tables), golden_text(config)

    def open_pool() -> Any:
        pool: Any = Pool(open_rows(manifest, engines, tables, CpuMemory()))
        opening = pool.open_session

        def open_session(*, seed: int, prompt: str, image: np.ndarray) -> Any:
            assert prompt
            return opening(seed=seed, text=text[seed : seed + 1], image=image)

        pool.open_session = open_session
        return pool

    variables: dict[str, Any] = {"picture": PICTURE}
    stub = SimpleNamespace(manifest=manifest, open_pool=open_pool)
    monkeypatch.setattr(seko_runtime, "open_artifact", lambda _: nullcontext(stub), raising=False)
    with torch.no_grad():
        exec(snippet, variables)
        for row, keys in enumerate(("w", "sj")):
            opening = {"seeds": [0, 1], "text": text, "image": PICTURE}
            with stacked_session(manifest, engines, tables, CpuMemory(), **opening) as session:
                session.take("camera", {"held": [*keys]})
                alike = session.run_chunk().video()
            assert np.array_equal(variables["frames"][row][0], alike[row])
            assert not np.array_equal(variables["frames"][1 - row][0], alike[1 - row])


def asked(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**{"keys": None, "poses": None, "intrinsics": None, "chunks": None, **changes})


def fed(options: argparse.Namespace, manifest: VideoManifest, files: dict[str, Any]) -> Controls:
    (controls,) = fed_controls(options, manifest, read_controls(options), files)
    return controls


def test_the_options_of_a_camera(weights, tmp_path: Path) -> None:
    """Keys and poses to every chunk's arrays, as many chunks as they fill if none were asked for."""
    manifest = manifest_of(lingbot_config(vae=SMALL), weights)
    options = asked(keys="w-9,jl-12")
    controls, alone = fed(options, manifest, {}), camera(32, 48, 2, "w-9,jl-12")
    assert options.chunks == 4  # 21 steps, so frame 0 and 6 more
    for _ in range(options.chunks):
        inputs = controls.inputs(None)
        assert inputs is not None
        for name, value in chunk_of(alone).items():
            assert np.array_equal(inputs[name], value)
        controls.advance()
    np.save(tmp_path / "poses.npy", np.tile(np.eye(4), (17, 1, 1)))
    np.save(tmp_path / "intrinsics.npy", np.array([500.0, 500, 416, 240]))
    files = {name: tmp_path / f"{name}.npy" for name in ("poses", "intrinsics")}
    options = asked(**files)
    assert fed(options, manifest, {})["camera"].chunks == options.chunks == 2
    recorded = [
        fed(asked(intrinsics=files["intrinsics"], **path), manifest, {})["camera"].next_chunk()["intrinsics"]
        for path in ({"keys": "w-5"}, {"poses": files["poses"]})
    ]
    assert np.array_equal(*recorded)  # in pixels of one size, whatever moves the camera
    assert np.allclose(recorded[0][0], [500 * 48 / 832, 500 * 32 / 480, 24, 16])
    (tmp_path / "walk.json").write_text(json.dumps([{"keys": "w-9"}, {"held": ["KeyW"]}]), encoding="utf-8")
    options = asked(control=[f"camera={tmp_path / 'walk.json'}"])
    assert fed(options, manifest, {})["camera"].active
    assert options.chunks == 2
    options = asked()
    assert not fed(options, manifest, {})["camera"].active
    assert options.chunks == 4
    for odd, arrays, words in (
        (asked(keys="w-3", **files), {}, "give one"),
        (asked(poses=files["poses"]), {}, "--poses needs --intrinsics"),
        (asked(intrinsics=files["intrinsics"]), {}, "--intrinsics belongs to"),
        (asked(keys="w-3"), {"camera": PICTURE}, "--input camera contradicts --keys"),
        (asked(chunks=3, **files), {}, "give more poses"),
        (asked(keys="q-3"), {}, "keys 'q-3'"),
        (asked(control=["camera"]), {}, r"--control 'camera': expected NAME=FILE\.json"),
        (
            asked(control=[f"fog={tmp_path / 'walk.json'}"]),
            {},
            "no control 'fog'; its controls: 'camera', 'pictures'",
        ),
        (asked(control=[f"camera={tmp_path / 'none.json'}"]), {}, "none.json was not found"),
        (asked(control=[f"camera={files['poses']}"]), {}, "holds no events"),
    ):
        with pytest.raises(SekoRuntimeError, match=words):
            fed(odd, manifest, arrays)
    still = replace(manifest, inputs=(), controls=None)
    with pytest.raises(UsageError, match="--keys: this artifact's model has no actions or camera"):
        fed(asked(keys="w-3"), still, {})


def test_an_artifact_without_the_field_has_the_controls_of_its_inputs(weights) -> None:
    manifest = manifest_of(lingbot_config(vae=SMALL), weights)
    assert manifest.controls
    assert replace(manifest, controls=None).control_specs == manifest.controls
    assert not replace(manifest, controls=()).control_specs


@pytest.mark.parametrize(
    ("aspect", "sides"),
    [("16:9", (464, 832)), ("1920:1080", (464, 832)), ("832x480", (464, 832)), ("1:1", (624, 624))],
)
def test_the_video_has_the_pictures_aspect(aspect: str, sides: tuple[int, int]) -> None:
    """At the preset's area, as the authors' own numbers round it."""
    stream = resolved("lingbot-v2-fast", aspect=aspect).config.workload.stream
    assert (stream.height, stream.width) == sides


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"aspect": "wide"}, "--aspect 'wide': expected width and height"),
        ({"aspect": "0:3"}, "--aspect '0:3': expected"),
        ({"aspect": "16:9", "height": 480}, "contradicts --height and --width"),
        ({"aspect": "999999:1"}, "no multiple of 16"),
    ],
)
def test_an_aspect_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(BuildUsageError, match=words):
        resolved("lingbot-v2-fast", **options)


@pytest.mark.parametrize("off", [0.0, 1.0])
def test_an_engine_whose_output_is_all_zeros_agrees_if_it_is(
    off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder keeps the grey frames that it saw last: zeros, of which no share can be taken."""
    piece = picture_pieces(lingbot_config(vae=SMALL), SMALL)[1]

    class Engine:
        def __init__(self, *_: object) -> None:
            pass

        def boxed_run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            outputs = list(agree.FlatModule(piece)(*inputs))
            assert not outputs[1].any()
            return [outputs[0], outputs[1] + off, *outputs[2:]]

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", Engine)
    if off:
        with pytest.raises(NumericError, match="differs from the module's"):
            agree.check_agrees(piece, Path("engine.pt2"), "cpu")
    else:
        agree.check_agrees(piece, Path("engine.pt2"), "cpu")
