"""An artifact with text encoder and VAE: its frames against the clip at once; compiled engines against modules."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from seko_export.backends.aoti import compile_piece
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.engines.piece import FlatModule
from seko_export.errors import NumericError, UsageError
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.wan.presets import PRESETS
from seko_export.host.compiler_cache import CACHE_VARIABLE
from seko_export.lowering.agree import LEVELS, check_agrees, random_inputs
from seko_export.media.wan_vae.modules import VaeDecode, VaeEncode
from seko_export.video.bounds import TOLERANCES
from seko_export.video.media import prompt_ids
from seko_export.video.recording import GOLDEN_PROMPT, encoded_text, video_step
from seko_runtime import open_artifact
from seko_runtime.video.manifest import parse_video_manifest
from tests.export.media_files import TEXT, VAE, write_tokenizer
from tests.export.test_cli import NUMERIC, last_json, rewrite_manifest
from tests.serve.artifacts import make_single
from tests.support.shared import made_once
from tests.support.small_artifact import MODEL, STREAM
from tests.support.stacked import eager_session, open_stacked
from tests.support.tolerances import VAE as VAE_BAR
from tests.support.tolerances import relative_error
from tests.support.uncompiled import leave_uncompiled

CONFIG = VideoBuild(  # of `make_single`
    replace(MODEL, name="film", in_channels=16, out_channels=16, text_dim=TEXT.dim),
    VideoConfig(STREAM, Schedule.warped(), "fp32", text=TEXT, vae=VAE),
    TargetConfig("cpu"),
)
MEDIA = ("text_start", "text_layer", "text_end", "vae_encode", "vae_decode_first", "vae_decode")
EXACT = TOLERANCES[torch.float32]["exact"]
# Torch's own warning, of what its compiler imports when a `compile` artifact is opened in this process.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")


@pytest.fixture(autouse=True)
def programs_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled when the artifact is opened here, nor in processes started here."""
    leave_uncompiled(monkeypatch)


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with text encoder and VAE; its engines are exported programs. Not to be changed."""
    return made_once(tmp_path_factory, "serve-single", make_single) / "artifact"


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that compiles a piece by AOTInductor, as a build does, and returns the package."""
    home = tmp_path_factory.mktemp("packages")

    @cache
    def compiled(name: str) -> Path:
        package = home / f"{name}.pt2"
        with (
            pytest.MonkeyPatch.context() as patch,
            torch._inductor.config.patch(compile_threads=1),
            warnings.catch_warnings(action="ignore"),  # torch's own
        ):
            patch.setenv(CACHE_VARIABLE, str(home / "cache"))
            compile_piece(CONFIG, make_pieces(CONFIG)[name], package)
        return package

    return compiled


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in (folder / "weights").iterdir() for name, t in load_file(file).items()}


def half_of(folder: Path, kind, *, frames: int):
    """The plain VAE with the artifact's weights, for a clip of so many latent frames at once."""
    half = kind(VAE, first=True, frames=frames).eval().requires_grad_(False)
    weights = weights_of(folder)
    half.load_state_dict({name: weights[f"vae.{name}"] for name in half.state_dict()})
    return half


