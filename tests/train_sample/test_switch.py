"""Training on prompt switches: what the teacher is not shown, which prompt each token reads, the judge's streams."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch

from scripts.kv_quality.sample import open_sample
from scripts.train_sample.captions import caption, describe, held_out, parse
from scripts.train_sample.causal_training import CausalDit, init_weights
from scripts.train_sample.judge import ATTRIBUTES
from scripts.train_sample.judge_switch import require_good
from scripts.train_sample.latent_pool import CHUNKS
from scripts.train_sample.rollout import roll_out, warped
from scripts.train_sample.shapes import draw_scenes
from scripts.train_sample.shipped import load_student
from scripts.train_sample.switch_pool import (
    SWITCHES,
    SwitchBatch,
    SwitchPool,
    altered,
    draw_captions,
    orbiting,
)
from scripts.train_sample.train_dit import SAMPLE_MODEL, SAMPLE_STREAM, chunk_mask
from scripts.train_sample.train_switch import (
    SwitchTraining,
    beginning_loss,
    switch_loss,
    views_of,
)
from seko_export.options.sample import SAMPLE_FOLDER
from seko_export.video.recording import eager_session
from tests.support.tolerances import ORACLE, relative_error

pytestmark = pytest.mark.slow

MODEL = dataclasses.replace(SAMPLE_MODEL, layers=2, dim=32, heads=2, ffn_dim=32, text_dim=8, text_tokens=4)
STREAM = dataclasses.replace(SAMPLE_STREAM, height=32, width=32)
SIGMAS, SIZE = warped(2, 5.0), STREAM.chunk_frames
BAR = ORACLE[torch.float32]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def dit() -> CausalDit:
    model = CausalDit(MODEL, STREAM).requires_grad_(False)
    init_weights(model, 3)
    generator = torch.Generator().manual_seed(4)
    for name, p in model.named_parameters():
        if "head.head" in name:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_teacher_sees_a_stream_that_begins_at_the_switch(dit, switch):
    """Hiding the past equals never having had one: positions count by their differences alone."""
    views, left = views_of(STREAM, "cpu"), CHUNKS - switch
    video, noisy, text = (
        drawn(1, 16, CHUNKS * SIZE, 4, 4),
        drawn(1, 16, CHUNKS * SIZE, 4, 4, seed=1),
        drawn(1, 4, 8),
    )
    frames = torch.arange(CHUNKS * SIZE)[None]

    def run(part: slice, mask: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        clean = video[:, :, part][:, :, :-SIZE]
        times = torch.cat((torch.zeros(1, clean.shape[2]), torch.full(at.shape, 700.0)), 1)
        return dit(clean, noisy[:, :, part], times, text, torch.cat((at[:, :-SIZE], at), 1), mask)

    hidden = run(slice(0, None), views.hidden[switch : switch + 1], frames)[:, :, switch * SIZE :]
    alone = chunk_mask(tuple(range(left - 1)), tuple(range(left)), STREAM, "cpu")
    fresh = run(slice(switch * SIZE, None), alone, frames[:, : left * SIZE])
    assert relative_error(hidden, fresh) <= BAR


@pytest.mark.parametrize("recache", [True, False])
def test_training_sees_what_a_stream_sees_behind_a_switch(dit, recache):
    """A plain switch leaves the cache as the old prompt wrote it; a rebuilt one holds the new prompt."""
    switch, at = 2, 3 * 2
    views = views_of(STREAM, "cpu")
    video, noisy = drawn(1, 16, CHUNKS * SIZE, 4, 4), drawn(1, 16, CHUNKS * SIZE, 4, 4, seed=1)
    before, after = drawn(1, 4, 8, seed=2), drawn(1, 4, 8, seed=3)
    frames = torch.arange(CHUNKS * SIZE)[None]
    cache = None
    for chunk in range(switch):
        part = slice(chunk * SIZE, (chunk + 1) * SIZE)
        kv = dit.text_kv(after if recache else before)
        cache = dit.step(video[:, :, part], torch.zeros(1, SIZE), frames[:, part], kv, cache)[1]
    part = slice(at, at + SIZE)
    wanted, _ = dit.step(
        noisy[:, :, part], torch.full((1, SIZE), 700.0), frames[:, part], dit.text_kv(after), cache
    )

    seen = {}

    def student(clean, _, times, text, frames, mask, text_mask):
        seen["velocity"] = dit(
            clean, noisy, times * 0 + (times > 0) * 700.0, text, frames, mask, None, text_mask
        )
        return seen["velocity"]

    student.stream = STREAM
    batch = SwitchBatch(
        video,
        frames,
        before,
        after,
        torch.tensor([switch]),
        torch.tensor([recache]),
        torch.ones(1, CHUNKS * SIZE),
    )
    config = SwitchTraining(kept=0, context_noise=0.0)
    generator = torch.Generator().manual_seed(0)
    switch_loss(student, dit, batch, views, config, SIGMAS, generator, own=False)
    assert relative_error(seen["velocity"][:, :, part], wanted) <= BAR


def test_without_a_switch_the_shipped_student_is_its_own_target(dit):
    batch_of = {
        "latents": drawn(2, 16, CHUNKS * SIZE, 4, 4),
        "frames": torch.arange(CHUNKS * SIZE).expand(2, -1),
        "before": drawn(2, 4, 8),
        "after": drawn(2, 4, 8),
        "rebuilt": torch.tensor([True, False]),
        "judged": torch.ones(2, CHUNKS * SIZE),
    }
    losses = {}
    for switch in (0, 1):
        batch = SwitchBatch(**batch_of, switch=torch.full((2,), switch))
        losses[switch] = switch_loss(
            dit, dit, batch, views_of(STREAM, "cpu"), SwitchTraining(kept=1), SIGMAS,
            torch.Generator().manual_seed(0), own=True,
        )["loss"]  # fmt: skip
    assert losses[0] <= 1e-10 < losses[1]


def test_a_streams_first_chunk_is_learnt_as_a_step_with_an_empty_cache_makes_it(dit):
    latents, text = drawn(2, 16, SIZE, 4, 4), drawn(2, 4, 8)
    seen = {}

    def student(clean, noisy, times, text, frames, mask):
        seen["velocity"] = dit(clean, noisy, times, text, frames, mask)
        seen["step"], _ = dit.step(noisy, times, frames, dit.text_kv(text), None)
        return 2 * seen["velocity"]

    student.stream = STREAM
    loss = beginning_loss(student, dit, latents, text, SIGMAS, torch.Generator().manual_seed(0))
    assert relative_error(seen["velocity"], seen["step"]) <= BAR
    torch.testing.assert_close(loss, seen["step"].square().mean(), rtol=1e-4, atol=0)


def test_a_scenes_first_chunk_counts_more(dit):
    batch = SwitchBatch(
        drawn(1, 16, CHUNKS * SIZE, 4, 4), torch.arange(CHUNKS * SIZE)[None], drawn(1, 4, 8), drawn(1, 4, 8, seed=1),
        torch.tensor([2]), torch.tensor([True]), torch.ones(1, CHUNKS * SIZE),
    )  # fmt: skip
    views = views_of(STREAM, "cpu")

    def off_by_one_in_chunk(wrong):
        def student(clean, noisy, times, _text, frames, _mask, text_mask):
            del text_mask
            velocity = dit(clean, noisy, times, batch.after, frames, views.hidden[batch.switch])
            velocity[:, :, wrong * SIZE : (wrong + 1) * SIZE] += 1
            return velocity

        student.stream = STREAM
        return switch_loss(
            student, dit, batch, views, SwitchTraining(kept=0, first_weight=3.0), SIGMAS,
            torch.Generator().manual_seed(0), own=False,
        )["loss"]  # fmt: skip

    losses = [float(off_by_one_in_chunk(chunk)) for chunk in (1, 2, 3)]
    assert losses == pytest.approx([1 / (CHUNKS + 2), 3 / (CHUNKS + 2), 1 / (CHUNKS + 2)], rel=1e-5)


@pytest.mark.parametrize("recache", [True, False])
def test_a_switch_to_the_same_prompt_changes_nothing(dit, recache):
    """While every chunk since the first is kept, a rebuilt cache is the cache that there was."""
    text = drawn(2, 4, 8)
    plain, switched = (
        roll_out(dit, text, 4, SIGMAS, torch.Generator().manual_seed(5), **more)
        for more in ({}, {"switch": 3, "after": text, "recache": recache})
    )
    assert relative_error(switched, plain) <= BAR


def session_stream(dit: CausalDit, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return three chunks with a switch at the second, as the runtime's session makes them over eager modules."""
    sample = dataclasses.replace(
        open_sample(SAMPLE_FOLDER), model=dit.model, checkpoint=dict(dit.state_dict())
    )
    config = sample.build(len(before), "cpu")
    with eager_session(config, sample.weights(config), before, list(range(len(before)))) as session:
        clips = [session.run_chunk().to_host().copy()]
        session.set_text(after.numpy(), recache=True)
        clips += [session.run_chunk().to_host().copy() for _ in range(2)]
    return torch.cat([torch.from_numpy(clip) for clip in clips], 2)


