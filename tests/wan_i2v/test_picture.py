"""Pictures as a session takes them: the condition by the build's own engines, CLIP's squashed pictures, options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seko_export.artifact.describe import describe
from seko_export.backends import EAGER
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import dtype_name
from seko_export.families.base import MediaTensors
from seko_export.families.registry import graph_of
from seko_export.families.wan_i2v.family import FAMILY
from seko_export.families.wan_layout.picture_branch import FEATURES
from seko_export.families.wan_layout.picture_condition import TwoPictureFrames
from seko_export.media.clip.files import clip_config_of, load_clip
from seko_export.media.wan_vae.modules import VaeDecode, VaeEncode
from seko_export.video.recording import eager_engine, golden_text
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.controls import controls_of
from seko_runtime.errors import UsageError
from seko_runtime.format.manifest import Weight
from seko_runtime.video.manifest import VideoManifest
from seko_runtime.video.session import Session
from tests.export.vae_oracle import SMALL, VaeOracle
from tests.seko_talk.streams import seen_by, write_clip
from tests.support.given_pictures import opening_with
from tests.support.rows import rows_of
from tests.support.stacked import stacked_session
from tests.support.tiers import first_is_fast
from tests.support.tolerances import VAE, relative_error
from tests.truth.eager_stream import weights_of
from tests.wan_i2v.streams import ONE, TWO, i2v_config, random_checkpoint

# Four passes in float32 that feed on each other: some ten times the bar of one pass.
STREAM_BAR = 5e-5
GENERATOR = np.random.default_rng(5)
FIRST, LAST = GENERATOR.integers(0, 256, (2, 32, 48, 3), np.uint8)
PHOTO = GENERATOR.integers(0, 256, (50, 90, 3), np.uint8)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A CLIP file and transformers' model of it."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    file = tmp_path_factory.mktemp("clip") / "models_clip_open-clip.pth"
    return file, write_clip(file, 32)


def small_vae() -> dict[str, torch.Tensor]:
    """Return the weights of `VaeOracle`."""
    oracle = VaeOracle(torch.float32)
    halves = (oracle.half(half, first=True, frames=1) for half in (VaeEncode, VaeDecode))
    return {name: weight for half in halves for name, weight in half.state_dict().items()}


def build(kind: str, clip_file: Path | None = None) -> tuple[VideoBuild, dict[str, torch.Tensor]]:
    """Return a build with a small VAE, and with CLIP if its file is named, and its weights."""
    config = i2v_config(kind, vae=SMALL)
    image = None
    if clip_file is not None:
        config = config.changed(image=clip_config_of(clip_file))
        image = load_clip(clip_file, clip_config_of(clip_file))
    return config, weights_of(config, random_checkpoint(config), MediaTensors(vae=small_vae(), image=image))


def manifest_of(config: VideoBuild, weights: dict[str, torch.Tensor]) -> VideoManifest:
    table = tuple(
        Weight(name, tuple(weight.shape), dtype_name(weight.dtype)) for name, weight in weights.items()
    )
    return describe(config, EAGER, table, {})


@contextmanager
def opened(config: VideoBuild, weights: dict[str, torch.Tensor], **more: object) -> Iterator[Session]:
    engines = {name: eager_engine(piece) for name, piece in graph_of(config).pieces.items()}
    text = golden_text(config)
    with torch.no_grad(), stacked_session(
        manifest_of(config, weights), engines, weights, CpuMemory(), seeds=[3], text=text, **more
    ) as session:  # fmt: skip
        yield session


def input_buffer(session: Session, name: str) -> torch.Tensor:
    return rows_of(session).device().buffers[f"input.{name}"][0].clone()


@pytest.mark.parametrize("last_frame", first_is_fast([3, 1, 31]))
def test_a_last_picture_is_encoded_as_the_end_of_the_clip(
    last_frame: int, worst: Callable[[str, float], None]
) -> None:
    """diffusers' VAE in float64 over the whole clip: first picture, grey, last picture."""
    config, weights = build(TWO)
    features = np.zeros((1, 10, 32), np.float32)
    frame = np.array([last_frame])
    pictures = np.stack((FIRST, LAST))[None]  # of one row
    with opened(config, weights, image=pictures, inputs={FEATURES: features, "last_frame": frame}) as session:
        table = input_buffer(session, "condition")
    clip = torch.zeros(1, 3, 4 * last_frame + 1, 32, 48, dtype=torch.float64)
    for at, picture in ((0, FIRST), (-1, LAST)):
        clip[0, :, at] = torch.from_numpy(picture).permute(2, 0, 1).double() / 127.5 - 1
    with torch.no_grad():
        whole = VaeOracle(torch.float64).encode(clip)[0]  # [z, frames, h, w]
    z = config.model.out_channels
    latents = table[4 + z :, min(last_frame, 29)]
    error = relative_error(latents, whole[:, -1])
    worst("last picture's latents against the whole clip", error)
    assert error <= VAE[torch.float32]


@pytest.mark.shows("clip")
def test_clip_sees_the_whole_picture_squashed(
    clip: tuple[Path, Any], worst: Callable[[str, float], None]
) -> None:
    """A session with the encoder makes the chunk of the features that transformers' class makes of the picture."""
    file, model = clip
    config, weights = build(ONE, file)
    begins = opening_with(manifest_of(config, weights), 1, start=PHOTO)
    image = begins["image"]
    with opened(config, weights, **begins) as session:
        chunk = torch.from_numpy(session.run_chunk().to_host().copy())
        session.restart_row(0, image=FIRST)
        restarted = torch.from_numpy(session.run_chunk().to_host().copy())
    bare, bare_weights = build(ONE)
    wanted = []
    for photo, start in ((PHOTO, image), (FIRST, FIRST)):
        features = seen_by(model, torch.from_numpy(photo)).numpy()
        with opened(bare, bare_weights, image=start, inputs={FEATURES: features}) as session:
            wanted.append(torch.from_numpy(session.run_chunk().to_host().copy()))
    for found, expected in zip((chunk, restarted), wanted, strict=True):
        error = relative_error(found, expected)
        worst("a session that sees its first picture", error)
        assert error <= STREAM_BAR
    assert relative_error(wanted[0], wanted[1]) > 100 * STREAM_BAR


