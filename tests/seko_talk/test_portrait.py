"""CLIP's features of the portrait: the encoder against transformers, and sessions that are given the picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.checkpoints.errors import NotACheckpointError, WeightKeysError
from seko_export.config.media import ClipConfig
from seko_export.engines.piece import on_meta
from seko_export.errors import UsageError
from seko_export.families.base import MediaTensors
from seko_export.families.seko_talk import audio, picture
from seko_export.families.seko_talk.family import FAMILY
from seko_export.families.wan_layout import picture_branch
from seko_export.media.clip.encoder import ClipFeatures
from seko_export.media.clip.files import clip_config_of, clip_shapes, clip_weights, load_clip
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_export.video.media import open_media
from seko_export.video.plan.memory import weight_bytes
from seko_export.video.plan.predict import PlanRequest, config_of
from seko_export.video.recording import golden_text
from seko_runtime.errors import UsageError as RuntimeUsageError
from tests.seko_talk.streams import (
    opened,
    random_checkpoint,
    random_reference,
    seen_by,
    talk_config,
    weights_of,
    write_clip,
)
from tests.support.stacked import eager_session
from tests.support.tolerances import ORACLE, relative_error

WIDTH = 32
STREAM_BAR = 5e-5  # two passes in float32 that feed on each other


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A CLIP file and transformers' model of it."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    file = tmp_path_factory.mktemp("clip") / "models_clip_open-clip.pth"
    return file, write_clip(file, WIDTH)


def photograph(seed: int, height: int = 32, width: int = 48) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)


def seeing(file: Path | None, **model: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A build of the tiny preset, with or without the encoder, and its weights."""
    config = talk_config(model={"image_dim": WIDTH, **model})
    media = None
    if file is not None:
        config = config.changed(image=clip_config_of(file))
        media = MediaTensors(image=load_clip(file, clip_config_of(file)))
    return config, weights_of(config, random_checkpoint(config), media)


@pytest.mark.parametrize("size", [(32, 48), (5, 7)])
def test_the_encoder_is_transformers(
    size: tuple[int, int], clip: tuple[Path, Any], worst: Callable[[str, float], None]
) -> None:
    """All blocks but the last, without a last norm; pictures that shrink and that grow."""
    file, model = clip
    config = clip_config_of(file)
    assert config == ClipConfig(WIDTH, 2, 16, 2 * WIDTH, 4, 8)
    encoder = on_meta(lambda: ClipFeatures(config)).to_empty(device="cpu")
    encoder.load_state_dict(dict(load_clip(file, config).items()))
    pictures = torch.stack([photograph(seed, *size) for seed in (0, 1)])
    with torch.no_grad():
        features = encoder(pictures)
    for seen, photo in zip(features, pictures, strict=True):
        error = relative_error(seen, seen_by(model, photo))
        worst("CLIP", error)
        assert error <= ORACLE[torch.float32]
    assert relative_error(features[0], features[1]) > 0.01


