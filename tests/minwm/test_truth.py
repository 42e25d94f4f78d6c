"""The transformer with its camera against its reference, past the wrap, and what a camera's matrices may not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from seko_export.config.pool import PoolConfig
from seko_export.config.video import VideoBuild
from seko_export.families.layers.block import Recall, Unturned
from seko_export.families.layers.choice import CHUNK, INTRINSICS, POSES
from seko_export.families.layers.layer_pieces import BLOCK, WINDOW
from seko_export.families.minwm.camera import INVERSE, KEPT, MATRIX, CameraAttention, CameraTurn
from seko_export.families.minwm.model import NO_CAMERA
from seko_export.families.registry import graph_of
from seko_export.lowering.trace import trace
from tests.minwm.streams import (
    MODEL,
    cameras_of,
    first_velocity,
    look,
    minwm_config,
    naive_of,
    naive_velocity,
    random_checkpoint,
)
from tests.support.tolerances import relative_error
from tests.truth.eager_stream import EagerStream, random_text

BAR = 1e-5  # in float32


@pytest.mark.parametrize("layout", [{}, {"height": 64, "width": 96, "ring_frames": 12}, {"context": "reuse"}])
@pytest.mark.shows("minwm")
def test_every_chunk_past_two_windows_is_the_references(
    layout: Mapping[str, Any], worst: Callable[[str, float], None]
) -> None:
    """Fed pass by pass, with another camera in each latent frame, and a lens with fx other than fy."""
    config = minwm_config(layout=layout)
    s, checkpoint, text = config.workload.stream, random_checkpoint(), random_text(config.model, 1)
    stream, naive = EagerStream(config, checkpoint, text), naive_of(config, checkpoint, text[0])
    for number in range(2 * s.cache_frames // s.chunk_frames + 2):
        cameras, first = cameras_of(config, number), number * s.chunk_frames
        look(stream, cameras)
        for done in stream.run_chunk([first], [3]):
            velocity = naive_velocity(naive, config, done, 0, first, cameras)
            if done.velocity is not None:
                error = relative_error(done.velocity[0], velocity)
                worst("minwm, velocity", error)
                assert error <= BAR, (number, done.timestep)


def velocities(config: VideoBuild, moved: Callable[[Tensor], Tensor] = lambda poses: poses) -> list[Tensor]:
    """The velocities of the first passes of chunks past the wrap, of a stream whose cameras were moved, and whose
    chunks begin with the same latents."""
    stream = EagerStream(config, random_checkpoint(), random_text(config.model, 1))
    found = []
    for number in range(4):
        cameras = cameras_of(config, number)
        look(stream, {**cameras, POSES: moved(cameras[POSES])})
        latents = torch.randn(
            stream.buffers["latents"].shape, generator=torch.Generator().manual_seed(number)
        )
        found.append(first_velocity(stream, 4 * number, [latents] * 5))
    return found


def of_world(turn: Tensor, place: Tensor) -> Callable[[Tensor], Tensor]:
    """A motion of the world: poses [..., 3, 4] turned and moved."""
    return lambda poses: torch.cat((turn @ poses[..., :3], turn @ poses[..., 3:] + place[:, None]), -1)


def test_where_the_world_begins_changes_nothing() -> None:
    """Far away, too, but for the rounding of its poses, which are 6e-5 apart at a distance of 1,000; the reference's
    own cache would hold numbers of that size."""
    turn = torch.linalg.matrix_exp(torch.tensor([[0.0, 0.3, -1.0], [-0.3, 0.0, 0.5], [1.0, -0.5, 0.0]]))
    config = minwm_config()
    wanted = velocities(config)
    for far, bar in ((3.0, BAR), (1000.0, 1e-4)):
        moved = velocities(config, of_world(turn, far * torch.tensor([0.6, -0.2, 0.8])))
        assert max(relative_error(*both) for both in zip(moved, wanted, strict=True)) <= bar, far
    mirrored = velocities(config, lambda poses: poses * torch.tensor([1.0, 1.0, 1.0, -1.0]))
    assert relative_error(mirrored[-1], wanted[-1]) > 1e-3


def test_cameras_at_rest_are_attention_without_rope() -> None:
    """Through the second projection, and this is not the same as no camera."""
    model, generator = MODEL, torch.Generator().manual_seed(5)
    turn = CameraTurn(2)
    module = CameraAttention(model, turn, torch.float32).requires_grad_(False)
    heads, tokens = (model.heads, model.head_dim), 6
    q, k, v = (torch.randn(1, n, *heads, generator=generator) for n in (tokens, 2 * tokens, 2 * tokens))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return y.transpose(1, 2).flatten(2)

    still = torch.eye(4).expand(1, 1, 4, 4)
    kept = {KEPT: torch.eye(4).repeat(2, 1, 1)}
    recall = Recall(kept, torch.tensor([[1]]), torch.tensor([2 * tokens]), None)
    seen = Unturned(q, lambda q, of_slots: attend(q, *(turn.turned(of_slots, x) for x in (k, v))))
    found = module(seen, {MATRIX: still, INVERSE: still}, recall)
    assert relative_error(found, F.linear(attend(q, k, v), module.prope_o.weight, module.prope_o.bias)) <= BAR


def test_without_a_camera_it_is_wan() -> None:
    """The same weights in the family `wan` give the same velocities; a camera at rest gives others."""
    config = minwm_config()
    bare = config.changed(model=replace(MODEL, camera=NO_CAMERA))
    wan = config.changed(model=replace(bare.model, family="wan"))
    text, checkpoint = random_text(config.model, 1), random_checkpoint()
    found = []
    for each in (bare, wan, config):
        stream = EagerStream(each, checkpoint, text)
        if each is config:
            rest = torch.eye(4)[:3].expand(1, 4, 3, 4)
            look(stream, {POSES: rest, INTRINSICS: cameras_of(config, 0)[INTRINSICS]})
        found.append(first_velocity(stream, 0))
    assert torch.equal(found[0], found[1])
    assert relative_error(found[2], found[0]) > 0.01


def test_each_number_of_a_camera_counts_but_the_lenss_centre() -> None:
    config = minwm_config()
    stream = EagerStream(config, random_checkpoint(), random_text(config.model, 1))
    cameras = cameras_of(config, 0)
    base = None
    for change in ("", "turn", "place", "fx", "fy", "centre"):
        poses, lens = cameras[POSES].clone(), cameras[INTRINSICS].clone()
        if change == "turn":
            poses[:, 3, :, :3] = poses[:, 2, :, :3]
        if change == "place":
            poses[:, 3, 1, 3] += 0.3
        if change in ("fx", "fy"):
            lens[..., ["fx", "fy"].index(change)] *= 1.5
        if change == "centre":
            lens[..., 2:] *= 2
        look(stream, {POSES: poses, INTRINSICS: lens})
        velocity = first_velocity(stream, 0)
        base = velocity if base is None else base
        error = relative_error(velocity, base)
        assert (error == 0) if change in ("", "centre") else (error > 1e-3), change


@pytest.mark.parametrize(
    "change",
    [
        {"pool": PoolConfig(2, (2,))},
        {
            "fused": True,
            "fp8": True,
            "kv_scheme": "fp4",
            "attention": "fp8",
            "resident_window": True,
        },
    ],
    ids=["pool", "fused"],
)
def test_its_engines_are_replayable(change: Mapping[str, object]) -> None:
    pieces = graph_of(minwm_config().changed(**change)).pieces.values()
    own = [piece for piece in pieces if piece.key.role in (BLOCK, CHUNK, WINDOW)]
    assert {piece.key.role for piece in own} == {
        BLOCK,
        CHUNK,
        *([WINDOW] if "resident_window" in change else []),
    }
    for piece in own:
        trace(piece, "cpu")


def test_nothing_of_a_frames_size_is_cached_twice() -> None:
    """Beside keys and values, layers keep a matrix for each latent frame."""
    caches = {b.name: b.shape for b in graph_of(minwm_config()).buffers if b.role == "cache"}
    assert set(caches) == {"kv.k", "kv.v", "kv.slot_frames", f"recall.{KEPT}"}
    assert caches[f"recall.{KEPT}"] == (2, 8, 4, 4)
    assert np.prod(caches["kv.k"]) == 2 * 8 * 6 * 64
