"""What `plan` counts of a model that hears: its audio encoder, and what is kept of a chunk's audio."""

from __future__ import annotations

import pytest

from seko_export.config.media import HubertConfig
from seko_export.families.seko_talk.family import FAMILY
from seko_export.options.declaration import BuildOptions
from seko_export.roofline.memory import weight_bytes
from seko_export.roofline.predict import Wish, config_of
from tests.seko_talk.streams import talk_config


def test_the_usual_audio_encoder_is_counted() -> None:
    """Of the full-size model that of the large HuBERT; of another width none, and a note says so."""
    config, notes = config_of(Wish(BuildOptions(preset="seko-talk-14b"), "h200"))
    assert config.audio == HubertConfig()
    assert not any("audio" in note for note in notes)
    config, notes = config_of(Wish(BuildOptions(preset="seko-talk-tiny"), "h200"))
    assert config.audio is None
    assert any("no audio encoder counted: none is known that is 48 wide" in note for note in notes)


def test_its_weights_are_a_line_of_their_own() -> None:
    encoder = HubertConfig(48, 2, 2, 32, (8,) * 7, position_kernel=16, position_groups=4)
    plain, hears = talk_config(), talk_config(audio=encoder)
    without, found = (weight_bytes(one, FAMILY.graph(one).pieces) for one in (plain, hears))
    assert "audio" not in without
    assert found["transformer"] == without["transformer"]
    kept = next(one for one in FAMILY.graph(hears).pieces.values() if "hubert" in one.name)
    assert found["audio"] == sum(one.numel() * one.itemsize for one in kept.module.parameters())
    with pytest.raises(KeyError):
        FAMILY.graph(plain).pieces["chunk_hubert"]
