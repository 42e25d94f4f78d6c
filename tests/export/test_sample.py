"""The sample's folder and what the options make of it: which model, whose VAE and text encoder, what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.checkpoints.errors import CheckpointNotFoundError, NotACheckpointError
from seko_export.errors import CheckpointError, UsageError
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.layers.weights import model_weights
from seko_export.families.model_files import load_checkpoint
from seko_export.families.registry import presets
from seko_export.host.progress import silent
from seko_export.media.sources import MediaSources
from seko_export.options.build_files import find_tokenizer
from seko_export.options.sample import SAMPLE_FOLDER, read_sample
from seko_export.video import recording as golden
from seko_export.video.media import open_media, prompt_ids
from tests.export.media_files import (
    SAMPLE_MODEL,
    SAMPLE_STREAM,
    TEXT,
    VAE,
    write_sample,
    write_text_encoder,
    write_vae,
)
from tests.support.asked import resolved

WORLD = replace(presets()["lingbot-tiny"].model, text_dim=128)  # as the shipped text encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("sample") / "sample")


def plan(folder: Path, preset: str | None = None, checkpoint: Path | None = None, **media: object):
    return resolved(preset, checkpoint=checkpoint, sample_folder=folder, **media)


def test_the_folder_says_everything(folder):
    sample = read_sample(folder)
    assert (sample.model, sample.stream, sample.vae) == (SAMPLE_MODEL, SAMPLE_STREAM, VAE)
    assert sample.text.truncate is False
    assert (sample.text.dim, sample.text.vocab_size) == (TEXT.dim, TEXT.vocab_size)
    assert sample.schedule.timesteps == (1000.0, 750.0)
    assert sample.schedule.shift == 3.0


def test_it_is_what_a_build_without_a_checkpoint_takes(folder, tmp_path):
    for named in (None, "sample"):
        build = plan(folder, named)
        assert build.checkpoint == folder / "dit.safetensors"
        assert build.config.model == SAMPLE_MODEL
        assert (build.config.workload.vae, build.config.workload.text is not None) == (VAE, True)
        assert build.media == MediaSources(
            folder / "vae.safetensors", folder / "text.safetensors", folder / "tokenizer.json"
        )
    absent = plan(tmp_path / "absent")
    assert absent.checkpoint is None
    assert (absent.config.model.name, absent.config.workload.vae, absent.config.workload.text) == (
        "tiny",
        None,
        None,
    )
    with pytest.raises(CheckpointNotFoundError, match=r"no sample model at .* --preset tiny"):
        plan(tmp_path / "absent", "sample")


def test_parts_can_be_left_out_and_exchanged(folder, tmp_path):
    bare = plan(folder, no_vae=True, no_text=True)
    assert (bare.config.workload.vae, bare.config.workload.text) == (None, None)
    assert bare.media == MediaSources()
    vae, text = write_vae(tmp_path / "vae"), write_text_encoder(tmp_path / "text_encoder")
    own = plan(folder, vae=vae, text_encoder=text)
    assert own.media == MediaSources(vae, text, text / "tokenizer.json")
    assert own.config.workload.text == TEXT  # cuts prompts, as pipelines do
    tiny = plan(folder, "tiny", vae=vae)
    assert (tiny.config.model.name, tiny.config.workload.vae, tiny.config.workload.text) == (
        "tiny",
        VAE,
        None,
    )
    trained = tmp_path / "own.safetensors"
    write_random_checkpoint(trained, SAMPLE_MODEL, format="wan", seed=1)
    other = plan(folder, "sample", checkpoint=trained)
    assert other.checkpoint == trained
    assert other.config.workload.vae == VAE


def test_the_samples_own_config_tells_all_of_its_weights(folder):
    """Model, layout and times of dit.safetensors are those of the preset, which has a VAE, too."""
    named, read = plan(folder, no_vae=True, no_text=True), plan(folder, checkpoint=folder / "dit.safetensors")
    assert read.config.changed(model=replace(read.config.model, name="sample")) == named.config
    assert read.notes == ()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"schedule": {"timesteps": ["soon"]}}))
    try:
        with pytest.raises(NotACheckpointError, match="'soon', expected a number above 0"):
            plan(folder, checkpoint=folder / "dit.safetensors")
    finally:
        (folder / "config.json").write_text(json.dumps(config))


def test_it_makes_video_of_a_sentence(folder):
    """The whole pipeline, eager: weights of all four files, prompt, chunks, frames."""
    build = plan(folder)
    config = build.config
    ids = prompt_ids(folder / "tokenizer.json", config, golden.GOLDEN_PROMPT)
    pieces = make_pieces(config)
    source = load_checkpoint(build.checkpoint, config.model)
    weights = dict(model_weights(pieces, source, open_media(build.media, config)))
    wanted = {
        a.ref.replace("{layer}", "0").removeprefix("weight:") for p in pieces.values() for a in p.parameters
    }
    assert set(weights) == wanted
    record = golden.record(
        config, weights | config.workload.schedule.tables(config.workload.stream), silent, ids
    )
    assert record.prompt == golden.GOLDEN_PROMPT
    assert list(record.chunks) == [0, 2]
    assert [tuple(chunk.video.shape) for chunk in record.chunks.values()] == [
        (1, 5, 32, 32, 3),
        (1, 8, 32, 32, 3),
    ]
    assert record.text.shape == (1, 12, 64)
    with pytest.raises(Exception, match="the prompt has 14 tokens, this artifact takes 12"):
        prompt_ids(folder / "tokenizer.json", config, "a red disc " * 4 + "on")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 2}, "format_version 2"),
        ({"vae": None}, r"lacks \['vae'\]"),
        ({"model": {"layers": 1}}, "describes no sample model"),
        ({"stream": {"height": 32, "depth": 2}}, "describes no sample model"),
        ({"schedule": {"shift": 3.0, "steps": 4}}, "describes no sample model"),
        ({"vae": {"base_dim": "wide"}}, "describes no VAE"),
    ],
)
def test_folders_that_cannot_be(folder, tmp_path, change, words):
    config = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotACheckpointError, match=words):
        read_sample(tmp_path)


def test_tokenizers_are_found_where_encoders_keep_them(tmp_path):
    text = write_text_encoder(tmp_path / "pipeline/text_encoder")
    assert find_tokenizer(text, None) == text / "tokenizer.json"
    (tmp_path / "pipeline/tokenizer").mkdir()
    moved = (text / "tokenizer.json").rename(tmp_path / "pipeline/tokenizer/tokenizer.json")
    for encoder in (text, tmp_path / "pipeline", text / "model.safetensors"):
        assert find_tokenizer(encoder, None).samefile(moved)
    assert find_tokenizer(text, moved) == find_tokenizer(text, moved.parent) == moved
    with pytest.raises(CheckpointNotFoundError, match="--tokenizer"):
        find_tokenizer(text, tmp_path / "absent")
    moved.write_text("{}")
    with pytest.raises(NotACheckpointError, match="has no 'model'"):
        find_tokenizer(text, None)


def test_a_tokenizer_as_large_as_umt5s_is_found(tmp_path: Path) -> None:
    """A vocabulary of 256,000 pieces takes 17 MB of JSON."""
    vocabulary = [[f"piece {number:060}", -float(number)] for number in range(200_000)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram", "vocab": vocabulary}}))
    assert (tmp_path / "tokenizer.json").stat().st_size > 15 << 20
    assert find_tokenizer(tmp_path, None) == tmp_path / "tokenizer.json"


def test_sources_that_contradict_the_build_are_refused(folder):
    build = plan(folder)
    with pytest.raises(UsageError, match="expected both or none"):
        MediaSources(text_encoder=folder / "text.safetensors")
    with pytest.raises(UsageError, match="a VAE: True, a file of it is named: None"):
        open_media(MediaSources(None, build.media.text_encoder, build.media.tokenizer), build.config)


def test_damaged_numbers_of_a_vae_name_its_option_and_file(folder, tmp_path):
    state = load_file(folder / "vae.safetensors")
    state = {name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}
    save_file(state, tmp_path / "vae.safetensors")
    build = plan(folder)
    media = replace(build.media, vae=tmp_path / "vae.safetensors")
    pieces, source = make_pieces(build.config), load_checkpoint(build.checkpoint, build.config.model)
    with pytest.raises(CheckpointError) as caught:
        dict(model_weights(pieces, source, open_media(media, build.config)))
    assert str(caught.value).startswith(f"--vae {tmp_path / 'vae.safetensors'}: ")
    assert "NaN or infinite numbers" in str(caught.value)


def test_the_shipped_sample_is_whole():
    """Its config is read, and its four files hold what it says; numbers are not looked at."""
    sample = read_sample()
    build = plan(SAMPLE_FOLDER)
    load_checkpoint(build.checkpoint, sample.model)
    open_media(build.media, build.config)
    ids = prompt_ids(SAMPLE_FOLDER / "tokenizer.json", build.config, golden.GOLDEN_PROMPT)
    assert ids is not None
    assert torch.count_nonzero(ids == 2) == 0  # every word of the golden's prompt is known
    assert sum(file.stat().st_size for file in SAMPLE_FOLDER.iterdir()) <= 25_000_000


def write_sample_of_another_family(folder: Path, **changes: object) -> Path:
    """Write a sample without media of its own; its weights are not looked at here."""
    config = {"format_version": 1, "media": "sample", "model": asdict(WORLD), "stream": asdict(SAMPLE_STREAM),
            "schedule": {"timesteps": [1000.0, 500.0], "shift": 5.0}, **changes}  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_a_checkpoint_may_be_the_folder_of_a_sample_of_any_family(tmp_path):
    """With the VAE and the text encoder of the one that ships."""
    folder = write_sample_of_another_family(tmp_path / "world")
    shipped = read_sample()
    for named in (None, "sample"):
        build = resolved(named, checkpoint=folder)
        assert build.checkpoint == folder / "dit.safetensors"
        assert build.config.model == WORLD
        assert (build.config.workload.vae, build.config.workload.text, build.media) == (
            shipped.vae,
            shipped.text,
            shipped.media,
        )
    assert resolved(None, checkpoint=folder, camera="pass", no_vae=True).config.model.camera == "pass"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"media": "../other"}, "has media '../other', expected 'sample' or none"),
        ({"media": None}, "lacks .*'vae', 'text'"),
        ({"model": {"family": "fog"}}, "family 'fog', which is not known"),
    ],
)
def test_samples_that_cannot_be(changes, words, tmp_path):
    folder = write_sample_of_another_family(tmp_path / "world", **changes)
    with pytest.raises(NotACheckpointError, match=words):
        read_sample(folder)
