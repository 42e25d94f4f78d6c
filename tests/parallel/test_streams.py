"""References, sentences, pictures and video of two ranks, against one: threads in place of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from scripts.random_lora import random_pairs, write_lora
from seko_export.checkpoints.sources import LoadOptions, LoraFile
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.stream import StreamConfig
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.model_files import load_checkpoint
from seko_export.families.registry import family_of, graph_of, presets
from seko_export.video.bounds import TOLERANCES, VIDEO_TOLERANCES
from seko_runtime.errors import UsageError
from seko_runtime.video.chunk import Chunk
from seko_runtime.video.pool import Pool
from tests.export.media_files import TEXT, VAE, write_tokenizer
from tests.parallel.thread_group import EagerRank, random_weights, ranks_in_threads
from tests.support.stacked import Stacked, StackedChunk, stacked
from tests.truth.eager_stream import random_text

BOUND, VIDEO_BOUND = (table[torch.float32]["exact"] for table in (TOLERANCES, VIDEO_TOLERANCES))
# A prompt shows in the keys and values of the second layer, not of the first.
MODEL = replace(presets()["tiny"].model, layers=2, dim=64, ffn_dim=96)
STREAM = StreamConfig(32, 32, 2, 1, 4, batch=2, reference_frames=3)
LAYOUTS = [
    {"height": 48, "width": 48, "window_positions": True},  # 9 tokens of a latent frame: rank 1 has padding
    {"pass_caches": True},
    {"context": "reuse"},
    {"offload_cache": True},
]
SEEDS = (5, 6)


def config_of(*media: object, **stream: object) -> VideoBuild:
    """A smaller model than the tiny one, two rows, three reference frames; with or without text encoder and VAE."""
    layers = 5 if stream.get("offload_cache") else MODEL.layers  # of two the device would hold all
    video = VideoConfig(replace(STREAM, **stream), Schedule.warped(2), "fp32", *media)
    return VideoBuild(replace(MODEL, layers=layers), video, TargetConfig("cpu"))


def near(actual: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.linalg.norm(actual - expected) <= BOUND * np.linalg.norm(expected))


def references_of(config: VideoBuild, seed: int) -> np.ndarray:
    """Latents [B, C, R, h, w]."""
    s = config.workload.stream
    shape = (s.batch, config.model.out_channels, s.reference_frames, s.latent_height, s.latent_width)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_references_are_those_of_one_rank_in_every_row(layout: dict[str, object]) -> None:
    config = config_of(**layout)
    weights, text = random_weights(config), random_text(config.model, 2).numpy()
    mine, others = (references_of(config, seed) for seed in (1, 2))

    def begun(session: Stacked, own: np.ndarray) -> list[np.ndarray]:
        results = [session.run_chunk().to_host() for _ in range(3)]
        session.restart_row(1, reference=own[1])
        return [*results, session.run_chunk().to_host()]

    def life(session: Stacked) -> list[np.ndarray]:
        results = begun(session, others)
        session.restart_row(1)  # which keeps them
        if config.workload.stream.has_context:
            session.set_text(text[::-1], recache=True)
        return [*results, session.run_chunk().to_host(), *session.cache_sample(1).values()]

    beginning = {"seeds": SEEDS, "text": text, "reference": mine}
    with torch.no_grad(), stacked(EagerRank(config, weights).open_rows({}), **beginning) as single:
        expected = life(single)
    with torch.no_grad(), stacked(EagerRank(config, weights).open_rows({}), **beginning) as single:
        unlike = begun(single, mine)[-1]
    with (
        ranks_in_threads(config.changed(ranks=2), weights, None) as rows,
        stacked(rows, **beginning) as several,
    ):
        actual = life(several)
    assert all(map(near, actual, expected))
    assert not near(unlike, expected[3])  # else the bound could not tell references apart


def test_a_sink_averages_as_that_of_one_rank() -> None:
    layout = {"reference_frames": 0, "sink_frames": 2, "window_positions": True, "sink_average": 0.2}
    config = config_of(**layout)
    weights, beginning = (
        random_weights(config),
        {"seeds": SEEDS, "text": random_text(config.model, 2).numpy()},
    )

    def life(session: Stacked) -> list[np.ndarray]:
        chunks = [session.run_chunk().to_host() for _ in range(6)]
        return [*chunks, *session.cache_sample(1).values()]

    with torch.no_grad(), stacked(EagerRank(config, weights).open_rows({}), **beginning) as single:
        expected = life(single)
    with (
        ranks_in_threads(config.changed(ranks=2), weights, None) as rows,
        stacked(rows, **beginning) as several,
    ):
        actual = life(several)
    assert all(map(near, actual, expected))


def test_a_lora_changes_the_stream_of_ranks_as_that_of_one(tmp_path: Path) -> None:
    config = config_of(reference_frames=0)
    write_random_checkpoint(tmp_path / "base", config.model, seed=0, dtype=torch.float32)
    write_lora(tmp_path / "lora", random_pairs(config.model, rank=4, seed=1), "comfyui", 2.0)
    beginning = {"seeds": SEEDS, "text": random_text(config.model, 2).numpy()}

    def weights_of(build: VideoBuild, *loras: LoraFile) -> dict[str, torch.Tensor]:
        checkpoint = load_checkpoint(tmp_path / "base", build.model, LoadOptions(loras=loras))
        weights = dict(family_of(build).weights(graph_of(build).pieces, checkpoint))
        return weights | build.workload.schedule.tables(build.as_batch.workload.stream)

    def life(session: Stacked) -> list[np.ndarray]:
        return [session.run_chunk().to_host() for _ in range(2)]

    lora, two = LoraFile(tmp_path / "lora"), config.changed(ranks=2)
    with torch.no_grad(), stacked(EagerRank(config, weights_of(config)).open_rows({}), **beginning) as single:
        plain = life(single)
    with (
        torch.no_grad(),
        stacked(EagerRank(config, weights_of(config, lora)).open_rows({}), **beginning) as single,
    ):
        expected = life(single)
    with ranks_in_threads(two, weights_of(two, lora), None) as rows, stacked(rows, **beginning) as several:
        actual = life(several)
    assert all(map(near, actual, expected))
    assert not any(map(near, plain, expected))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The file of a tokenizer that knows few words."""
    write_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def pictures(*shape: int) -> np.ndarray:
    """Random pictures [..., H, W, 3] uint8."""
    return np.random.default_rng(3).integers(0, 256, (*shape, STREAM.height, STREAM.width, 3), np.uint8)


