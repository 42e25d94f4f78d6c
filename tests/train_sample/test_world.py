"""The world sample's data and training model: what keys do to a view, and the forward against the written-out model."""

from __future__ import annotations

import pytest
import torch

from scripts.train_sample.camera_dit import CONTROL_SCALE, CameraDit, begin, to_checkpoint
from scripts.train_sample.causal_training import sequence_mask
from scripts.train_sample.judge_world import PANS, pan_errors
from scripts.train_sample.progress import fill
from scripts.train_sample.text import make_tokenizer
from scripts.train_sample.world import STEP, captions_of, draw_worlds, render, views_of, walk
from scripts.train_sample.world_pool import draw_walks
from seko_export.families.layers.choice import INTRINSICS, POSES
from seko_export.families.lingbot.keys import lingbot_shapes
from seko_export.families.wan_layout import picture_condition as condition
from seko_export.families.wan_layout.keys import wan_shapes
from tests.lingbot.streams import Reference, given_of, lingbot_config, random_checkpoint
from tests.support.tolerances import ORACLE, relative_error

pytestmark = pytest.mark.slow

BAR = ORACLE[torch.float32]


@pytest.mark.parametrize("key", PANS)
def test_a_held_key_pans_the_view_as_it_is_measured(key):
    walks = draw_walks(3, 2, 3, 5, "cpu", switched=0.0, keys=[f"{key}-24"] * 3)
    measured, asked = pan_errors(walks.video(3), [key] * 3, 1)
    assert (measured - asked).norm(dim=1).max() <= 0.05 * STEP


def test_a_camera_at_rest_shows_one_picture():
    walks = draw_walks(2, 2, 3, 5, "cpu", switched=0.0, keys=["none-24"] * 2)
    video = walks.video(3)
    assert torch.equal(video, video[:, :, :1].expand_as(video))


@pytest.mark.parametrize(
    ("key", "view"),
    [
        ("l", (0, 0, 40, 0)),
        ("j", (0, 0, -40, 0)),
        ("i", (0, 0, 0, 40)),
        ("k", (0, 0, 0, -40)),
        ("ws", (0, 0, 0, 0)),
    ],
)
def test_views_add_up_the_framewise_poses(key, view):
    """Two degrees a video frame; eight pixels a latent frame."""
    last = views_of(torch.from_numpy(walk(f"{key}-20", 6))[None])[0, -1]
    right, ahead, degrees, pitch = view
    zoom = 1.5 ** (pitch / 85)
    wanted = torch.tensor([right, ahead, torch.tensor(float(degrees)).deg2rad(), zoom], dtype=torch.float64)
    torch.testing.assert_close(last, wanted, atol=1e-5, rtol=0)


def test_who_turns_right_sees_the_world_turn_left():
    worlds = draw_worlds(1, torch.Generator().manual_seed(2))
    views = torch.tensor([[[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, torch.pi / 2, 1.0]]])
    before, after = render(worlds, views)[0].unbind(1)
    torch.testing.assert_close(after, before.rot90(1, (1, 2)), atol=1e-3, rtol=0)


def test_a_switch_begins_with_its_chunk():
    walks = draw_walks(8, 3, 3, 1, "cpu", switched=1.0)
    video, old, new = walks.video(3), walks.video(3, walks.before), walks.video(3, walks.after)
    for row, chunk in enumerate(walks.switch.tolist()):
        first = 12 * chunk - 3
        assert chunk in (1, 2)
        assert torch.equal(video[row, :, :first], old[row, :, :first])
        assert torch.equal(video[row, :, first:], new[row, :, first:])


def test_the_tokenizer_knows_every_word():
    texts = captions_of(draw_worlds(64, torch.Generator().manual_seed(0)))
    assert all(2 not in encoding.ids for encoding in make_tokenizer().encode_batch(texts))


