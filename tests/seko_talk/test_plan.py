"""What `plan` counts of a model that hears: its audio encoder, and what is kept of a chunk's audio."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seko_export.config.media import HubertConfig
from seko_export.families.seko_talk.family import FAMILY
from seko_export.options.declaration import BuildOptions
from seko_export.video.plan.memory import weight_bytes
from seko_export.video.plan.predict import PlanRequest, config_of, predict
from seko_export.video.plan.table import show
from tests.seko_talk.streams import talk_config


def test_the_usual_audio_encoder_is_counted() -> None:
    """Of the full-size model that of the large HuBERT; of another width none, and a note says so."""
    config, notes = config_of(PlanRequest(BuildOptions(preset="seko-talk-14b"), "h200"))
    assert config.workload.audio == HubertConfig()
    assert not any("audio" in note for note in notes)
    config, notes = config_of(PlanRequest(BuildOptions(preset="seko-talk-tiny"), "h200"))
    assert config.workload.audio is None
    assert any("no audio encoder counted: none is known that is 48 wide" in note for note in notes)


def test_its_weights_are_a_line_of_their_own() -> None:
    encoder = HubertConfig(48, 2, 2, 32, (8,) * 7, position_kernel=16, position_groups=4)
    plain, hears = talk_config(), talk_config(audio=encoder)
    without, hearing = (weight_bytes(config, FAMILY.graph(config).pieces) for config in (plain, hears))
    assert "audio" not in without
    assert hearing["transformer"] == without["transformer"]
    encoder_piece = next(piece for piece in FAMILY.graph(hears).pieces.values() if "hubert" in piece.name)
    assert hearing["audio"] == sum(
        parameter.numel() * parameter.itemsize for parameter in encoder_piece.module.parameters()
    )
    with pytest.raises(KeyError):
        FAMILY.graph(plain).pieces["chunk_hubert"]


# Latent frames of 1560 tokens, 40 heads of 128 channels, keys and values of two bytes: bf16.
FRAME_BYTES = 1560 * 40 * 128 * 2 * 2


@pytest.mark.slow
def test_four_sessions_with_a_cache_for_each_pass_fit_in_fp4() -> None:
    """18.6 GiB for a session of the two-step hybrid model in bf16: four fit on one H200 in FP4, and not in bf16."""
    preset, frames, sessions = "seko-talk-14b-hybrid", 2 * (32 * (2 + 2) + 8 * (2 + 21)), 4
    plan = {
        kv: predict(
            PlanRequest(
                BuildOptions(preset=preset, kv=kv, no_vae=True, no_text=True, sessions=sessions, batch=(1,)),
                "h200",
            )
        )
        for kv in ("bf16", "fp4")
    }
    exact = plan["bf16"]["session_bytes"]["kv"]
    slots = 8 * 22  # which frame lies in each slot of a ring; of two rings at most twice
    assert frames * FRAME_BYTES <= exact <= frames * FRAME_BYTES + 2 * slots
    assert plan["fp4"]["session_bytes"]["kv"] < 0.2815 * exact
    assert plan["fp4"]["fits"]
    assert plan["fp4"]["sessions_fit"] >= sessions
    assert not plan["bf16"]["fits"]


def test_ranks_share_cache_and_layers_but_not_the_voice() -> None:
    """Of two GPUs each has half of the cache and all weights; layers exchange twice, the head once."""
    options = BuildOptions(preset="seko-talk-tiny", kv="bf16", kernels="plain", no_vae=True, no_text=True)
    whole, half = (predict(PlanRequest(replace(options, ranks=ranks), "h200")) for ranks in (1, 2))
    assert half["weight_bytes"] == whole["weight_bytes"]
    slots = whole["session_bytes"]["kv"] - 2 * half["session_bytes"]["kv"]
    assert -8 * 6 <= slots <= 0  # which frame lies in each of six slots is known to both
    assert "exchange" not in whole["step"]
    assert half["step"]["exchange"]["launches"] == 2 * 2 + 1
    encoders = half | {"weight_bytes": half["weight_bytes"] | {"audio": 10**6, "image": 10**6}}
    table = show(encoders)
    assert "2 x " in table
    assert "audio encoder" in table
    assert "image encoder" in table
