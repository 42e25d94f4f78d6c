"""Scenes, captions and the judge: what is drawn is what is said is what is seen."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import UMT5EncoderModel

from scripts.train_sample.captions import Description, Figure, caption, describe, held_out, parse
from scripts.train_sample.judge import ATTRIBUTES, judge, look, summary
from scripts.train_sample.shapes import (
    BACKGROUNDS,
    COLOURS,
    COUNT_ODDS,
    MOTIONS,
    SHAPES,
    SIZES,
    draw_scenes,
    is_held_out,
    render,
)
from scripts.train_sample.text import encode, make_tokenizer, text_config, token_ids

FIGURES = st.builds(
    Figure,
    st.sampled_from(list(COLOURS)),
    st.sampled_from(SHAPES),
    st.sampled_from(MOTIONS),
    st.sampled_from([None, *SIZES]),
)
DESCRIPTIONS = st.builds(
    Description, st.lists(FIGURES, min_size=1, max_size=3).map(tuple), st.sampled_from(list(BACKGROUNDS))
)


def test_equal_seeds_draw_equal_scenes_and_pictures():
    scenes, again = draw_scenes(6, 3), draw_scenes(6, 3)
    times = torch.tensor([0.0, 5.5, 100_000.0])
    video = render(scenes, times)
    assert video.shape == (6, 3, 3, 96, 96)
    assert torch.equal(video, render(again, times))
    assert not torch.equal(video, render(draw_scenes(6, 4), times))
    assert video.min() >= -1
    assert video.max() <= 1


def test_a_clip_may_begin_anywhere():
    """Time is absolute: two clips that overlap agree where they do, also when rows stand at different times."""
    scenes = draw_scenes(3, 5)
    whole = render(scenes, torch.arange(5000, 5012))
    assert torch.equal(whole[:, :, 4:], render(scenes, torch.arange(5004, 5012)))
    rows = render(scenes, torch.tensor([[5000.0], [5003.0], [5011.0]]))
    assert torch.equal(rows[1, :, 0], whole[1, :, 3])


def test_every_attribute_is_drawn_and_colours_differ():
    scenes = draw_scenes(600, 0)
    there = torch.arange(3) < scenes.count[:, None]
    for column, options in (
        (scenes.shape, SHAPES),
        (scenes.colour, COLOURS),
        (scenes.motion, MOTIONS),
        (scenes.size, SIZES),
    ):
        assert set(column[there].tolist()) == set(range(len(options)))
    assert set(scenes.background.tolist()) == set(range(len(BACKGROUNDS)))
    assert set(scenes.count.tolist()) == {1, 2, 3}
    assert all(len(set(row)) == 3 for row in scenes.colour.tolist())
    spinning = scenes.shape[there & (scenes.motion == MOTIONS.index("spin"))]
    assert set(spinning.tolist()) <= {SHAPES.index("square"), SHAPES.index("triangle")}


def test_odds_of_shape_counts_are_followed_and_the_usual_ones_draw_the_usual_scenes():
    usual, asked = draw_scenes(50, 6), draw_scenes(50, 6, count_odds=COUNT_ODDS)
    assert torch.equal(render(usual, torch.zeros(1)), render(asked, torch.zeros(1)))
    assert draw_scenes(40, 6, count_odds=(0, 0, 1)).count.tolist() == [3] * 40
    counts = draw_scenes(2000, 7, count_odds=(0.25, 0.25, 0.5)).count
    shares = torch.bincount(counts, minlength=4)[1:] / 2000
    assert torch.allclose(shares, torch.tensor([0.25, 0.25, 0.5]), atol=0.05)  # four standard deviations


@pytest.mark.parametrize("seed", range(4))
def test_training_never_draws_a_held_out_combination(seed):
    trained, held_out_scenes = draw_scenes(500, seed), draw_scenes(50, seed, held_out=True)
    assert not is_held_out(trained).any()
    assert is_held_out(held_out_scenes).all()
    assert not any(held_out(d) for d in describe(trained[slice(0, 50)]))  # the caption side agrees
    assert all(held_out(d) for d in describe(held_out_scenes))


@given(DESCRIPTIONS)
def test_the_split_does_not_depend_on_order_or_size(description):
    figures = tuple(Figure(f.colour, f.shape, f.motion) for f in reversed(description.figures))
    assert held_out(Description(figures, description.background)) == held_out(description)


@settings(max_examples=300)
@given(DESCRIPTIONS, st.integers(0, 10_000))
def test_a_caption_is_read_as_it_was_meant(description, seed):
    text = caption(description, random.Random(seed))
    read = parse(text)
    assert read.background == description.background

    def bare(figures: tuple[Figure, ...]) -> list[tuple[str, ...]]:
        return sorted((f.colour, f.shape, f.motion) for f in figures)

    assert bare(read.figures) == bare(description.figures)
    wanted = [(f.colour, f.shape, f.motion, f.size) for f in description.figures]
    assert all(f.size is None or (f.colour, f.shape, f.motion, f.size) in wanted for f in read.figures)
    ids = token_ids(make_tokenizer(), [text], 48)
    assert 2 not in ids  # no word is unknown


def test_the_readme_prompt_is_understood():
    assert parse("A red disc bouncing on a dark background") == Description(
        (Figure("red", "disc", "bounce"),), "dark"
    )


@pytest.mark.parametrize(
    "text", ["", "a red disc bouncing", "a dark background", "a red disc on a dark background"]
)
def test_what_is_no_caption_is_refused(text):
    with pytest.raises(ValueError, match="expected"):
        parse(text)


def blurred(video: torch.Tensor, sigma: float, noise: float, seed: int) -> torch.Tensor:
    """Return video [B, 3, T, 96, 96] blurred by ``sigma`` pixels and noisy: like a VAE's reconstruction."""
    reach = torch.arange(-3, 4, dtype=video.dtype)
    kernel = torch.exp(-(reach**2) / (2 * sigma**2))
    kernel /= kernel.sum()
    flat = torch.nn.functional.pad(video.flatten(0, 2)[:, None], (3, 3, 3, 3), mode="replicate")
    flat = torch.nn.functional.conv2d(flat, kernel.view(1, 1, 1, -1))
    flat = torch.nn.functional.conv2d(flat, kernel.view(1, 1, -1, 1)).view(video.shape)
    drawn = torch.randn(video.shape, generator=torch.Generator().manual_seed(seed), dtype=video.dtype)
    return (flat + noise * drawn).clamp(-1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "noise", "clips", "bar"), [(0.0, 0.0, 60, 0.98), (1.0, 0.06, 40, 0.93)])