def trained(config) -> tuple[CameraDit, dict]:
    checkpoint, dit = random_checkpoint(), CameraDit(config.model, config.workload.stream)
    control = "patch_embedding_wancamctrl.weight"  # what training holds larger than a checkpoint
    weights = checkpoint | {control: checkpoint[control] / CONTROL_SCALE}
    fill(dict(dit.named_parameters()), {name: t.float() for name, t in weights.items()})
    return dit, checkpoint


def test_its_weights_are_a_checkpoint():
    dit, checkpoint = trained(lingbot_config())
    back = to_checkpoint(dict(dit.named_parameters()))
    assert {name: tuple(t.shape) for name, t in back.items()} == lingbot_shapes(dit.model)
    assert all(torch.equal(back[name], t) for name, t in checkpoint.items())


@torch.no_grad()
def test_it_is_the_written_out_model_in_one_forward_and_behind_a_cache():
    """Three chunks, past the end of the ring."""
    config = lingbot_config(layout={"sink_frames": 2})
    dit, checkpoint = trained(config)
    s, model, size = config.workload.stream, config.model, config.workload.stream.chunk_frames
    generator = torch.Generator().manual_seed(3)
    text = torch.randn(1, model.text_tokens, model.text_dim, generator=generator)
    table = given_of(config, None)[condition.TABLE]
    reference = Reference(config, checkpoint, text[0], table[0])
    latents = torch.randn(
        1, model.out_channels, 4 * size, s.latent_height, s.latent_width, generator=generator
    )
    cache, text_kv, wanted, cameras = None, dit.text_kv(text), [], []
    for chunk in range(4):
        part = latents[:, :, chunk * size : (chunk + 1) * size]
        inputs = given_of(config, chunk)
        reference.begin({name: inputs[name][0] for name in inputs})
        wanted.append(reference.velocity(part[0], 900.0))
        reference.commit(part[0])
        frames = torch.arange(chunk * size, (chunk + 1) * size)[None]
        rows = table[:, :, frames[0]]
        camera_tokens = dit.camera_tokens(inputs[POSES], inputs[INTRINSICS])
        cameras.append(camera_tokens)
        x = torch.cat((part, rows), 1)
        got, _ = dit.step(
            x, torch.full(frames.shape, 900.0), frames, text_kv, cache, camera_tokens.flatten(1, 2)
        )
        assert relative_error(got[0], wanted[-1]) <= BAR
        cache = dit.step(x, torch.zeros(frames.shape), frames, text_kv, cache, camera_tokens.flatten(1, 2))[1]
    frames = torch.arange(4 * size)
    x = torch.cat((latents, table[:, :, frames]), 1)
    tokens = torch.cat(cameras, 1)
    once = dit(
        x,
        x,
        torch.cat((torch.zeros(1, 4 * size), torch.full((1, 4 * size), 900.0)), 1),
        text,
        frames.repeat(2)[None],
        sequence_mask(range(4 * size), range(4 * size), s, "cpu"),
        torch.cat((tokens, tokens), 1).flatten(1, 2),
    )
    assert relative_error(once[0], torch.cat(wanted, 1)) <= BAR


@torch.no_grad()
def test_what_begins_as_a_wan_model_is_that_model():
    """New channels and the camera have no effect before the first step."""
    config = lingbot_config()
    wan = dict(random_checkpoint())
    wan = {name: wan[name] for name in wan_shapes(config.model)}
    wan["patch_embedding.weight"] = wan["patch_embedding.weight"][:, :16]
    dit = CameraDit(config.model, config.workload.stream)
    begin(dit, 0, wan, (1, 0))
    mine = dict(dit.named_parameters())
    assert torch.equal(mine["blocks.0.ffn.0.weight"], wan["blocks.1.ffn.0.weight"])
    assert torch.equal(mine["patch_embedding.weight"][:, :16], wan["patch_embedding.weight"])
    assert not mine["patch_embedding.weight"][:, 16:].any()
    assert not any(t.any() for name, t in mine.items() if "cam_scale" in name or "cam_shift" in name)
    assert mine["patch_embedding_wancamctrl.weight"].std() * CONTROL_SCALE > 0
