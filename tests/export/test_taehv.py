"""The tiny decoders against flashdreams' streaming class and a naive one, and their files: recognised or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from scripts.make_checkpoint import main as make_checkpoint
from scripts.random_vae import tiny_spread
from seko_export import inspect
from seko_export.checkpoints.errors import NotACheckpointError, WeightKeysError
from seko_export.checkpoints.random import random_weight
from seko_export.errors import UsageError
from seko_export.media.load import load_vae, vae_weights
from seko_export.media.taehv.config import TaehvConfig
from seko_export.media.taehv.modules import TinyEncode, cache_shapes, encoder_cache_shapes
from seko_export.media.taehv.vae import VAE, encoder_shapes
from seko_export.media.vaes import vae_config_of, vae_of, vae_of_kind
from seko_export.media.wan_vae.config import LATENTS_MEAN, LATENTS_STD, VAE_PRESETS
from tests.export.taehv_oracle import Oracle, Weights, ours, random_weights, streamed
from tests.support.tolerances import VAE as VAE_BOUND
from tests.support.tolerances import relative_error
from tests.truth.naive_taehv import SUPER, TINY, decoded, encoded

TAE_2_1 = TaehvConfig(16, (8, 6, 4, 4))
TAE_2_2 = TaehvConfig(48, (8, 6, 4, 4), 2)
TAE_SUPER = TaehvConfig(48, (8, 6, 4, 4), 2, is_super=True)
LIGHT = replace(TAE_2_1, latents_mean=LATENTS_MEAN, latents_std=LATENTS_STD)
CUT = (2, 3, 1)
EXACT = {"rtol": 0, "atol": VAE_BOUND[torch.float64]}


def some_latents(config: TaehvConfig) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 2 * torch.randn(config.z_dim, sum(CUT), 3, 5, generator=generator, dtype=torch.float64)


def stream(config: TaehvConfig, weights: Weights, latents: Tensor, cut: tuple[int, ...] = CUT) -> Tensor:
    return streamed((ours(config, weights, first=True), ours(config, weights, first=False)), latents, cut)


def assert_contrast(pictures: Tensor) -> None:
    """Most numbers are neither cut to 0 nor to 1, and they differ."""
    assert ((pictures > 0) & (pictures < 1)).double().mean() > 0.8
    assert pictures.std() > 0.05


def written(path: Path, config: TaehvConfig, weights: Weights | None = None) -> Path:
    """A file of these weights, with a key of its encoder."""
    state = {name: value.float() for name, value in (weights or random_weights(config)).items()}
    save_file({**state, "encoder.0.weight": torch.zeros(64, 3, 3, 3)}, path)
    return path


@pytest.mark.shows("taehv")
@pytest.mark.parametrize("config", [TAE_2_1, TAE_2_2])
def test_a_stream_is_flashdreams(config: TaehvConfig) -> None:
    weights, latents = random_weights(config), some_latents(config)
    truth = Oracle(weights, config.z_dim, config.widths).decode(latents, CUT)
    frames = stream(config, weights, latents)
    assert frames.shape == (4 * sum(CUT) - 3, 3, 3 * 8 * config.patch_size, 5 * 8 * config.patch_size)
    assert_contrast(truth)
    torch.testing.assert_close(frames, truth, **EXACT)


@pytest.mark.parametrize(("config", "layers"), [(TAE_SUPER, SUPER), (TAE_2_1, TINY), (TAE_2_2, TINY)])
def test_a_stream_is_the_naive_clip(config: TaehvConfig, layers: str) -> None:
    weights, latents = random_weights(config), some_latents(config)
    truth = decoded(weights, latents, config.patch_size, layers)
    assert_contrast(truth)
    torch.testing.assert_close(stream(config, weights, latents), truth, **EXACT)
    torch.testing.assert_close(stream(config, weights, latents, (sum(CUT),)), truth, **EXACT)


def test_lighttae_takes_the_latents_of_the_vae() -> None:
    weights, latents = random_weights(TAE_2_1), some_latents(TAE_2_1)
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1) for values in (LATENTS_MEAN, LATENTS_STD)
    )
    light = stream(LIGHT, weights, latents)
    truth = decoded(weights, latents * std + mean, 1, TINY)
    torch.testing.assert_close(light, truth, **EXACT)
    assert (light - stream(TAE_2_1, weights, latents)).abs().max() > 0.1


def test_a_row_is_bytes_and_nine_caches() -> None:
    weights, latents = random_weights(TAE_2_1), some_latents(TAE_2_1)[:, :3]
    video, *caches = ours(TAE_2_1, weights, first=True)(latents)
    assert video.shape == (9, 24, 40, 3)
    assert video.dtype == torch.uint8
    assert [tuple(cache.shape) for cache in caches] == cache_shapes(TAE_2_1, 3, 5)
    assert len(caches) == 9
    exact = stream(TAE_2_1, weights, latents, (3,)).permute(0, 2, 3, 1)
    assert (video.double() / 255 - exact).abs().max() <= 0.5 / 255 + 1e-6
    with pytest.raises(ValueError, match="got 8 caches, expected 9"):
        ours(TAE_2_1, weights, first=False)(latents, *caches[:8])


def test_rows_of_more_frames_than_a_layer_makes_are_cut(tmp_path: Path) -> None:
    weights = {name: value.float() for name, value in random_weights(TAE_2_1).items()}
    stored = dict(weights)
    stored["decoder.7.conv.weight"] = torch.cat((torch.ones(8, 8, 1, 1), weights["decoder.7.conv.weight"]))
    file = written(tmp_path / "taew2_1.safetensors", TAE_2_1, stored)
    checkpoint = load_vae(file, TAE_2_1)
    assert torch.equal(checkpoint["decoder.7.conv.weight"], weights["decoder.7.conv.weight"])
    latents = some_latents(TAE_2_1)
    truth = Oracle({name: value.double() for name, value in stored.items()}, 16, TAE_2_1.widths).decode(
        latents, CUT
    )
    frames = stream(TAE_2_1, {name: checkpoint[name] for name in checkpoint.names}, latents)
    torch.testing.assert_close(frames, truth, **EXACT)


@pytest.mark.parametrize("name", ["lighttaew2_1.pth", *(f"{name}.safetensors" for name in VAE.presets)])
def test_a_random_file_has_the_published_names_and_tells_its_sizes(name: str, tmp_path: Path) -> None:
    file, preset = tmp_path / name, name.split(".")[0]
    assert make_checkpoint(["--vae", preset, "-o", str(file)]) == 0
    config = vae_config_of(file)
    assert config == VAE.presets[preset]
    assert vae_of(config) is VAE
    checkpoint = load_vae(file, config)
    published = {"taew2_1": 9.84, "taew2_2": 9.92, "taew2_2_super": 18.99}[preset.replace("light", "")]
    decoding = sum(tensor.numel() for key, tensor in checkpoint.items() if key.startswith("decoder."))
    assert round(decoding / 1e6, 2) == published
    assert config.encodes_video == ("super" not in preset)
    assert make_checkpoint(["--vae", preset, "-o", str(file)]) == 2


def test_a_random_lightvae_is_recognised_by_its_width(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert make_checkpoint(["--vae", "lightvae", "-o", str(file)]) == 0
    assert vae_config_of(file) == VAE_PRESETS["lightvae"]


def test_the_name_or_the_caller_tells_the_scale(tmp_path: Path) -> None:
    plain = written(tmp_path / "taew2_1.safetensors", TAE_2_1)
    light = written(tmp_path / "LightTAEw2_1.safetensors", TAE_2_1)
    assert vae_config_of(plain) == TAE_2_1 == vae_of_kind(LIGHT, "taehv", light)
    assert vae_config_of(light) == LIGHT == vae_of_kind(TAE_2_1, "lighttae", plain)
    assert TAE_2_1.title == "tiny decoder (TAEHV) of 16 latent channels, normalised"
    assert LIGHT.title == "tiny decoder (LightTAE) of 16 latent channels, unnormalised"
    assert torch.equal(vae_weights(light, LIGHT)["latents_std"], torch.tensor(LATENTS_STD))
    with pytest.raises(UsageError, match=r"--vae-kind wan: .*tiny decoder.*expected one of taehv, lighttae"):
        vae_of_kind(TAE_2_1, "wan", plain)
    with pytest.raises(UsageError, match=r"--vae-kind lighttae: .*super.*leave it out"):
        vae_of_kind(TAE_SUPER, "lighttae", plain)


def test_inspect_says_what_a_file_is(tmp_path: Path) -> None:
    report = inspect(written(tmp_path / "lighttaew2_1.safetensors", TAE_2_1))
    assert report["title"] == LIGHT.title
    assert report["notes"] == ["only its name tells taehv from lighttae: --vae-kind says which it is"]
    assert "self-forcing-1.3b" in report["presets"]
    assert "wan-5b" not in report["presets"]
    assert not report["encodes_pictures"]


def test_other_tiny_decoders_are_refused(tmp_path: Path) -> None:
    other = written(tmp_path / "hunyuan.safetensors", TaehvConfig(32, (8, 6, 4, 4), 2))
    with pytest.raises(
        NotACheckpointError, match="32 latent channels and 12 numbers a place, of another model"
    ):
        vae_config_of(other)
    cut = written(
        tmp_path / "cut.safetensors",
        TAE_2_1,
        {name: value for name, value in random_weights(TAE_2_1).items() if "decoder.22" not in name},
    )
    with pytest.raises(
        NotACheckpointError, match=r"looks like a tiny decoder, but has no weight decoder\.22"
    ):
        vae_config_of(cut)
    empty = random_weights(TAE_2_1) | {"decoder.14.weight": torch.zeros(0, 6, 3, 3)}
    with pytest.raises(
        NotACheckpointError, match="a VAE that cannot be built: a size of the tiny decoder is below 1"
    ):
        inspect(written(tmp_path / "empty.safetensors", TAE_2_1, empty))
    narrow = random_weights(TAE_2_1) | {
        "decoder.9.conv.2.weight": torch.zeros(5, 6, 3, 3),
        "more": torch.ones(1),
    }
    file = written(tmp_path / "narrow.safetensors", TAE_2_1, narrow)
    with pytest.raises(WeightKeysError, match=r"1 unknown: more\n.*\[5, 6, 3, 3\], expected \[6, 6, 3, 3\]"):
        load_vae(file, vae_config_of(file))


@pytest.mark.parametrize("sizes", [{"z_dim": 0}, {"widths": (8, 8)}, {"latents_std": (1.0,)}])
def test_sizes_that_contradict_each_other_are_refused(sizes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(TAE_2_1, **sizes)  # type: ignore[arg-type]


# -- the encoder ----------------------------------------------------------------------------------------------------


def encoder_weights(config: TaehvConfig) -> Weights:
    return {
        name: random_weight(name, shape, seed=1, dtype=torch.float64, spread=tiny_spread)
        for name, shape in encoder_shapes(config).items()
    }


def encoder(config: TaehvConfig, weights: Weights, *, first: bool, dtype: torch.dtype) -> TinyEncode:
    made = TinyEncode(config, first=first, dtype=dtype)
    left = made.load_state_dict(dict(weights), strict=False)
    assert not left.unexpected_keys
    return made.eval().requires_grad_(False)


def some_video(config: TaehvConfig) -> Tensor:
    """A video of all latent frames, [T, H, W, 3] uint8, in front of it three frames that nothing reads."""
    side = config.spatial_stride
    shape = (4 * sum(CUT), 3 * side, 5 * side, 3)
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(2), dtype=torch.uint8)


def stream_encoded(config: TaehvConfig, weights: Weights, dtype: torch.dtype, cut: tuple[int, ...]) -> Tensor:
    done, caches = [], ()
    for call, frames in enumerate(some_video(config).split([4 * part for part in cut])):
        latents, *kept = encoder(config, weights, first=not call, dtype=dtype)(frames, *caches)
        done.append(latents)
        caches = tuple(kept)
        assert [tuple(cache.shape) for cache in caches] == encoder_cache_shapes(config, 3, 5)
    return torch.cat(done, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("config", [TAE_2_1, TAE_2_2])
def test_a_video_in_calls_is_encoded_as_the_naive_clip(
    config: TaehvConfig, dtype: torch.dtype, worst
) -> None:
    """The first latent frame stands for one video frame, which the encoder sees four times."""
    config = replace(config, encoder_width=8)
    weights, video = encoder_weights(config), some_video(config).permute(0, 3, 1, 2) / 255.0
    whole = torch.cat((video[3:4].expand(3, -1, -1, -1), video[3:]))
    expected = encoded(weights, whole, config.patch_size)
    for cut in (CUT, (6,), (1, 1, 1, 1, 1, 1)):
        error = relative_error(stream_encoded(config, weights, dtype, cut), expected)
        worst(f"tiny encoder, {dtype}", error)
        assert error <= VAE_BOUND[dtype if dtype is torch.float32 else torch.float32], cut
    assert torch.equal(
        stream_encoded(config, weights, dtype, (2, 4)), stream_encoded(config, weights, dtype, (2, 4))
    )


def test_lighttaes_encoder_gives_normalised_latents() -> None:
    config = replace(TAE_2_1, encoder_width=8)
    weights = encoder_weights(config)
    plain = stream_encoded(config, weights, torch.float64, CUT)
    light = replace(config, latents_mean=LATENTS_MEAN, latents_std=LATENTS_STD)
    statistics = {
        "latents_mean": torch.tensor(LATENTS_MEAN, dtype=torch.float64),
        "latents_std": torch.tensor(LATENTS_STD, dtype=torch.float64),
    }
    mean, std = (value.view(-1, 1, 1, 1) for value in statistics.values())
    made = stream_encoded(light, {**weights, **statistics}, torch.float64, CUT)
    torch.testing.assert_close(made, (plain - mean) / std, rtol=1e-9, atol=1e-9)


def test_a_file_whose_encoder_is_another_one_only_decodes(tmp_path: Path) -> None:
    other = written(tmp_path / "taew2_1.safetensors", TAE_2_1)  # with one key of an encoder
    assert not vae_config_of(other).encodes_video  # type: ignore[union-attr]
    whole = replace(TAE_2_1, encoder_width=8)
    state = {**random_weights(TAE_2_1), **encoder_weights(whole)}
    save_file({name: value.float() for name, value in state.items()}, tmp_path / "whole.safetensors")
    assert vae_config_of(tmp_path / "whole.safetensors") == whole
    checkpoint = load_vae(tmp_path / "whole.safetensors", whole)
    assert torch.equal(checkpoint["encoder.7.conv.weight"], state["encoder.7.conv.weight"].float())
    with pytest.raises(UsageError, match="a whole VAE"):
        VAE.video_encoder(whole, first=True, frames=1, dtype=torch.float32, normalised=False)