@pytest.mark.parametrize("prefix", ["vision_model.", ""])
def test_transformers_files_hold_the_same_encoder(
    prefix: str, clip: tuple[Path, Any], tmp_path: Path
) -> None:
    """As a diffusers pipeline has it: queries, keys and values apart, with and without the prefix of its class."""
    file, model = clip
    state = {name.removeprefix("vision_model."): tensor for name, tensor in model.state_dict().items()}
    folder = tmp_path / "image_encoder"
    folder.mkdir()
    save_file(
        {prefix + name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )
    config = clip_config_of(file)
    assert clip_config_of(folder) == clip_config_of(tmp_path) == config
    ours, theirs = clip_weights(file, config), clip_weights(folder, config)
    for name, parameter in on_meta(lambda: ClipFeatures(config)).named_parameters():
        assert torch.equal(theirs[name].reshape(parameter.shape), ours[name])
    state.pop("encoder.layers.1.self_attn.k_proj.bias")
    save_file(
        {prefix + name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )
    with pytest.raises(WeightKeysError, match=r"1 missing: encoder\.layers\.1\.self_attn\.k_proj\.bias"):
        load_clip(folder, config)


def test_the_real_layout_has_the_shapes_of_the_file() -> None:
    """ViT-H/14 of open_clip, as Wan's code names it: 32 blocks in the file, 31 of them used."""
    shapes = clip_shapes(ClipConfig())
    assert ClipConfig().tokens == 257
    assert shapes["patch_embedding.weight"] == (1280, 3, 14, 14)
    assert (shapes["cls_embedding"], shapes["pos_embedding"]) == ((1, 1, 1280), (1, 257, 1280))
    assert shapes["pre_norm.bias"] == (1280,)
    assert shapes["transformer.31.attn.to_qkv.weight"] == (3840, 1280)
    assert shapes["transformer.0.attn.proj.bias"] == (1280,)
    assert (shapes["transformer.7.mlp.0.weight"], shapes["transformer.7.mlp.2.weight"]) == (
        (5120, 1280),
        (1280, 5120),
    )
    assert "patch_embedding.bias" not in shapes
    assert not any(name.startswith("transformer.32.") for name in shapes)


def test_other_files_are_refused(clip: tuple[Path, Any], tmp_path: Path) -> None:
    file, _ = clip
    stored = torch.load(file, weights_only=True)
    for number, (change, message) in enumerate(
        (
            ({"visual.transformer.2.norm1.bias": None}, "1 missing: visual.transformer.2.norm1.bias"),
            ({"visual.extra": torch.zeros(1)}, "1 unknown: visual.extra"),
            ({"visual.cls_embedding": torch.zeros(1, 1, 3)}, "1 mis-shaped: visual.cls_embedding"),
        )
    ):
        odd = {name: tensor for name, tensor in (stored | change).items() if tensor is not None}
        torch.save(odd, tmp_path / f"{number}.pth")
        with pytest.raises(WeightKeysError, match=message):
            load_clip(tmp_path / f"{number}.pth", clip_config_of(tmp_path / f"{number}.pth"))
    torch.save(stored | {"visual.pos_embedding": torch.zeros(1, 4, WIDTH)}, tmp_path / "odd.pth")
    with pytest.raises(NotACheckpointError, match="holds no CLIP image encoder"):
        clip_config_of(tmp_path / "odd.pth")
    with pytest.raises(UsageError, match="makes 5 features, each 32 wide; 'seko-talk-tiny' takes 5, each 40"):
        talk_config(image=clip_config_of(file))
    with pytest.raises(UsageError, match="takes no features of a picture"):
        talk_config(model={"image_dim": 0}, image=clip_config_of(file))


def test_a_model_folder_has_it_and_a_model_without_the_branch_leaves_it(
    clip: tuple[Path, Any], tmp_path: Path
) -> None:
    for name, width in (("sees", WIDTH), ("blind", 0)):
        config = talk_config(model={"image_dim": width})
        write_random_checkpoint(tmp_path / name, config.model, seed=0, dtype=torch.float32)
        clip_file = tmp_path / name / clip[0].name
        clip_file.write_bytes(clip[0].read_bytes())
        resolved = resolve_build(
            BuildOptions(model_folder=tmp_path / name, window_positions=True, target="cpu")
        )
        assert resolved.media.image_encoder == (clip_file if width else None)
        assert resolved.config.workload.image == (clip_config_of(clip_file) if width else None)
        assert any("has no picture branch" in note for note in resolved.notes) == (not width)
        open_media(resolved.media, resolved.config)
    with pytest.raises(UsageError, match="takes no features of a picture"):
        resolve_build(
            BuildOptions(tmp_path / "blind", window_positions=True, image_encoder=clip[0], target="cpu")
        )


def test_its_weights_are_counted(clip: tuple[Path, Any]) -> None:
    config, _ = config_of(PlanRequest(BuildOptions(preset="seko-talk-14b"), "h200"))
    assert config.workload.image == ClipConfig()
    config, _ = seeing(clip[0])
    own = load_clip(clip[0], clip_config_of(clip[0])).items()
    assert weight_bytes(config, FAMILY.graph(config).pieces)["image"] == sum(
        tensor.nbytes for _, tensor in own
    )


def test_a_session_sees_the_portrait_that_it_is_given(
    clip: tuple[Path, Any], worst: Callable[[str, float], None]
) -> None:
    """The chunks are those of features that transformers makes; another portrait makes other ones."""
    file, model = clip
    bare, weights = seeing(None)
    portrait, text, photo = random_reference(bare), golden_text(bare), photograph(0)
    voices = [FAMILY.golden_inputs(bare, number)[audio.AUDIO].numpy() for number in range(3)]

    def chunks(config: Any, weights: dict[str, torch.Tensor], inputs: dict[str, Any]) -> list[torch.Tensor]:
        with eager_session(config, weights, text, [3], reference=portrait) as session:
            session.set_inputs(inputs)
            return [torch.from_numpy(session.run_chunk({"audio": voice}).to_host()) for voice in voices]

    wanted = chunks(bare, weights, {picture_branch.FEATURES: seen_by(model, photo).numpy()})
    config, seeing_weights = seeing(file)
    streamed = chunks(config, seeing_weights, {picture.PORTRAIT: photo.numpy()})
    other = chunks(config, seeing_weights, {picture.PORTRAIT: photograph(1).numpy()})
    for latents, right, wrong in zip(streamed, wanted, other, strict=True):
        error = relative_error(latents, right)
        worst("a session that sees", error)
        assert error <= STREAM_BAR
        assert relative_error(wrong, right) > 10 * STREAM_BAR


def test_sessions_of_a_pool_have_portraits_of_their_own(clip: tuple[Path, Any]) -> None:
    """Beside each other as alone, and after a change of the prompt still the same portrait."""
    config, _ = seeing(clip[0])
    media = MediaTensors(image=load_clip(clip[0], clip_config_of(clip[0])))
    text, reference = golden_text(config).numpy(), random_reference(config)[0].numpy()
    voice = FAMILY.golden_inputs(config, 0)[audio.AUDIO][0].numpy()

    def opening(row: int) -> dict[str, Any]:
        return {
            "seed": 3,
            "text": text,
            "reference": reference,
            "inputs": {"portrait": photograph(row).numpy()},
        }

    with opened(config, media=media) as pool:
        with pytest.raises(RuntimeUsageError, match="input 'portrait' is required per prompt"):
            pool.open_session(**{**opening(0), "inputs": {}})
        alone = []
        for row in range(2):
            with pool.open_session(**opening(row)) as session:
                alone.append(session.run_chunk({"audio": voice}).to_host())
        assert not np.array_equal(*alone)
        sessions = [pool.open_session(**opening(row)) for row in range(2)]
        for session in sessions:
            session.set_text(text)
        together = pool.run(sessions, [{"audio": voice}] * 2)
        for latents, chunk in zip(alone, together, strict=True):
            assert relative_error(torch.from_numpy(chunk.to_host()), torch.from_numpy(latents)) <= STREAM_BAR
        for session in sessions:
            session.close()