def test_a_recording_after_a_restart_begins_with_the_picture_that_stays() -> None:
    config, weights = build(ONE)
    features = np.zeros((1, *config.model.picture_features), np.float32)
    with opened(config, weights, image=FIRST, inputs={FEATURES: features}) as stacked:
        (session,) = stacked.sessions
        session.restart(seed=5)
        assert np.array_equal(session.record().entries[0].opening["image"], FIRST)


def test_clip_sees_the_picture_of_a_restart_although_a_control_has_another(clip: tuple[Path, Any]) -> None:
    config, weights = build(ONE, clip[0])
    manifest = manifest_of(config, weights)
    controls = controls_of(manifest)
    controls["pictures"].take({"start": LAST})
    with opened(config, weights, **opening_with(manifest, 1, start=FIRST)) as stacked:
        wanted = stacked.run_chunk().to_host().copy()
        stacked.sessions[0].close()
        with stacked.pool.open_session(seed=3, text=golden_text(config), controls=controls) as session:
            session.restart(image=FIRST)
            assert np.array_equal(session.run_chunk().to_host(), wanted)


def test_two_pictures_of_any_sizes_and_the_last_frame_of_a_run(clip: tuple[Path, Any]) -> None:
    config, weights = build(TWO, clip[0])
    begins = opening_with(manifest_of(config, weights), start=PHOTO, last=LAST)
    image, inputs = begins["image"], begins["inputs"]
    assert image.shape == (2, 32, 48, 3)
    assert np.array_equal(image[1], LAST.astype(np.float32))
    assert inputs["last_frame"].tolist() == [7]  # the last of four chunks of two
    assert inputs["squashed"].shape == (2, 8, 8, 3)
    with opened(config, weights, image=image[None], inputs=inputs) as session:
        assert session.run_chunk().to_host().shape[-4:] == (16, 2, 4, 6)
        with pytest.raises(UsageError, match="image is uint8"):
            session.restart_row(0, image=FIRST)


@pytest.mark.parametrize(
    ("kind", "image", "last", "said"),
    [
        (TWO, PHOTO, None, "--image first.png: this artifact's model takes a last picture, too"),
        (ONE, PHOTO, LAST, "--last-image last.png: this artifact's model takes no last picture"),
        (ONE, None, None, "--image first.png is None, expected uint8"),
        (TWO, None, LAST, "--image first.png is None, expected uint8"),
    ],
)
def test_pictures_that_a_model_does_not_take(kind: str, image: Any, last: Any, said: str) -> None:
    names = {"start": "--image first.png", "last": "--last-image last.png"}
    with pytest.raises(UsageError, match=said):
        opening_with(manifest_of(*build(kind)), start=image, last=last, names=names)


def test_one_picture_in_a_list_of_one_and_another_that_is_not() -> None:
    """As .npy files may hold them."""
    with pytest.raises(UsageError, match=r"start is \[1, 32, 48, 3\] and last"):
        opening_with(
            manifest_of(*build(TWO)), start=PHOTO[None], last=LAST, names={"start": "start", "last": "last"}
        )


@pytest.mark.parametrize("fps", [1e308, 1e300, -16.0])
def test_a_last_picture_at_a_rate_that_no_video_has(fps: float) -> None:
    with pytest.raises(UsageError, match="fps is"):
        opening_with(manifest_of(*build(TWO)), start=PHOTO, last=LAST, last_s=600, fps=fps)


def test_a_stream_that_leads_to_a_picture_is_not_cut() -> None:
    """A cut would move the numbers of frames past that of the last picture, which then is never shown."""
    config = i2v_config(TWO, layout={"sink_frames": 2, "ring_frames": 4})
    begins = {name: value[0].numpy() for name, value in FAMILY.golden_inputs(config, None).items()}
    weights = weights_of(config, random_checkpoint(config))
    with opened(config, weights, inputs=begins) as stacked:
        stacked.run_chunk()
        with pytest.raises(UsageError, match="lead to a last picture"):
            stacked.sessions[0].cut()


def test_rows_of_a_pool_end_at_frames_of_their_own() -> None:
    """Mask and latents of the last picture stand in that frame alone; a row whose number is 0 has none."""
    config = i2v_config(TWO)
    condition = TwoPictureFrames(config)
    table = torch.randn(3, 36, 30, 4, 6)
    inputs = {"condition": table, "last_frame": torch.tensor([[0], [3], [40]])}
    frames = torch.tensor([[2, 3], [0, 1], [40, 41]])
    conditions = condition(inputs, frames, rows=torch.tensor([1, 0, 2]))
    assert conditions.shape == (3, 20, 2, 4, 6)
    assert torch.equal(conditions[0, :, 0], table[1, :20, 2])
    assert torch.equal(
        conditions[0, :, 1], torch.cat((table[1, :3, 3], torch.ones(1, 4, 6), table[1, 20:, 3]))
    )
    assert torch.equal(conditions[1], table[0, :20, :2])
    assert torch.equal(conditions[2, 4:, 0], table[2, 20:, 29])
    assert torch.equal(conditions[2, :, 1], table[2, :20, 29])
