"""Models of every family whose video a tiny decoder makes: against the naive decoder; pictures by another VAE."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from seko_export import BuildOptions, build
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.errors import UsageError
from seko_export.families.registry import graph_of, presets
from seko_export.media.taehv.config import TaehvConfig
from seko_export.media.wan_vae.config import LATENTS_MEAN, LATENTS_STD, WanVaeConfig
from seko_export.workloads.registry import workload_named
from seko_runtime import open_artifact
from tests.export.media_files import VAE, write_vae
from tests.export.taehv_oracle import random_weights
from tests.support.stacked import open_stacked
from tests.support.uncompiled import leave_uncompiled
from tests.truth.naive_taehv import TINY, decoded

TAE = TaehvConfig(16, (8, 6, 4, 4))
FAMILIES = {
    "tiny": {"encode"},
    "lingbot-tiny": {"encode", "condition"},
    "seko-talk-tiny": {"encode"},
}  # presets, with the programs that take a picture
LAST_LEVEL = 1  # of 255: rounding of a number that lies between two


def config_of(
    name: str, vae: TaehvConfig | WanVaeConfig, encoder: TaehvConfig | WanVaeConfig | None = None
) -> VideoBuild:
    preset = presets()[name]
    schedule = preset.schedule or Schedule.warped()
    work = VideoConfig(preset.stream, schedule, "fp32", vae=vae, vae_encoder=encoder)
    return VideoBuild(preset.model, work, TargetConfig("cpu"))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_takes_a_tiny_decoder_and_another_encoder(name: str) -> None:
    bare, whole = graph_of(config_of(name, TAE)), graph_of(config_of(name, TAE, VAE))
    assert not {"encode", "condition"} & bare.programs.keys()
    assert whole.programs.keys() - bare.programs.keys() == FAMILIES[name]
    assert sum(buffer.name.startswith("vae.cache.") for buffer in whole.buffers) == 9
    of_encoder = {piece.prefix for key, piece in whole.pieces.items() if key.startswith("vae_encode")}
    assert of_encoder == {"vae_encoder."}
    assert {whole.pieces[key].prefix for key in ("vae_decode_first", "vae_decode")} == {"vae."}


def test_encoders_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--vae-encoder is for a --vae that only decodes"):
        config_of("tiny", VAE, VAE)
    with pytest.raises(UsageError, match=r"--vae-encoder: a tiny decoder .* encodes no pictures"):
        config_of("tiny", TAE, TAE)
    with pytest.raises(UsageError, match="base_dim 4 has 8 latent channels, 'tiny' gives 16"):
        config_of("tiny", TAE, replace(VAE, z_dim=8, latents_mean=(0.0,) * 8, latents_std=(1.0,) * 8))
    with pytest.raises(UsageError, match="VAE's strides are 16 pixels and 4 frames, expected 8 and 4"):
        config_of("tiny", TaehvConfig(48, patch_size=2))
    for option in ({"vae_encoder": Path("vae.pth")}, {"vae_kind": "taehv"}):
        with pytest.raises(UsageError, match="needs --vae: name its file"):
            BuildOptions(**option)  # type: ignore[arg-type]


@pytest.mark.slow
# Torch's own warnings, of what its compiler imports when a `compile` artifact is opened in this process.
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
def test_the_video_is_the_naive_decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a family whose sessions begin with a picture."""
    leave_uncompiled(monkeypatch)
    weights = {key: value.float() for key, value in random_weights(TAE).items()}
    save_file(weights, tmp_path / "lighttae.safetensors")
    notes: list[str] = []
    built = build(
        BuildOptions(
            preset="lingbot-tiny",
            random_weights=0,
            vae=tmp_path / "lighttae.safetensors",
            vae_encoder=write_vae(tmp_path / "vae"),
            backend="compile",
        ),
        tmp_path / "artifact",
        compiler_cache=False,
        note=notes.append,
    )
    assert any("is taken as a tiny decoder (LightTAE)" in sentence for sentence in notes)
    workload_named("video").warm_up(built.artifact)  # with a picture
    latents: list[Tensor] = []
    video: list[Tensor] = []
    with open_artifact(built.artifact) as artifact, open_stacked(artifact, seeds=(3,)) as session:
        for number in range(2):
            chunk = session.run_chunk(artifact.golden_inputs(number, None))
            latents.append(torch.from_numpy(chunk.to_host())[0])
            video.append(torch.from_numpy(chunk.video())[0])
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1) for values in (LATENTS_MEAN, LATENTS_STD)
    )
    truth = decoded(weights, torch.cat(latents, 1).double() * std + mean, 1, TINY) * 255
    pixels = torch.cat(video).permute(0, 3, 1, 2).double()
    assert pixels.std() > 10
    assert (pixels - truth).abs().max() <= LAST_LEVEL