def test_the_runtimes_session_switches_as_the_judged_stream_does():
    """Both see the same past and the same noise levels; noise is theirs, so the means of many values are compared."""
    teacher = load_student(SAMPLE_FOLDER, "cpu", layers=1).requires_grad_(False)
    before, after = drawn(2, 48, 128), drawn(2, 48, 128, seed=1)
    stream = session_stream(teacher, before, after)
    other = roll_out(
        teacher, before, 3, warped(4, 5.0), torch.Generator().manual_seed(5), switch=1, after=after, recache=True
    )  # fmt: skip
    assert stream.shape == other.shape
    assert relative_error(stream.std((0, 3, 4)), other.std((0, 3, 4))) <= 0.2


class _Texts:
    """Prompts as one number each."""

    tokens = MODEL.text_tokens

    def __call__(self, texts: list[str]) -> torch.Tensor:
        return torch.stack([torch.full((self.tokens, MODEL.text_dim), len(text) / 100) for text in texts])


def test_samples_hold_one_stream_then_the_beginning_of_another(dit):
    pool = SwitchPool(4, 2, (dit,), _Texts(), SIGMAS, "cpu", 7)
    while pool.written < pool.size:
        pool.renew()
    batch = pool.draw(32, 8, torch.Generator().manual_seed(1))
    assert (batch.switch[:8] == 0).all()
    assert set(batch.switch[8:].tolist()) == set(SWITCHES)
    for i in range(32):
        at = int(batch.switch[i]) * SIZE
        same = [
            stream
            for stream in pool.latents
            if torch.equal(stream[:, : CHUNKS * SIZE - at], batch.latents[i, :, at:])
        ]
        assert same
        assert not batch.judged[i, :at].any()
        far = batch.frames[i, SIZE] > SIZE
        assert not (far and batch.judged[i, : 3 * SIZE].any())


