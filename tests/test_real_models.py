"""The page docs/real-models.md: its commands find files laid out as published; its table is computed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_vae import write_random_vae
from seko_export.cli import main
from seko_export.config.model import ModelConfig
from seko_export.errors import CheckpointError
from seko_export.host.environment import Target
from seko_export.media.umt5.keys import text_shapes
from seko_export.media.wan_vae.config import VAE_PRESETS, WanVaeConfig
from seko_export.media.wan_vae.keys import vae_shapes
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import ResolvedBuild, resolve_build
from seko_export.video.media import open_media
from seko_export.video.plan.predict import PlanRequest, predict
from seko_runtime.cli.commands import main as run_command
from tests.export.media_files import TEXT, write_text_encoder, write_tokenizer
from tests.support.tiers import first_is_fast

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "real-models.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
SMALL = ModelConfig(
    name="small", layers=2, dim=256, heads=2, ffn_dim=256, text_dim=TEXT.dim, text_tokens=12, freq_dim=32
)
S1, S5 = (f"{model}, 480x832, chunk 3, ring 21" for model in ("S1: self-forcing-1.3b", "S5: wan-14b"))
# And what is published in each else, as for every file without a config.json.
VAE_2_1 = WanVaeConfig(base_dim=4)
VAE_2_2 = replace(VAE_PRESETS["wan-2.2"], base_dim=4, decoder_base_dim=8)
# Preset, options of the build, and the row of a measured pass: figure and shape, or none.
BUILDS: tuple[tuple[str, dict[str, Any], tuple[str, str] | None], ...] = (
    ("self-forcing-1.3b", {}, ("s1_exact_vs_b3", f"{S1}, exact")),
    ("self-forcing-1.3b", {"fp4_kv": True}, ("s1_fp4_vs_b3", f"{S1}, fp4")),
    (
        "self-forcing-1.3b",
        {"fp4_kv": True, "fp8": True, "resident_window": True},
        ("s1_fp4_fp8_vs_b3", f"{S1}, fp4_fp8_resident"),
    ),
    ("wan-14b", {}, None),
    (
        "wan-14b",
        {"fp4_kv": True, "fp8": True, "resident_window": True},
        ("s5_fp4_fp8_vs_b3", f"{S5}, fp4_fp8_resident"),
    ),
    (
        "wan-5b",
        {"fp4_kv": True, "fp8": True, "resident_window": True},
        ("s6_fp4_fp8_vs_b3", "S6: wan-5b, 704x1280, chunk 8, sink 8, ring 24, fp4_fp8_resident"),
    ),
)


HEAD = """\
| preset | options | weights, GB: transformer + text + VAE | KV cache, GB | device, GB | a pass, measured | \
a chunk with its video, predicted; x real time |
|---|---|---|---|---|---|---|
"""


def expected_line(preset: str, options: dict[str, Any], source: tuple[str, str] | None) -> str:
    """A line of the page's table of bytes and seconds."""
    rows = {
        (row["figure"], row["shape"]): row
        for row in map(json.loads, (ROOT / "docs" / "benchmarks" / "h200.jsonl").read_text().splitlines())
    }
    prediction = predict(PlanRequest(BuildOptions(preset=preset, **options), "h200"))
    weights = " + ".join(
        f"{prediction['weight_bytes'][part] / 1e9:.2f}" for part in ("transformer", "text", "vae")
    )
    asked = " ".join(f"`--{name.replace('_', '-')}`" for name in options) or "(none)"
    row = rows[source] if source else None
    step = "not measured" if row is None else f"{row['engine_step_ms']:.1f} ms ({row['date']})"
    return (
        f"| `{preset}` | {asked} | {weights} | {prediction['session_bytes']['kv'] / 1e9:.2f} | "
        f"{prediction['peak_bytes'] / 1e9:.1f} | {step} | {prediction['chunk_s']:.2f} s, "
        f"{prediction['real_time_factor']:.2f} x |"
    )


def table_lines() -> list[str]:
    """The lines below the head of that table."""
    return PAGE.partition(HEAD)[2].partition("\n\n")[0].splitlines()


def test_the_table_has_a_line_for_each_build() -> None:
    assert len(table_lines()) == len(BUILDS)