def taken(results: list[np.ndarray], chunk: Chunk | StackedChunk) -> None:
    """Add a chunk's latents and the frames of each of its rows."""
    rows = chunk.rows if isinstance(chunk, StackedChunk) else [chunk]
    results += [chunk.to_host(), *(row.video()[0] for row in rows)]


def assert_same(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Check that latents and frames differ by rounding alone."""
    for array, other in zip(actual, expected, strict=True):
        assert (array.shape, array.dtype) == (other.shape, other.dtype)
        if array.dtype == np.uint8:
            assert np.square(array.astype(np.float64) - other).mean() ** 0.5 <= VIDEO_BOUND
        else:
            assert near(array, other)


def test_a_stream_follows_its_sentences_as_on_one_rank(tokenizer: Path) -> None:
    """Prompts change between chunks, for all rows or each, the cache kept or rebuilt; pictures are references."""
    config = config_of(TEXT, VAE, reference_frames=1)
    weights = random_weights(config)

    def life(session: Stacked) -> tuple[list[np.ndarray], tuple[int, int]]:
        results = [*session.stream(chunks=1), *session.stream("a blue square", chunks=1)]
        for prompt, recache in ((("a red disc", "a blue square"), True), ("a square spinning", False)):
            session.set_prompt(prompt, recache=recache)
            taken(results, session.run_chunk())
        session.restart_row(0, image=pictures(), reference=pictures(1)[:, ::-1])
        taken(results, session.run_chunk())
        stats = session.stats
        return results, (stats.prompt_cache_hits, stats.prompt_cache_misses)

    beginning = {"seeds": SEEDS, "prompt": "a red disc", "image": pictures(), "reference": pictures(1)}
    with torch.no_grad(), stacked(EagerRank(config, weights, tokenizer).open_rows({}), **beginning) as single:
        expected, counts = life(single)
    with (
        ranks_in_threads(config.changed(ranks=2), weights, tokenizer) as rows,
        stacked(rows, **beginning) as several,
    ):
        actual, several_counts = life(several)
    assert several_counts == counts
    assert_same(actual, expected)


def test_sessions_of_a_pool_have_sentences_and_references_of_their_own(tokenizer: Path) -> None:
    config = config_of(TEXT, VAE, reference_frames=1).changed(pool=PoolConfig(2, (1, 2)))
    weights = random_weights(config)

    def life(pool: Pool) -> list[np.ndarray]:
        results: list[np.ndarray] = []
        with (
            pool.open_session(seed=1, prompt="a red disc", reference=pictures(1)) as first,
            pool.open_session(seed=2, prompt="a blue square", reference=pictures(1)[:, ::-1]) as second,
        ):
            for chunk in pool.run([second, first]):
                taken(results, chunk)
            for check_prompt in (first.check_prompt, pool.check_prompt):
                check_prompt("a blue square")
                with pytest.raises(UsageError, match="70000 letters"):
                    check_prompt("a" * 70_000)
            first.set_prompt("a square spinning", recache=True)
            second.restart(reference=pictures(1))
            for due, session in enumerate((second, first)):
                session.request_chunk(float(due))
            served = pool.serve_next()
            assert [session for session, _ in served] == [second, first]
            for _, chunk in served:
                taken(results, chunk)
            results += second.stream("a red disc", chunks=1)
        return results

    alone = EagerRank(config, weights, tokenizer)
    with torch.no_grad(), Pool(alone.open_rows({})) as single:
        expected = life(single)
    with ranks_in_threads(config.changed(ranks=2), weights, tokenizer) as rows, Pool(rows) as pool:
        actual = life(pool)
    assert_same(actual, expected)
