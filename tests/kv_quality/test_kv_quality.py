"""The script on a tiny random sample, whole; its formats on trial and its measures, against what defines them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scripts.kv_quality import __main__ as script
from scripts.kv_quality import fp8_attention
from scripts.kv_quality.activations import LayerStatistics, built_scales, capture, errors, scales_of
from scripts.kv_quality.ideas import find, ideas, schemes
from scripts.kv_quality.measures import PSNR_CEILING, psnr, relative_error, spread, ssim
from scripts.kv_quality.plots import draw_activations
from scripts.kv_quality.roundings import Rounding, e2m1, int4_normed, mixed
from scripts.kv_quality.sample import PROMPT_SEED, Sample, draw_prompts, open_sample
from scripts.kv_quality.streams import places, run_stream, with_format
from scripts.kv_quality.trial_formats import TRICKS, TrialKv, hadamard
from scripts.train_sample.shapes import draw_scenes, render
from scripts.train_sample.text import make_encoder, save_tokenizer, text_config
from scripts.train_sample.train_vae import Vae, init_vae
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.rotary import rotary_tables
from seko_export.families.model_files import write_random_checkpoint
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_kernels.kv_formats import ChannelStatistics
from seko_runtime.video.ring import Ring
from tests.support.tolerances import STEP

pytestmark = pytest.mark.slow

MODEL = ModelConfig("tiny", layers=2, dim=64, heads=2, ffn_dim=64, text_dim=32, text_tokens=48, freq_dim=32)
STREAM = StreamConfig(
    96, 96, chunk_frames=3, sink_frames=3, ring_frames=6
)  # the judge knows pictures of 96 pixels
EXACT = Rounding(lambda x, _: x, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample of random weights, in the files that the trained one has."""
    folder = tmp_path_factory.mktemp("sample")
    write_random_checkpoint(folder / "dit.safetensors", MODEL, format="wan", seed=0)
    vae = Vae(WanVaeConfig(base_dim=2))
    init_vae(vae, 0)
    save_file(vae.state_dict(), folder / "vae.safetensors")
    text_settings = text_config(MODEL.text_dim, 1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        text = {name: p.detach().clone() for name, p in make_encoder(text_settings).named_parameters()}
    save_file(text, folder / "text.safetensors")
    save_tokenizer(folder / "tokenizer.json")
    config = {
        "format_version": 1,
        "model": dataclasses.asdict(MODEL),
        "stream": dataclasses.asdict(STREAM),
        "schedule": {"timesteps": [1000.0, 625.0], "shift": 5.0},
        "vae": {"base_dim": 2, "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16},
        "text": text_settings.to_diff_dict(),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def sample(folder: Path) -> Sample:
    """The same, opened."""
    return open_sample(folder)


def test_the_whole_script(folder, tmp_path, capsys):
    rows, pictures = tmp_path / "rows.jsonl", tmp_path / "images"
    options = ["--prompts", "1", "--chunks", "2,4", "--formats", "fp32"]
    options += ["--capture-prompts", "1", "--capture-chunk", "3", "--calibration-chunks", "1"]
    paths = ["--sample", str(folder), "--rows", str(rows), "--pictures", str(pictures)]
    assert script.main([*paths, *options]) == 0
    by_figure = {(row["figure"], row["shape"]): row for row in map(json.loads, rows.read_text().splitlines())}
    assert {figure for figure, _ in by_figure} == {
        "kv_attention_error", "kv_latent_error", "kv_psnr", "kv_ssim", "kv_following", "kv_following_loss",
    }  # fmt: skip
    for row in by_figure.values():
        assert {"value", "unit", "bar", "gpu", "versions", "date"} <= set(row)
        assert math.isfinite(row["value"])
    again, lossy = "sample, fp32 again, after 4 chunks", "sample, fp4-before-rope, after 4 chunks"
    assert (
        by_figure["kv_latent_error", again]["value"]
        == 0
        == by_figure["kv_latent_error", again]["so_far"]["p90"]
    )
    assert by_figure["kv_psnr", again]["value"] == PSNR_CEILING
    assert by_figure["kv_ssim", again]["value"] == 1
    loss = by_figure["kv_following_loss", "sample, fp32 again, end of the stream"]
    assert (loss["value"], loss["lost"], loss["won"], loss["bar"]) == (0, 0, 0, 0.5)
    assert by_figure["kv_latent_error", lossy]["value"] > 0
    assert by_figure["kv_psnr", lossy]["value"] < PSNR_CEILING
    assert by_figure["kv_psnr", lossy]["bits_per_number"] == 4.5
    assert len(by_figure["kv_attention_error", "sample, fp4"]["layers"]) == MODEL.layers
    eight, shipped, four = (
        by_figure["kv_attention_error", f"sample, {name}"]["value"]
        for name in ("fp8", "fp4-before-rope", "fp4")
    )
    assert 0 < eight < shipped < four
    names = {
        f"kv-{name}.png" for name in ("histograms", "channel-means", "attention-error", "streams", "frames")
    }
    assert {file.name for file in pictures.iterdir()} == names
    # Frames are noise here, which no PNG makes small.
    assert max(file.stat().st_size for file in pictures.iterdir() if file.stem != "kv-frames") < 150_000
    assert "| fp4-before-rope | 4 |" in capsys.readouterr().out

    alone, none = tmp_path / "alone.jsonl", tmp_path / "none"
    paths = [
        "--sample",
        str(folder),
        "--rows",
        str(alone),
        "--pictures",
        str(none),
        "--only",
        "fp4-before-rope",
    ]
    assert script.main([*paths, *options]) == 0
    same = [json.loads(line) for line in alone.read_text().splitlines()]
    assert {row["shape"].split(", ")[1] for row in same} == {"fp4-before-rope", "fp32"}
    assert [row["value"] for row in same if row["figure"] == "kv_psnr"][-1] == by_figure["kv_psnr", lossy][
        "value"
    ]
    assert not none.exists()


def test_what_fp8_attention_costs(folder, tmp_path, capsys):
    """FP4 leaves the first chunk as it is, up to the order of sums, and so does fp8 attention, but not fp8 matmuls."""
    rows = tmp_path / "rows.jsonl"
    fp8_attention.main(["--sample", str(folder), "--prompts", "2", "--chunks", "1,2", "--rows", str(rows)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    ways = report["ways"]
    exact, rounded = ways[fp8_attention.PLAIN], ways[fp8_attention.FUSED]
    assert max(exact["after 1"], rounded["after 1"]) <= STEP[torch.float32]
    assert ways[f"{fp8_attention.FUSED} and fp8 matmuls"]["after 1"] > STEP[torch.float32]
    for name in ("step", "after 2"):  # which have a past
        assert min(exact[name], rounded[name]) > STEP[torch.float32]
        assert abs(rounded[name] - exact[name]) > STEP[torch.float32]
    written = {(row["figure"], row["shape"]): row for row in map(json.loads, rows.read_text().splitlines())}
    figures = [figure for figure, _ in written]
    assert {figure: figures.count(figure) for figure in figures} == {
        "fused_following": 4, "fused_step_error": 3, "fused_latent_error": 6, "fused_psnr_loss": 2,
    }  # fmt: skip
    lost = written["fused_psnr_loss", f"sample, {fp8_attention.FUSED}, after 2 chunks"]
    assert lost["value"] == round(exact["psnr_db"] - rounded["psnr_db"], 6)
    assert lost["bar"] == fp8_attention.BAR_DB
    assert lost["standard_error"] > 0


def test_prompts_count_as_followed_by_the_end_of_the_video():
    prompts = draw_prompts(4, 0, held_out=True)
    shown = render(draw_scenes(4, PROMPT_SEED, held_out=True), torch.arange(57))
    assert fp8_attention.followed(shown, prompts) == 100
    assert fp8_attention.followed(torch.cat((torch.zeros_like(shown), shown), dim=2), prompts) == 100
    assert fp8_attention.followed(shown[[0, 1, 3, 2]], prompts) == 50


def test_outlier_channels_are_where_they_are_planted(folder):
    sample = open_sample(folder)
    weights = fp8_attention.planted(sample).checkpoint
    assert weights.keys() == sample.checkpoint.keys()
    keys = weights["blocks.1.self_attn.norm_k.weight"]
    assert keys[::32].abs().mean() > 4 * keys.abs().median()
    values = weights["blocks.1.self_attn.v.weight"].norm(dim=1)
    assert values[::32].min() > 4 * values.median()
    assert not torch.equal(weights["head.head.weight"], sample.checkpoint["head.head.weight"])


def test_a_chunk_that_sees_itself_exactly_is_exact_until_it_reads_the_cache(sample):
    text, options = sample.embed(["a red disc"] * 3), argparse.Namespace(device="cpu", batch=2, chunks=[2])
    (form,) = find(["fp4-before-rope"], sample.build(1, "cpu"))
    exact = script._streams(options, sample, text)
    seen = script._streams(options, sample, text, form, built_scales(form, sample, "cpu"))
    assert exact.shape == (3, 16, 6, 12, 12)
    first = slice(STREAM.chunk_frames)
    assert torch.equal(seen[:, :, first], exact[:, :, first])
    assert not torch.equal(seen, exact)


def test_captured_activations_and_their_pictures(sample, tmp_path):
    config = sample.build(1, "cpu")
    text = torch.zeros(1, MODEL.text_tokens, MODEL.text_dim)
    seen = capture(sample, config, text, [0], 3)
    passes = len(sample.schedule.timesteps) + 1
    assert [captured.layer for captured in seen] == [*range(MODEL.layers)] * passes
    assert seen[0].q.shape == (1, STREAM.chunk_tokens, MODEL.heads, MODEL.head_dim)
    assert seen[0].k.shape == seen[0].v.shape == (1, STREAM.cache_tokens, MODEL.heads, MODEL.head_dim)
    layout = places(config, 3)
    old = ~layout.chunk
    assert torch.equal(seen[0].k[:, old], seen[-MODEL.layers].k[:, old])  # only the chunk's own keys change
    assert not torch.equal(seen[0].k, seen[-MODEL.layers].k)
    torch.testing.assert_close(layout.rotated(layout.unrotated(seen[0].k)), seen[0].k)

    statistics = [LayerStatistics() for _ in range(MODEL.layers)]
    for activations in seen:
        statistics[activations.layer].add(
            {"k": activations.k, "v": activations.v, "before": layout.unrotated(activations.k)}
        )
    exact = TrialKv("exact", 2, 32, torch.float32, 108, STREAM.cache_tokens, EXACT, EXACT)
    constants = scales_of(exact, statistics, sample, "cpu")
    assert errors(exact, seen, layout, constants) == {name: [0.0] * 2 for name in ("k", "v", "attention")}

    # The scheme that ships and the idea it came from, with the same statistics: alike, but for errors of two tops that
    # are equal to a thousandth, and for the twelve bits that keys keep in a read.
    shipped = next(form for form in schemes(config) if form.name.startswith("fp4"))
    (idea,) = find(["fp4-4/6 before-rope k-mean"], config)
    known = [{name: layer.channels(name) for name in ("before", "v")} for layer in statistics]
    shipped_errors = errors(shipped, seen, layout, [shipped.calibrate(k["before"], k["v"]) for k in known])
    other = errors(idea, seen, layout, scales_of(idea, statistics, sample, "cpu"))
    for name in ("k", "v", "attention"):
        assert shipped_errors[name] == pytest.approx(other[name], rel=0.01)

    for folder in (tmp_path / "a", tmp_path / "b"):
        draw_activations(folder, seen, layout)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 11])
def test_places_are_where_the_ring_wrote(sample, chunk):
    ring, frame_of_slot = Ring(STREAM.sink_frames, STREAM.ring_frames, STREAM.chunk_frames), {}
    for first in range(0, (chunk + 1) * STREAM.chunk_frames, STREAM.chunk_frames):
        frame_of_slot |= {slot: first + i for i, slot in enumerate(ring.write_slots(first))}
    layout = places(sample.build(1, "cpu"), chunk)
    frames = torch.tensor([[frame_of_slot.get(slot, 0) for slot in range(STREAM.cache_frames)]])
    assert torch.equal(layout.cos, rotary_tables(frames, MODEL, STREAM)[0])
    own = torch.tensor(
        [frame_of_slot.get(slot, -1) // STREAM.chunk_frames == chunk for slot in range(STREAM.cache_frames)]
    )
    assert torch.equal(layout.chunk, own.repeat_interleave(STREAM.frame_tokens))


@pytest.mark.parametrize(
    ("tricks", "turned"), [(("turning-mean",), True), (("before-rope", "k-mean"), True), (("k-mean",), False)]
)
def test_a_stream_turns_the_means_to_where_its_keys_stand(sample, tricks, turned):
    nothing = Rounding(lambda x, _: torch.zeros_like(x), 4)  # so that a read gives the mean alone
    form = TrialKv("none", 2, 32, torch.float32, 108, STREAM.cache_tokens, nothing, EXACT, tricks)
    config, mean = sample.build(1, "cpu"), torch.rand(2, 32)
    channels = ChannelStatistics(-mean, mean, mean)
    scales = [form.constants(channels, channels, channels)] * MODEL.layers
    chunk, seen = 4, []
    run_stream(
        sample, with_format(config, form), torch.zeros(1, 48, 32), [0], chunk + 1, scales,
        lambda number, _pass, _layer, _q, k, _v: seen.append(k.clone()) if number == chunk else None,
    )  # fmt: skip
    everywhere = mean.expand(1, STREAM.cache_tokens, 2, 32)
    expected = places(config, chunk).rotated(everywhere) if turned else everywhere
    past = ~places(config, chunk).chunk  # the chunk sees its own keys as they are
    for k in seen:
        torch.testing.assert_close(k[:, past], expected[:, past])
        assert not torch.isclose(k[:, ~past], expected[:, ~past]).all()


@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_around_no_rounding_changes_nothing(trick):
    torch.manual_seed(0)
    form = TrialKv("exact", 2, 32, torch.float32, 2, 10, EXACT, EXACT, (trick,))
    k, v = torch.randn(2, 20, 2, 32)
    caches = {c.name: torch.zeros(20, *c.token_shape, dtype=c.dtype) for c in form.cache_tensors}
    channels = [ChannelStatistics(x.amin(0), x.amax(0), x.mean(0)) for x in (k, k.flip(0), v)]
    angles = torch.rand(10, 16)
    scales = form.constants(*channels) | {"place_cos": angles.cos(), "place_sin": angles.sin()}
    assert {s.name: (s.shape, s.dtype) for s in form.scale_tensors} == {
        name: (tuple(t.shape), t.dtype) for name, t in scales.items()
    }
    order = torch.randperm(20)
    form.write(caches, scales, order, k[order], v[order])
    read_k, read_v = form.expand(caches, scales, {}, torch.float32)
    torch.testing.assert_close(read_k, k)
    torch.testing.assert_close(read_v, v)


def test_the_sink_is_kept_where_a_trick_says_so():
    rounding = Rounding(lambda x, _: torch.zeros_like(x), 4)
    places = {}
    for tricks in ((), ("sink-exact",)):
        form = TrialKv("none", 1, 16, torch.float32, 2, 10, rounding, rounding, tricks)
        caches = {c.name: torch.zeros(20, *c.token_shape, dtype=c.dtype) for c in form.cache_tensors}
        ones = torch.ones(1, 16)
        known = ChannelStatistics(-ones, ones, 0 * ones)
        scales = form.calibrate(known, known)
        for index in (torch.arange(20), torch.tensor([4, 14])):
            form.write(caches, scales, index, torch.ones(len(index), 1, 16), torch.ones(len(index), 1, 16))
        places[tricks] = form.expand(caches, scales, {}, torch.float32)[0].any(-1).nonzero()[:, 0].tolist()
        assert form.bits_per_number == (4 + 12 * 0.2 if "sink-exact" in tricks else 4)
    assert list(places.values()) == [[], [0, 1, 10, 11]]


def test_four_over_six_is_never_further_off():
    torch.manual_seed(0)
    x, g = torch.randn(50, 2, 32), torch.ones(2) / 4
    plain, better = e2m1(16).round(x, g), e2m1(16, four_over_six=True).round(x, g)
    blocks = [(y - x).unflatten(-1, (-1, 16)).square().sum(-1) for y in (plain, better)]
    assert (blocks[1] <= blocks[0]).all()
    assert (blocks[1] < blocks[0]).any()


def test_hadamard_is_orthonormal():
    torch.testing.assert_close(hadamard(32) @ hadamard(32).T, torch.eye(32))
    with pytest.raises(ValueError, match="power of two"):
        hadamard(24)


def test_mixed_channels_come_back_and_a_large_one_is_not_cut_off():
    torch.manual_seed(0)
    x, g = torch.randn(50, 2, 32), torch.ones(2)
    torch.testing.assert_close(mixed(EXACT).round(x, g), x)
    x[..., 5] *= 30  # beyond what 16 steps of the norm reach, unless it is mixed
    plain, other = (
        float((f.round(x, g) - x).norm()) for f in (int4_normed(2, 32), mixed(int4_normed(2, 32)))
    )
    assert other < 0.5 * plain
    assert mixed(int4_normed(2, 32)).bits == 4.25


def test_one_norm_a_token_makes_tokens_of_any_size_alike():
    torch.manual_seed(0)
    x, g = torch.randn(50, 2, 32), torch.ones(2)
    sizes = torch.exp2(torch.arange(-25.0, 25.0))[:, None, None]
    torch.testing.assert_close(int4_normed(2, 32).round(x * sizes, g), int4_normed(2, 32).round(x, g) * sizes)


def test_psnr_and_relative_error_of_known_pairs():
    a = torch.zeros(2, 3, 1, 12, 12)
    b = a + torch.tensor([0.2, 0.0]).view(2, 1, 1, 1, 1)  # a tenth of the range, and nothing
    torch.testing.assert_close(psnr(b, a), torch.tensor([20.0, PSNR_CEILING]))
    torch.testing.assert_close(relative_error(1.5 * (a + 1), a + 1), torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match="finite"):
        spread(torch.tensor([1.0, math.nan]))


def test_ssim_is_the_papers():
    """Constants have a closed form; one window is worked out by the paper's formula, written naively."""
    flat = torch.full((1, 3, 2, 16, 16), -0.6)  # 0.2 and 0.7 on a range of 1
    expected = (2 * 0.2 * 0.7 + 0.01**2) / (0.2**2 + 0.7**2 + 0.01**2)
    assert float(ssim(flat, flat + 1)) == pytest.approx(expected, rel=1e-6)
    torch.manual_seed(0)
    a, b = torch.rand(2, 1, 1, 1, 11, 11, dtype=torch.float64)
    weights = [
        [math.exp(-((i - 5) ** 2 + (j - 5) ** 2) / (2 * 1.5**2)) for j in range(11)] for i in range(11)
    ]
    w = torch.tensor(weights, dtype=torch.float64) / sum(map(sum, weights))
    x, y = a[0, 0, 0], b[0, 0, 0]
    mx, my = (w * x).sum(), (w * y).sum()
    vx, vy, cov = (w * (x - mx) ** 2).sum(), (w * (y - my) ** 2).sum(), (w * (x - mx) * (y - my)).sum()
    value = (2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
    assert float(ssim(2 * a - 1, 2 * b - 1)) == pytest.approx(float(value), rel=1e-9)
    assert float(ssim(a, a)) == 1


def test_ssim_is_skimages():
    metrics = pytest.importorskip("skimage.metrics")
    torch.manual_seed(0)
    a = torch.rand(1, 1, 1, 40, 30, dtype=torch.float64)
    b = (a + 0.1 * torch.randn_like(a)).clamp(0, 1)
    options = {"data_range": 1.0, "gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    theirs = metrics.structural_similarity(a[0, 0, 0].numpy(), b[0, 0, 0].numpy(), **options)
    assert float(ssim(2 * a - 1, 2 * b - 1)) == pytest.approx(theirs, rel=1e-9)


def test_what_cannot_be_measured_is_refused(folder, sample, tmp_path):
    config = sample.build(1, "cpu")
    assert len({form.name for form in ideas(config)}) == len(ideas(config))
    with pytest.raises(ValueError, match="no format 'fp5'"):
        find(["fp5"], config)
    with pytest.raises(ValueError, match="no trick 'k-median'"):
        TrialKv("fp4", 2, 32, torch.float32, 0, 10, EXACT, EXACT, ("k-median",))
    with pytest.raises(ValueError, match="leave the other two out"):
        TrialKv("fp4", 2, 32, torch.float32, 0, 10, EXACT, EXACT, ("turning-mean", "k-mean"))
    paths = ["--sample", str(folder), "--rows", str(tmp_path / "r"), "--pictures", str(tmp_path)]
    odds = (
        ["--chunks", "8,20"],
        ["--chunks", "7,7"],
        ["--chunks", "7", "--capture-chunk", "2"],
        ["--only", "fp5"],
    )
    for odd in odds:
        with pytest.raises(ValueError, match=odd[-2]):
            script.main([*paths, *odd])
