"""The peers of the speech benchmark: a step of the right sizes, and the weights that one reads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from seko_export.families.voxcpm2.presets import FULL, PRESETS, TINY

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/bench/voxcpm2_peers.py."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "voxcpm2_peers", raising=False)
    import voxcpm2_peers

    return voxcpm2_peers


def test_a_step_makes_a_patch_and_the_next_embedding(peers: ModuleType) -> None:
    config = PRESETS[TINY]
    peer = peers.Peer(config, 3, 6, 16, "cpu", torch.float32)
    embedded, patch = peers.runners(peer)[peers.EAGER]()()
    assert embedded.shape == (3, config.base.dim)
    assert patch.shape == (3, *config.patch_shape)
    assert bool(embedded.isfinite().all() and patch.isfinite().all())
    assert bool(peer.keys[:, :, :, 6].any())  # its own position was written, and no later one
    assert not peer.keys[:, :, :, 7:].any()


def test_a_step_of_the_public_model_reads_as_much_as_ours(peers: ModuleType) -> None:
    peer = peers.Peer(PRESETS[FULL], 1, 6, 16, "meta", torch.bfloat16)
    assert peer.weight_bytes == pytest.approx(7.55e9, rel=0.01)