@pytest.mark.parametrize("number", first_is_fast(range(len(BUILDS))))
def test_bytes_and_seconds_are_those_of_plan_and_rows(number: int) -> None:
    line = expected_line(*BUILDS[number])
    assert table_lines()[number] == line, f"docs/real-models.md should say:\n{line}"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small random models in files and folders as the page names them."""
    home = tmp_path_factory.mktemp("published")
    (home / "checkpoints").mkdir()
    write_random_checkpoint(
        home / "checkpoints" / "self_forcing_dmd.pt", SMALL, format="self-forcing", seed=0
    )
    for release in ("Wan2.1-T2V-1.3B", "Wan2.1-T2V-14B", "Wan2.2-TI2V-5B"):
        is_2_2 = release.startswith("Wan2.2")
        vae, vae_file = (VAE_2_2, "Wan2.2_VAE.pth") if is_2_2 else (VAE_2_1, "Wan2.1_VAE.pth")
        model = replace(SMALL, in_channels=vae.z_dim, out_channels=vae.z_dim)
        wan = home / release
        write_random_checkpoint(wan, model, format="wan-sharded", seed=0)
        save_pth(wan / vae_file, vae_shapes(vae, "both"))
        save_pth(wan / "models_t5_umt5-xxl-enc-bf16.pth", text_shapes(TEXT))
        (wan / "google" / "umt5-xxl").mkdir(parents=True)
        write_tokenizer(wan / "google" / "umt5-xxl" / "tokenizer.json")
        pipeline = home / f"{release}-Diffusers"
        write_random_checkpoint(pipeline, model, format="diffusers", seed=0)
        write_random_vae(pipeline / "vae", vae, "diffusers", seed=0, dtype=torch.float32, device="cpu")
        write_text_encoder(pipeline / "text_encoder")
        (pipeline / "tokenizer").mkdir()
        (pipeline / "text_encoder" / "tokenizer.json").rename(pipeline / "tokenizer" / "tokenizer.json")
    return home


def save_pth(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    torch.save({name: torch.ones(shape) for name, shape in shapes.items()}, path)


def options_of(line: str) -> click.Context:
    """A line of the page as `seko-export` parses it; an unknown option is an error."""
    program, command, *arguments = shlex.split(line)
    assert program == "seko-export"
    return main.commands[command].make_context(command, arguments)


def build_of(line: str) -> ResolvedBuild:
    known = {field.name for field in fields(BuildOptions)}
    asked = {name: value for name, value in options_of(line).params.items() if name in known}
    return resolve_build(BuildOptions(**asked), machine=Target("cuda", "sm_90"))


BUILD_LINES = [line for line in LINES if line.startswith("seko-export build")]


@pytest.mark.parametrize("line", BUILD_LINES, ids=[line.split()[2] for line in BUILD_LINES])
def test_a_build_finds_its_files(line: str, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(published)
    resolved = build_of(line)
    assert resolved.config.model.layers == SMALL.layers
    assert resolved.media.tokenizer is not None
    assert resolved.media.tokenizer.is_file()
    media = open_media(resolved.media, resolved.config)  # every key and shape
    assert media.text is not None
    assert media.vae is not None


def test_a_variant_of_a_pipeline(published: Path, tmp_path: Path) -> None:
    """Each folder's file of the variant is taken, and its config.json is read; a folder without one is named."""
    pipeline = tmp_path / "pipeline"
    shutil.copytree(published / "Wan2.1-T2V-1.3B-Diffusers", pipeline)
    for file in [*pipeline.rglob("*.safetensors")]:
        file.rename(file.with_suffix(".fp16.safetensors"))
    plain, chosen = (
        resolve_build(BuildOptions(pipeline, variant=variant), machine=Target("cuda", "sm_90"))
        for variant in (None, "fp16")
    )
    assert chosen.config == plain.config
    assert chosen.checkpoint == pipeline / "transformer" / "diffusion_pytorch_model.fp16.safetensors"
    assert open_media(chosen.media, chosen.config).vae is not None
    for file in [*pipeline.rglob("*.fp16.safetensors")]:
        shutil.copy(file, file.with_name(file.name.replace("fp16", "fp32")))
    among = resolve_build(BuildOptions(pipeline, variant="fp16"), machine=Target("cuda", "sm_90"))
    assert (among.config, among.checkpoint, among.media) == (chosen.config, chosen.checkpoint, chosen.media)
    for file in [*(pipeline / "vae").glob("*.fp32.safetensors")]:
        file.unlink()
    next((pipeline / "vae").glob("*.safetensors")).rename(
        pipeline / "vae" / "diffusion_pytorch_model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"--variant fp16: .*vae has no checkpoints of that variant"):
        resolve_build(BuildOptions(pipeline, variant="fp16"), machine=Target("cuda", "sm_90"))


def test_a_variant_of_a_file(published: Path) -> None:
    file = published / "checkpoints" / "self_forcing_dmd.pt"
    with pytest.raises(CheckpointError, match="--variant fp16 chooses among the files of a folder"):
        resolve_build(BuildOptions(file, variant="fp16", target="cpu"))


def test_a_vae_of_another_model(published: Path, tmp_path: Path) -> None:
    write_random_checkpoint(
        tmp_path / "wide", replace(SMALL, in_channels=48, out_channels=48), format="wan", seed=0
    )
    vae = published / "Wan2.1-T2V-1.3B" / "Wan2.1_VAE.pth"
    with pytest.raises(CheckpointError, match=r"--vae .*Wan2.1_VAE.pth has 16 latent channels, .* gives 48"):
        resolve_build(BuildOptions(tmp_path / "wide", vae=vae, target="cpu"))


def test_a_pt_that_tells_no_heads_says_what_was_taken(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(published)
    (note,) = build_of(BUILD_LINES[0]).notes
    assert "heads 2" in note


def test_every_line_is_a_command_with_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert {line.split()[0] for line in LINES} == {"seko-export", "seko-run"}
    for line in LINES:
        program, command, *arguments = shlex.split(line)
        if program == "seko-export":
            options_of(line)
            continue
        with pytest.raises(SystemExit):
            run_command([command, "--help"])
        known = capsys.readouterr().out
        for argument in arguments:
            assert not argument.startswith("-") or re.search(
                rf"(?<![\w-]){re.escape(argument)}(?![\w-])", known
            ), line
