"""Seko-Talk on two ranks, Gloo between them: portrait, voices and layers of two rings, as one rank has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from seko_export.config.pool import PoolConfig
from seko_export.config.video import VideoBuild
from seko_export.families.seko_talk import audio
from seko_export.families.seko_talk.family import FAMILY
from seko_export.families.wan_layout import picture_branch
from seko_export.media.hubert.files import hubert_config_of
from seko_export.media.sources import MediaSources
from seko_export.video.recording import golden_text
from seko_runtime import OpenArtifact, open_artifact
from seko_runtime.video.pool import Pool, Session
from tests.parallel.conftest import build_of_programs, ranks_of_programs, weights_of
from tests.seko_talk.streams import random_reference, talk_config, write_hubert
from tests.support.eager_pool import eager_pool
from tests.support.shared import made_once
from tests.support.stacked import needed, push
from tests.support.tolerances import relative_error

pytest.importorskip("transformers", reason="transformers is not installed")

BAR = 5e-5  # as in tests/seko_talk: passes that feed on each other
CHUNKS = 4  # the larger ring of four frames behind a sink of one wraps with the third


def config_of(hubert: Path) -> VideoBuild:
    """Two speakers with masks, CLIP's features, two layers with rings of two sizes, a pool of two sessions."""
    layout = {"chunk_frames": 2, "ring_frames": 4, "layer_rings": (2, 4)}
    config = talk_config(model={"speakers": 2}, layout=layout)
    return config.changed(audio=hubert_config_of(hubert), pool=PoolConfig(2, (2,)))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of two ranks whose engines are exported programs that torch runs op by op, and its HuBERT."""

    def make(folder: Path) -> None:
        folder.mkdir()
        write_hubert(folder / "hubert", 48)
        config = config_of(folder / "hubert").changed(ranks=2)
        build_of_programs(folder, config, MediaSources(audio_encoder=folder / "hubert"))

    return made_once(tmp_path_factory, "talk-ranks", make)


@pytest.fixture(scope="module")
def opened(built: Path) -> Iterator[OpenArtifact]:
    """That artifact, its two processes running."""
    with ranks_of_programs(), open_artifact(built / "artifact") as artifact:
        yield artifact


@pytest.fixture
def single(built: Path, opened: OpenArtifact) -> Iterator[Pool]:
    """The pool of the same build on one GPU: its modules, eager."""
    weights = weights_of(built / "artifact")
    with torch.no_grad(), eager_pool(config_of(built / "hubert"), weights, opened.manifest) as pool:
        yield pool


@pytest.fixture
def several(opened: OpenArtifact) -> Iterator[Pool]:
    """The pool on two ranks."""
    with opened.open_pool() as pool:
        yield pool


def begin(pool: Pool, config: VideoBuild, number: int = 0) -> Session:
    """Open a session with a portrait and masks; ``number`` makes another picture."""
    s = config.workload.stream
    masks = np.zeros((2, s.frame_tokens), np.float32)
    masks[0, ::3] = masks[1, 1::3] = 1
    seen = np.random.default_rng(number).standard_normal((5, 40)).astype(np.float32)
    inputs = {audio.MASKS: masks, picture_branch.FEATURES: seen}
    text, portrait = golden_text(config.as_batch)[:1].numpy(), random_reference(config, number)[0].numpy()
    return pool.open_session(seed=number, text=text, reference=portrait, inputs=inputs)


def voices(number: int = 0) -> np.ndarray:
    """Two voices [2, samples] of as many samples as the chunks hear, louder and softer."""
    samples = 1000 * (4 * (2 * CHUNKS - 1) + 1)
    drawn = np.random.default_rng(number).normal(0, 0.2, (2, samples))
    return (drawn * np.linspace(0.2, 2, samples)).astype(np.float32)


def life(pool: Pool, config: VideoBuild) -> list[np.ndarray]:
    """Return the chunks of two sessions whose voices come late, one of which pauses and one of which steps back."""
    chunks, pushed = [], voices()
    with begin(pool, config) as first, begin(pool, config, 1) as second:
        push(second, voices(1))
        at = 0
        for number in range(CHUNKS):
            _, end = needed(first)
            push(first, pushed[:, at:end])
            at = end
            chunks += [chunk.to_host() for chunk in pool.run([second, first])]
            if number == 1:
                second.pause()
                second.resume()
        second.rewind(CHUNKS - 1)
        push(second, voices(2)[:, 21_000:], at=21_000)
        chunks.append(second.run_chunk().to_host())
    return chunks


@pytest.mark.slow
def test_sessions_that_hear_are_those_of_one_gpu(built: Path, single: Pool, several: Pool) -> None:
    config = config_of(built / "hubert")
    expected, found = life(single, config), life(several, config)
    errors = [relative_error(*map(torch.from_numpy, pair)) for pair in zip(found, expected, strict=True)]
    assert max(errors) <= BAR
    assert relative_error(*map(torch.from_numpy, (expected[-1], expected[-3]))) > 100 * BAR  # another voice


@pytest.mark.slow
def test_a_snapshot_of_two_ranks_opens_on_one_and_back(
    built: Path, single: Pool, several: Pool, tmp_path: Path
) -> None:
    config, pushed = config_of(built / "hubert"), voices()
    with begin(several, config) as session:
        push(session, pushed)
        for _ in range(CHUNKS - 1):
            session.run_chunk()
        session.save(tmp_path / "two")
        expected = session.run_chunk().to_host()

    def heard(pool: Pool, name: str, saved: str) -> np.ndarray:
        with pool.restore(tmp_path / name) as session:
            session.save(tmp_path / saved)
            at, _ = needed(session)
            push(session, pushed[:, at:], at=at)
            return session.run_chunk().to_host()

    assert relative_error(*map(torch.from_numpy, (heard(single, "two", "one"), expected))) <= BAR
    assert np.array_equal(heard(several, "one", "again"), expected)
    assert (tmp_path / "two").read_bytes() == (tmp_path / "again").read_bytes()
    caches = [name for name in load_file(tmp_path / "two") if name.startswith("kv.")]
    assert {name for name in caches if name.endswith(".k")} == {"kv.k", "kv.ring2.k"}


@pytest.mark.slow
def test_the_family_splits_what_belongs_to_tokens(built: Path) -> None:
    """A rank keeps the gates of its own tokens, its heads of the caches, and whole keys and values of the voices."""
    config = config_of(built / "hubert")
    whole, parts = (
        {spec.name: spec.shape for spec in FAMILY.graph(build).buffers}
        for build in (config, config.changed(ranks=2))
    )
    changed = {name for name, shape in whole.items() if parts[name] != shape}
    caches = {name for name in whole if name.startswith("kv.") and name.endswith((".k", ".v"))}
    assert changed == caches | {f"chunk.{audio.GATE}"}