def test_students_make_a_pools_streams_in_turn(dit):
    other = copy.deepcopy(dit)
    with torch.no_grad():
        other.head.head.bias += 1
    pools = [SwitchPool(4, 2, students, _Texts(), SIGMAS, "cpu", 7) for students in ((dit,), (dit, other))]
    for pool in pools:
        pool.renew()
        pool.renew()
    assert torch.equal(pools[0].latents[:2], pools[1].latents[:2])
    assert not torch.isclose(pools[0].latents[2:], pools[1].latents[2:]).all()


def test_captions_are_of_the_grammar_and_some_do_not_say_how_shapes_move():
    texts, still = draw_captions(300, 5), 0
    for text in texts:
        try:
            parse(text)
        except ValueError:
            still += 1
    assert 10 <= still <= 60
    assert draw_captions(6, 5) == draw_captions(6, 5)


def test_more_orbits_are_drawn_as_asked_and_none_of_a_scene_that_is_held_out():
    few, many = (sum("orbit" in text for text in draw_captions(300, 5, share)) / 300 for share in (0.0, 0.9))
    assert few + 0.2 < many
    rng = random.Random(4)
    scenes = [orbiting(scene, rng) for scene in describe(draw_scenes(300, 9))]
    assert not any(held_out(scene) for scene in scenes)
    assert sum(any(f.motion == "orbit" for f in scene.figures) for scene in scenes) > 240


def test_what_is_altered_can_be_said_and_read():
    rng = random.Random(3)
    scene, other_scene = describe(draw_scenes(2, 9))
    for _ in range(20):
        near = altered(scene, other_scene, rng)
        assert parse(caption(near, rng)).background == near.background
        assert len({f.colour for f in near.figures}) == len(near.figures)


def shares(followed: float) -> dict[str, float]:
    return {"clips": 100, "followed": followed, **dict.fromkeys(ATTRIBUTES, 0.9)}


def report(rebuilt: float = 0.85, start: float = 0.86) -> dict:
    after = {"rebuilt": shares(rebuilt), "start": shares(start), "end": shares(0.9)}
    before = {"rebuilt": shares(0.0), "start": shares(0.865), "end": shares(0.9)}
    return {"before": before, "after": after}


@pytest.mark.parametrize(("bad", "said"), [({"rebuilt": 0.79}, "79%"), ({"start": 0.84}, "2.5")])
def test_weights_that_miss_a_bar_are_not_shipped(bad, said):
    require_good(report())
    with pytest.raises(ValueError, match=said):
        require_good(report(**bad))
