"""The pages of docs/start/: what they download is laid out at random and tiny, and their commands find it; what they
plan fits; what they say goes wrong does."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import seko_export
from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_clip import write_random_clip
from scripts.random_lora import random_pairs, write_lora
from scripts.random_speech import write_random_voxcpm2
from seko_export.cli import main
from seko_export.config.media import ClipConfig
from seko_export.families.matrix_game.model import MatrixGameModel
from seko_export.families.model_files import load_checkpoint
from seko_export.families.registry import presets
from seko_export.families.voxcpm2.presets import PRESETS as SPEECH
from seko_export.host.environment import Target
from seko_export.media.umt5.keys import text_shapes
from seko_export.media.wan_vae.keys import vae_shapes
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_export.video.media import open_media
from seko_runtime.cli.commands import main as seko_run
from seko_runtime.cli.parser import SUMMARIES, parse, parsers
from seko_serve.cli import parser as serve_parser
from tests.export.media_files import TEXT, write_tokenizer
from tests.support.uncompiled import programs_as_they_are
from tests.test_real_models import SMALL, VAE_2_1, save_pth

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/start").glob("*.md"))}
LORA_RANK = 4
CAMERA = replace(presets()["lingbot-tiny"].model, dim=256, heads=2, text_dim=TEXT.dim, text_tokens=12)
# Of no preset's sizes, so that all which the file does not tell is taken from the published model.
GAME = replace(MatrixGameModel.of(presets()["matrix-game-tiny"].model), ffn_dim=256, image_tokens=257)
CLIP = ClipConfig(dim=32, layers=2, ffn_dim=64)


def lines_of(page: str, program: str = "") -> list[list[str]]:
    """The words of the page's commands, or of those of one program."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    words = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [line for line in words if " ".join(line).startswith(program)]


def faults_of(page: str) -> list[tuple[list[str], str]]:
    """The commands that the page says fail, and what of their sentence it quotes."""
    blocks = re.findall(r"^```console\n\$ (.*)\n(.*)\n```", PAGES[page], re.MULTILINE)
    return [(shlex.split(command), said) for command, said in blocks]


def write_longlive(path: Path) -> None:
    write_random_checkpoint(path, SMALL, format="self-forcing", seed=0)
    torch.save({"generator": torch.load(path)["generator"]}, path)


def write_foundation(path: Path) -> None:
    """The game's tensors, and an action module where only the foundation model has one."""
    write_random_checkpoint(path, GAME, format="matrix-game", seed=0)
    state = load_file(path) | {"model.blocks.15.action_model.keyboard_embed.0.weight": torch.zeros(8, 4)}
    save_file(state, path)


# What is published, by repository and the name in it.
WAN: dict[str, Callable[[Path], object]] = {
    "Wan2.1_VAE.pth": lambda path: save_pth(path, vae_shapes(VAE_2_1, "both")),
    "models_t5_umt5-xxl-enc-bf16.pth": lambda path: save_pth(path, text_shapes(TEXT)),
    "google/umt5-xxl/tokenizer.json": write_tokenizer,
}
PUBLISHED: dict[str, dict[str, Callable[[Path], object]]] = {
    "Wan-AI/Wan2.1-T2V-1.3B": WAN,
    "gdhe17/Self-Forcing": {
        "checkpoints/self_forcing_dmd.pt": lambda path: write_random_checkpoint(
            path, SMALL, format="self-forcing", seed=0
        )
    },
    "Efficient-Large-Model/LongLive-1.3B": {
        "models/longlive_base.pt": write_longlive,
        "models/lora.pt": lambda path: write_lora(
            path,
            random_pairs(SMALL, rank=LORA_RANK, seed=0, dtype=torch.float32),
            "peft-raw",
            float(LORA_RANK),
        ),
    },
    "robbyant/lingbot-world-v2-14b-causal-fast": WAN
    | {
        "transformers/*": lambda path: write_random_checkpoint(
            path.parent, CAMERA, format="lingbot-sharded", seed=0
        )
    },
    "Skywork/Matrix-Game-2.0": {
        "base_distilled_model/base_distill.safetensors": lambda path: write_random_checkpoint(
            path, GAME, format="matrix-game", seed=0
        ),
        "Wan2.1_VAE.pth": WAN["Wan2.1_VAE.pth"],
        "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth": lambda path: write_random_clip(
            path, CLIP, "wan", seed=0, dtype=torch.float32, device="cpu"
        ),
    },
    "openbmb/VoxCPM2": {"*": lambda path: write_random_voxcpm2(path.parent, SPEECH["voxcpm2-tiny"], seed=0)},
}


