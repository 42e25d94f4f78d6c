"""The script on a tiny random sample, whole, and its measures against what defines them."""

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
from scripts.kv_quality.activations import built_scales, capture, errors
from scripts.kv_quality.measures import PSNR_CEILING, psnr, relative_error, spread, ssim
from scripts.kv_quality.sample import PROMPT_SEED, Sample, draw_prompts, open_sample
from scripts.kv_quality.streams import places
from scripts.random_checkpoint import write_random_checkpoint
from scripts.train_sample.shapes import draw_scenes, render
from scripts.train_sample.text import make_encoder, save_tokenizer, text_config
from scripts.train_sample.train_vae import Vae, init_vae
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.rotary import rotary_tables
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_runtime.video.ring import Ring
from tests.support.tolerances import STEP

pytestmark = pytest.mark.slow

MODEL = ModelConfig("tiny", layers=2, dim=64, heads=2, ffn_dim=64, text_dim=32, text_tokens=48, freq_dim=32)
STREAM = StreamConfig(
    96, 96, chunk_frames=3, sink_frames=3, ring_frames=6
)  # the judge knows pictures of 96 pixels
NO_SCALES: list[dict[str, torch.Tensor]] = [{} for _ in range(MODEL.layers)]


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
    options = ["--prompts", "1", "--chunks", "2,4", "--kv", "fp8,fp4,fp32"]
    options += ["--capture-prompts", "1", "--capture-chunk", "3"]
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
    eight, four = (by_figure["kv_attention_error", f"sample, {name}-before-rope"] for name in ("fp8", "fp4"))
    assert len(four["layers"]) == MODEL.layers
    assert 0 < eight["value"] < four["value"]
    names = {f"kv-{name}.png" for name in ("streams", "frames")}
    assert {file.name for file in pictures.iterdir()} == names
    # Frames are noise here, which no PNG makes small.
    assert max(file.stat().st_size for file in pictures.iterdir() if file.stem != "kv-frames") < 150_000
    assert "| fp4-before-rope | 4 |" in capsys.readouterr().out


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
    (form,) = script.formats("fp4", sample.build(1, "cpu")).values()
    exact = script.streams(options, sample, text)
    seen = script.streams(options, sample, text, "fp4", built_scales(form, sample, "cpu"))
    assert exact.shape == (3, 16, 6, 12, 12)
    first = slice(STREAM.chunk_frames)
    assert torch.equal(seen[:, :, first], exact[:, :, first])
    assert not torch.equal(seen, exact)


def test_captured_activations_and_what_formats_make_of_them(sample):
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

    chosen = script.formats("fp8,fp4,fp32", config)
    measured = {
        name: errors(form, seen, layout, built_scales(form, sample, "cpu") if name != "fp32" else NO_SCALES)
        for name, form in chosen.items()
    }
    assert measured["fp32"] == {name: [0.0] * 2 for name in ("k", "v", "attention")}
    for name in ("k", "v", "attention"):
        assert all(0 < a < b for a, b in zip(measured["fp8"][name], measured["fp4"][name], strict=True))


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


def test_what_cannot_be_measured_is_refused(folder, tmp_path):
    paths = ["--sample", str(folder), "--rows", str(tmp_path / "r"), "--pictures", str(tmp_path)]
    odds = (
        ["--chunks", "8,20"],
        ["--chunks", "7,7"],
        ["--chunks", "7", "--capture-chunk", "2"],
        ["--kv", "fp5"],
    )
    for odd in odds:
        with pytest.raises(ValueError, match=odd[-2]):
            script.main([*paths, *odd])
