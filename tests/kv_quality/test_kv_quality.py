"""The script on a tiny random sample, whole, and its measures against what defines them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import UMT5EncoderModel

from scripts.bench.cases import CASES
from scripts.kv_quality import caches, fp8_attention
from scripts.kv_quality.activations import built_scales, capture, errors
from scripts.kv_quality.measures import PSNR_CEILING, psnr, relative_error, spread
from scripts.kv_quality.sample import PROMPT_SEED, Sample, draw_prompts, open_sample
from scripts.kv_quality.streams import places
from scripts.random_checkpoint import write_random_checkpoint
from scripts.train_sample.shapes import draw_scenes, render
from scripts.train_sample.text import make_tokenizer, text_config
from scripts.train_sample.train_vae import Vae, init_vae
from seko_export.config.model import ModelConfig
from seko_export.config.stream import StreamConfig
from seko_export.families.layers.rotary import rotary_tables, rotate
from seko_export.media.wan_vae.config import WanVaeConfig
from seko_runtime.video.ring import Ring
from tests.support.tolerances import STEP

pytestmark = pytest.mark.slow

MODEL = ModelConfig("tiny", layers=2, dim=64, heads=2, ffn_dim=64, text_dim=32, text_tokens=48, freq_dim=32)
STREAM = StreamConfig(
    96, 96, chunk_frames=3, sink_frames=3, ring_frames=6
)  # the judge knows pictures of 96 pixels


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
        text = {name: p.detach().clone() for name, p in UMT5EncoderModel(text_settings).named_parameters()}
    save_file(text, folder / "text.safetensors")
    make_tokenizer().save(str(folder / "tokenizer.json"))
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


def given(case: str, **more: object) -> argparse.Namespace:
    """Return the options of a case, tiny."""
    return argparse.Namespace(**{**CASES[case].options, **(CASES[case].trial or {}), **more})


def written(rows: Path) -> dict[tuple[str, str], dict]:
    """Return the rows of a file by figure and shape."""
    return {(row["figure"], row["shape"]): row for row in map(json.loads, rows.read_text().splitlines())}


def test_the_whole_study_of_caches(folder, tmp_path):
    rows, pictures = tmp_path / "rows.jsonl", tmp_path / "images"
    caches.run(
        given(
            "quality",
            sample=folder,
            rows=rows,
            pictures=pictures,
            kv=("fp8", "fp4", "fp32"),
            captured_chunk=3,
        )
    )
    by_figure = written(rows)
    assert {figure for figure, _ in by_figure} == {
        "kv_attention_error", "kv_psnr", "kv_following", "kv_following_loss",
    }  # fmt: skip
    for row in by_figure.values():
        assert {"value", "unit", "bar", "gpu", "versions", "date"} <= set(row)
        assert math.isfinite(row["value"])
    again, lossy = "sample, fp32 again, after 4 chunks", "sample, fp4-before-rope, after 4 chunks"
    assert by_figure["kv_psnr", again]["value"] == PSNR_CEILING
    loss = by_figure["kv_following_loss", "sample, fp32 again, end of the stream"]
    assert (loss["value"], loss["lost"], loss["won"], loss["bar"]) == (0, 0, 0, 0.5)
    assert by_figure["kv_psnr", lossy]["value"] < PSNR_CEILING
    assert by_figure["kv_psnr", lossy]["bits_per_number"] == 4.5
    eight, four = (by_figure["kv_attention_error", f"sample, {name}-before-rope"] for name in ("fp8", "fp4"))
    assert len(four["layers"]) == MODEL.layers
    assert 0 < eight["value"] < four["value"]
    names = {f"kv-{name}.png" for name in ("streams", "frames")}
    assert {file.name for file in pictures.iterdir()} == names


def test_what_fp8_attention_costs(folder, tmp_path):
    """A step over a cache is off a little more by fp8 attention, and more by fp8 matmuls."""
    rows = tmp_path / "rows.jsonl"
    fp8_attention.run(given("quality_fused", sample=folder, rows=rows))
    by_figure = written(rows)
    figures = [figure for figure, _ in by_figure]
    assert {figure: figures.count(figure) for figure in figures} == {
        "fused_following": 4, "fused_step_error": 3, "fused_psnr_loss": 2,
    }  # fmt: skip
    plain, fused, matmuls = (
        by_figure["fused_step_error", f"sample, {way}"]["value"]
        for way in (fp8_attention.PLAIN, fp8_attention.FUSED, f"{fp8_attention.FUSED} and fp8 matmuls")
    )
    assert STEP[torch.float32] < min(plain, fused) < max(plain, fused) < matmuls
    assert abs(fused - plain) > STEP[torch.float32]
    lost = by_figure["fused_psnr_loss", f"sample, {fp8_attention.FUSED}, after 2 chunks"]
    assert lost["value"] == pytest.approx(lost["psnr_db_plain"] - lost["psnr_db"], abs=1e-6)
    assert lost["bar"] == fp8_attention.BAR_DB
    assert lost["standard_error"] > 0


@pytest.mark.parametrize(
    ("case", "count"),
    [("quality_reuse", 8), ("quality_past", 11), ("quality_sink", 4)],
)
def test_the_other_studies_write_their_rows(case, count, folder, tmp_path):
    module = importlib.import_module(CASES[case].module)
    module.run(given(case, sample=folder, rows=tmp_path / "rows.jsonl"))
    by_figure = written(tmp_path / "rows.jsonl")
    assert len(by_figure) == count
    assert all(math.isfinite(row["value"]) for row in by_figure.values())


def test_prompts_count_as_followed_by_the_end_of_the_video():
    prompts = draw_prompts(4)
    shown = render(draw_scenes(4, PROMPT_SEED, held_out=True), torch.arange(57))
    assert fp8_attention.followed(shown, prompts) == 100
    assert fp8_attention.followed(torch.cat((torch.zeros_like(shown), shown), dim=2), prompts) == 100
    assert fp8_attention.followed(shown[[0, 1, 3, 2]], prompts) == 50


def test_a_chunk_that_sees_itself_exactly_is_exact_until_it_reads_the_cache(sample):
    text, options = sample.embed(["a red disc"] * 3), argparse.Namespace(device="cpu", batch=2, chunks=[2])
    (form,) = caches.formats(("fp4",), sample.build(1, "cpu")).values()
    exact = caches.streams(options, sample, text)
    seen = caches.streams(options, sample, text, "fp4", built_scales(form, sample, "cpu"))
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
    turned = rotate(layout.unrotated(seen[0].k), layout.cos, layout.sin)
    torch.testing.assert_close(turned, seen[0].k)

    chosen = caches.formats(("fp8", "fp4", "fp32"), config)
    measured = {
        name: errors(form, seen, layout, built_scales(form, sample, "cpu") if name != "fp32" else {})
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