def test_the_judge_sees_what_was_drawn(sigma, noise, clips, bar):
    """Two seconds of each of 100 scenes, sharp, then as a VAE may give them back; each attribute by itself."""
    scenes, verdicts = draw_scenes(clips, 11, held_out=True), []
    for index, wanted in enumerate(describe(scenes)):
        video = render(scenes[slice(index, index + 1)], 977.0 * index + torch.arange(33))
        verdicts.append(judge((blurred(video, sigma, noise, index) if sigma else video)[0], wanted))
    shares = summary(verdicts)
    assert all(shares[name] >= bar for name in ATTRIBUTES), shares


def test_the_judge_is_not_pleased_by_another_scene():
    scenes, others = draw_scenes(8, 20), draw_scenes(8, 21)
    said = describe(scenes)
    for index in range(8):
        video = render(others[slice(index, index + 1)], torch.arange(17))[0]
        assert not judge(video, said[index]).followed
    assert look(torch.full((3, 17, 96, 96), -0.85)).figures == ()


def test_the_text_encoder_leaves_zeros_behind_the_text():
    """As pipelines run it: padding is masked, and zero after; another length of padding changes nothing before it."""
    torch.manual_seed(0)
    encoder = UMT5EncoderModel(text_config(32, 1)).eval()
    tokenizer = make_tokenizer()
    ids = token_ids(tokenizer, ["a red disc bouncing on a dark background", "a blue ring"], 24)
    with torch.no_grad():
        long, short = encode(encoder, ids), encode(encoder, ids[:, :12])
    assert not long[ids == 0].any()
    assert torch.allclose(long[:, :12], short, atol=1e-6)
    with pytest.raises(ValueError, match="at most 4 fit"):
        token_ids(tokenizer, ["a red disc bouncing on a dark background"], 4)