def lay_out(page: str, home: Path) -> None:
    """Write what the page downloads where it downloads it to; a name that is not published is an error."""
    for line in lines_of(page, "hf"):
        assert line[:2] == ["hf", "download"]
        repository, *names = line[2:]
        folder = home / names.pop(names.index("--local-dir") + 1)
        for name in [name for name in names if not name.startswith("--")] or ["*"]:
            assert name in PUBLISHED[repository], f"{repository} has no {name}"
            path = folder / name
            below = path.parent if path.name == "*" else path
            below.parent.mkdir(parents=True, exist_ok=True)
            PUBLISHED[repository][name](path)


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A page, in a folder where all that it downloads is laid out."""
    lay_out(request.param, tmp_path)
    monkeypatch.chdir(tmp_path)
    return str(request.param)


def parsed(line: list[str]) -> dict[str, Any]:
    """The options of a line of `seko-export`, as it parses them; an unknown one is an error."""
    _, command, *arguments = line
    context: click.Context = main.commands[command].make_context(command, list(arguments))
    return context.params


def run(line: list[str]) -> str:
    """What a line of `seko-export` prints."""
    done = CliRunner().invoke(main, line[1:])
    assert done.exit_code == 0, done.output
    return done.stdout


def misspelled(arguments: list[str], parser: argparse.ArgumentParser) -> set[str]:
    """Options that the parser has not in these letters; it would take the beginning of one."""
    known = parser.format_help()
    return {word for word in arguments if word.startswith("-") and not re.search(rf"{word}(?![\w-])", known)}


def test_the_pages_are_those_of_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.findall(r"start/([\w-]+)\.md", site) == [
        "self-forcing",
        "longlive",
        "lingbot",
        "matrix-game",
        "voxcpm2",
    ]
    assert set(PAGES) == {*re.findall(r"start/([\w-]+)\.md", site)}


@pytest.mark.parametrize("name", PAGES)
def test_each_line_is_a_command_whose_options_exist(name: str) -> None:
    made = {str(parsed(line)["output"]) for line in lines_of(name, "seko-export build")}
    assert len(made) == 1
    for line in lines_of(name):
        match line:
            case ["hf", "download", *_]:
                pass  # tests/test_readme_commands.py
            case ["seko-export", "verify", *_]:
                assert str(parsed(line)["artifact"]) in made
            case ["seko-export", *_]:
                parsed(line)
            case ["seko-run", command, *arguments]:
                _, commands = parsers(dict.fromkeys(SUMMARIES, print))
                assert not misspelled(arguments, commands[command])
                assert str(parse(line[1:], dict.fromkeys(SUMMARIES, print)).artifact) in made
            case ["seko-serve", *arguments]:
                assert not misspelled(arguments, serve_parser())
                assert str(serve_parser().parse_args(arguments).artifact) in made
            case _:
                pytest.fail(f"docs/start/{name}.md: {' '.join(line)}")


def test_what_is_inspected_and_built_is_there(page: str) -> None:
    """Every key and shape of model, LoRA and media; and the build is the one that was planned."""
    (inspect,) = lines_of(page, "seko-export inspect")
    (plan,) = lines_of(page, "seko-export plan")
    (build,) = lines_of(page, "seko-export build")
    checkpoint = Path(build[2])
    assert inspect[2] == build[2]
    assert build[2] in json.loads(run([*inspect, "--json"]))["command"]
    options, planned = parsed(build), parsed(plan)
    shared = options.keys() & planned.keys() - {"preset", "json_output"}
    assert {name: options[name] for name in shared} == {name: planned[name] for name in shared}
    if page == "voxcpm2":  # built and run below
        return
    preset = presets()[planned["preset"]]
    assert not preset.files or preset.is_named(checkpoint.resolve())
    known = {field.name for field in fields(BuildOptions)}
    resolved = resolve_build(
        BuildOptions(
            **{name: value for name, value in options.items() if name in known and name != "preset"}
        ),
        machine=Target("cuda", "sm_90"),
    )
    assert resolved.checkpoint is not None
    assert load_checkpoint(resolved.checkpoint, resolved.config.model, resolved.load_options)
    media = open_media(resolved.media, resolved.config)
    assert media.vae is not None
    assert (media.text is None) == (page == "matrix-game")
    assert (media.image is None) == (page != "matrix-game")
    assert (resolved.media.tokenizer is None) == (page == "matrix-game")


@pytest.mark.parametrize("name", PAGES)
def test_what_is_planned_fits(name: str) -> None:
    (plan,) = lines_of(name, "seko-export plan")
    assert json.loads(run([*plan, "--json"]))["fits"]


def break_files(page: str, command: list[str]) -> None:
    """Make of what is laid out what the page says goes wrong."""
    match page, command[1]:
        case "self-forcing", "build":
            shutil.rmtree("Wan2.1-T2V-1.3B/google")
        case "self-forcing", "inspect":
            Path(command[2]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        case "longlive", "build":
            pass
        case "lingbot", "inspect":
            for expert in ("high_noise_model", "low_noise_model"):
                Path(command[2], expert).mkdir(parents=True)
        case "matrix-game", "inspect":
            Path(command[2]).parent.mkdir()
            write_foundation(Path(command[2]))
        case "voxcpm2", "inspect":
            (vae,) = Path(command[2]).glob("audiovae.*")
            vae.unlink()
        case _:
            pytest.fail(f"docs/start/{page}.md: nobody knows how {' '.join(command)} goes wrong")


def test_what_goes_wrong_is_said_so(page: str) -> None:
    assert faults_of(page)
    for command, said in faults_of(page):
        break_files(page, command)
        done = CliRunner().invoke(main, command[1:])
        assert done.exit_code not in (0, 1)
        assert said in done.output


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")  # of what torch's compiler imports
def test_a_page_from_the_build_to_the_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, on a processor; not the voice of a recording, which a reader brings."""
    lay_out("voxcpm2", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(seko_export, "build", partial(seko_export.build, compiler_cache=False))
    with programs_as_they_are():
        for line in lines_of("voxcpm2", "seko-"):
            if line[0] == "seko-serve" or "--voice" in line:
                continue
            if line[0] == "seko-run":
                assert seko_run(line[1:]) == 0
            else:
                run([*line, *["--backend", "compile", "--target", "cpu"] * (line[1] == "build")])
    assert (tmp_path / "out.wav").read_bytes()[:4] == b"RIFF"
