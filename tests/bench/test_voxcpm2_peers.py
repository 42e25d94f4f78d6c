"""The peers of the speech benchmark: a step of the right sizes, and the weights that one reads."""

from __future__ import annotations

import pytest
import torch

from scripts.bench import voxcpm2_peers
from seko_export.families.voxcpm2.presets import FULL, PRESETS, TINY


def test_a_step_makes_a_patch_and_the_next_embedding() -> None:
    config = PRESETS[TINY]
    peer = voxcpm2_peers.Peer(config, 3, 6, 16, "cpu", torch.float32)
    embedded, patch = voxcpm2_peers.runners(peer)[voxcpm2_peers.EAGER]()()
    assert embedded.shape == (3, config.base.dim)
    assert patch.shape == (3, *config.patch_shape)
    assert bool(embedded.isfinite().all() and patch.isfinite().all())
    assert bool(peer.keys[:, :, :, 6].any())  # its own position was written, and no later one
    assert not peer.keys[:, :, :, 7:].any()


def test_a_step_of_the_public_model_reads_as_much_as_ours() -> None:
    peer = voxcpm2_peers.Peer(PRESETS[FULL], 1, 6, 16, "meta", torch.bfloat16)
    assert peer.weight_bytes == pytest.approx(7.55e9, rel=0.01)