@pytest.mark.slow
def test_what_is_in_it(media, invoke):
    manifest = parse_video_manifest((media / "manifest.json").read_bytes())
    assert manifest.workload.text is not None
    assert (
        manifest.workload.text.tokens,
        manifest.workload.text.pad_id,
        manifest.workload.text.truncate,
    ) == (4, 0, True)
    assert manifest.workload.text.tokenizer == "text/tokenizer.json"
    assert manifest.workload.golden is not None
    assert manifest.workload.golden.prompt == GOLDEN_PROMPT
    assert manifest.workload.golden.video_step == 1
    assert manifest.workload.schedule.shift == 5.0
    assert set(MEDIA) < {engine.name for engine in manifest.engines}
    golden = load_file(media / "golden/golden.safetensors")
    assert golden["video.0"].shape == (1, 5, 32, 48, 3)
    assert golden["video.0"].dtype == torch.uint8
    assert golden["video.2"].shape == (1, 8, 32, 48, 3)
    assert golden["video.0"].unique().numel() > 50  # a picture, not one colour
    report = last_json(invoke("inspect", media, "--json"))
    assert report["text"]["tokens"] == 4
    assert report["video"] == {
        "first_frames": 5,
        "chunk_frames": 8,
        "height": 32,
        "width": 48,
        "decoder": VAE.title,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text_layer", "vae_encode"])
def test_engine_equals_its_module(packaged, name):
    """Every output; nothing that goes in is written."""
    piece = make_pieces(CONFIG)[name]
    inputs, untouched = random_inputs(piece, "cpu"), random_inputs(piece, "cpu")
    package = str(packaged(name))
    with torch.no_grad():
        wanted = FlatModule(piece)(*inputs)
        loader = torch._C._aoti.AOTIModelPackageLoader(package, "model", True, 1, -1)
        got = loader.boxed_run(list(inputs))
    assert not loader.get_constant_fqns()
    for argument, found, expected in zip(piece.outputs, got, wanted, strict=True):
        assert (tuple(found.shape), found.dtype) == (argument.shape, argument.dtype)
        assert found.is_contiguous()
        if found.dtype == torch.uint8:
            assert (found.int() - expected.int()).abs().max() <= 1
            assert (found != expected).float().mean() <= 1e-3
        else:
            assert relative_error(found, expected) <= 10 * VAE_BAR[torch.float32], argument.name
    assert all(map(torch.equal, inputs, untouched))


@pytest.mark.slow
def test_an_engine_of_other_numbers_is_found(packaged, monkeypatch):
    """What the build asks of each of them: the encoder's package does not pass for one with another deviation."""
    piece = make_pieces(CONFIG)["vae_encode"]
    package = packaged("vae_encode")
    check_agrees(piece, package, "cpu")
    forward = piece.module.forward
    # The engines of a process share their modules, so it has its own numbers again behind this test.
    monkeypatch.setattr(piece.module, "forward", lambda *x: tuple(1.001 * result for result in forward(*x)))
    with pytest.raises(NumericError, match=r"'vae_encode': its output latents differs .* by 0\.00"):
        check_agrees(piece, package, "cpu")
    assert LEVELS[torch.float32] < 1


@pytest.mark.slow
def test_frames_are_the_clip_decoded_at_once(media):
    """Three chunks, through caches and bytes, against one call of the plain VAE in float32."""
    with (
        open_artifact(media, device="cpu") as artifact,
        open_stacked(artifact, seeds=[3]) as session,
    ):
        latents, frames = [], []
        for _ in range(3):
            chunk = session.run_chunk()
            latents.append(torch.from_numpy(chunk.to_host()))
            frames.append(chunk.video())
    assert [f.shape[1] for f in frames] == [5, 8, 8]
    clip = half_of(media, VaeDecode, frames=6)(torch.cat(latents, dim=2))[0]
    wanted = ((clip.double() + 1) * 127.5).permute(0, 2, 3, 4, 1)  # [B, T, H, W, 3]
    got = torch.from_numpy(np.concatenate(frames, axis=1)).double()
    assert (got - wanted).abs().max() <= 0.5 + 1e-3  # rounding to a level, and of the layers in float32


@pytest.mark.slow
def test_a_sentence_is_encoded_as_the_golden_was(media):
    """The engine's embeddings lead to the golden's chunk; another sentence leads elsewhere."""
    golden = load_file(media / "golden/golden.safetensors")
    with open_artifact(media, device="cpu") as artifact:
        with open_stacked(artifact, seeds=[0], prompt=GOLDEN_PROMPT) as session:
            same = torch.from_numpy(session.run_chunk().to_host())
        with open_stacked(artifact, seeds=[0], prompt="a blue square") as session:
            other = torch.from_numpy(session.run_chunk().to_host())
    assert relative_error(same, golden["latents.0"]) <= EXACT
    assert relative_error(other, golden["latents.0"]) > 100 * EXACT


@pytest.mark.slow
def test_a_start_image_is_the_first_latent_frame(media):
    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    video = torch.from_numpy(image).permute(2, 0, 1)[None, :, None].float() / 127.5 - 1
    wanted = half_of(media, VaeEncode, frames=1)(video)[0]
    with (
        open_artifact(media, device="cpu") as artifact,
        open_stacked(artifact, seeds=[0], image=image) as session,
    ):
        latents = torch.from_numpy(session.run_chunk().to_host())
    for row in latents:
        assert relative_error(row[:, :1], wanted[0]) <= EXACT


@pytest.mark.slow
def test_the_eager_session_gives_the_same_frames(media):
    weights = weights_of(media)
    ids = prompt_ids(media / "text/tokenizer.json", CONFIG, GOLDEN_PROMPT)
    assert ids is not None
    text = encoded_text(CONFIG, weights, ids)
    assert text.shape == (1, 4, 64)
    golden = load_file(media / "golden/golden.safetensors")
    assert torch.equal(text, golden["text"])
    with eager_session(CONFIG, weights, text, [0]) as session:
        chunk = session.run_chunk()
        assert np.array_equal(chunk.video(), golden["video.0"].numpy())
    short = prompt_ids(media / "text/tokenizer.json", CONFIG, "a disc")
    assert short is not None
    words = int((short != 0).sum())
    assert words < 4
    assert not encoded_text(CONFIG, weights, short)[:, words:].any()


@pytest.mark.slow
def test_another_vae_does_not_verify(media, invoke, tmp_path):
    """The latents are right, the pictures are not: verify sees them."""
    folder = Path(shutil.copytree(media, tmp_path / "copy"))
    for file in (folder / "weights").iterdir():
        tensors = load_file(file)
        if "vae.decoder.head.2.weight" in tensors:
            tensors["vae.decoder.head.2.weight"].neg_()
            save_file(tensors, file)
    rewrite_manifest(folder)
    result = invoke("verify", folder, "--json")
    assert result.exit_code == NUMERIC
    worst = last_json(result)["worst"]
    assert worst["golden"] <= worst["tolerance"]
    assert worst["video"] > 10 * worst["video_tolerance"]


def test_video_samples_fit_a_megabyte():
    full = PRESETS["self-forcing-1.3b"]
    config = VideoBuild(
        full.model, VideoConfig(full.stream, Schedule.warped(), "fp32", vae=VAE), TargetConfig("cpu")
    )
    step = video_step(config)
    assert 12 * -(-480 // step) * -(-832 // step) * 3 <= 1_000_000
    assert 12 * -(-480 // (step - 1)) * -(-832 // (step - 1)) * 3 > 1_000_000
    assert (
        video_step(
            VideoBuild(full.model, VideoConfig(full.stream, Schedule.warped(), "fp32"), TargetConfig("cpu"))
        )
        == 0
    )


def test_tokenizers_of_other_models_are_refused(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["disc"] = TEXT.vocab_size
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match="gives token 32, the text encoder has 32"):
        prompt_ids(tmp_path / "tokenizer.json", CONFIG, "a red disc")
