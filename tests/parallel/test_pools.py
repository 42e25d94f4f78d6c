"""Pools of two ranks: the sessions of one GPU's pool, and snapshots that either opens."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from scripts.random_checkpoint import write_random_checkpoint
from seko_export import build_steps
from seko_export.media.sources import MediaSources
from seko_runtime import OpenArtifact, open_artifact
from seko_runtime.errors import PoolFullError, RankLostError, SnapshotError, UsageError
from seko_runtime.video.chunk import Chunk
from seko_runtime.video.pool import Pool
from seko_runtime.video.row_numbers import stream_content
from tests.export.media_files import write_vae
from tests.parallel.conftest import one_gpu, ranks_of_programs, weights_of
from tests.parallel.test_faults import run_on
from tests.parallel.test_ranks import same_pictures
from tests.runtime import toy
from tests.support.eager_pool import eager_pool
from tests.support.shared import made_once

CHUNKS = 4  # the ring of six frames behind a sink of one wraps with the third


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact `two` with exported programs as engines, which torch runs op by op. Not to be changed."""

    def make(folder: Path) -> None:
        folder.mkdir()
        config = one_gpu().changed(ranks=2)
        write_random_checkpoint(
            folder / "tiny.pt", config.model, format="self-forcing", seed=0, dtype=torch.float32
        )
        with ranks_of_programs():
            build_steps.build_artifact(
                config,
                folder / "tiny.pt",
                folder / "artifact",
                media=MediaSources(vae=write_vae(folder / "vae")),
                backend="compile",
                compiler_cache=False,
            )

    return made_once(tmp_path_factory, "programs-ranks", make) / "artifact"


@pytest.fixture(scope="module")
def opened(programs: Path) -> Iterator[OpenArtifact]:
    """That artifact, its two processes running."""
    with ranks_of_programs(), open_artifact(programs) as artifact:
        yield artifact


@pytest.fixture
def single(programs: Path, opened: OpenArtifact) -> Iterator[Pool]:
    """The pool of the same build on one GPU: its modules, eager."""
    with (
        torch.no_grad(),
        eager_pool(one_gpu(), weights_of(programs), opened.manifest) as pool,
    ):
        yield pool


@pytest.fixture
def several(opened: OpenArtifact) -> Iterator[Pool]:
    """The pool on two ranks."""
    with opened.open_pool() as pool:
        yield pool


def text_of(pool: Pool, number: int) -> np.ndarray:
    """A text [1, tokens, text_dim] for each number."""
    shape = next(buffer.shape for buffer in pool.manifest.buffers if buffer.name == "text.embeddings")[1:]
    return np.random.default_rng(number).standard_normal((1, *shape)).astype(np.float32)


def near(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray], bound: float) -> bool:
    """Return whether latents differ by the bound at most, and video frames by rounding."""
    apart = np.linalg.norm(found[0] - expected[0])
    return bool(apart <= bound * np.linalg.norm(expected[0])) and same_pictures(found[1], expected[1])


def seen(chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
    """Return a chunk's latents and video frames."""
    return chunk.to_host(), chunk.video()


def life(pool: Pool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the chunks of two sessions that begin, stand and end at different times."""
    chunks = []
    with pool.open_session(seed=1, text=text_of(pool, 1), lease_s=600) as first:
        chunks += [seen(first.run_chunk()) for _ in range(2)]
        with pool.open_session(seed=2, text=text_of(pool, 2), tenant="ada") as second:
            assert pool.free == 0
            with pytest.raises(PoolFullError, match="all 2 rows"):
                pool.open_session(text=text_of(pool, 3))
            for number in range(CHUNKS):
                together = pool.run([second, first])
                chunks += [seen(chunk) for chunk in together]
                if number == 1:  # later not all chunks are kept, of which the VAE's caches are made again
                    second.rewind(1)
                    chunks.append(seen(second.run_chunk()))
            first.pause()
            chunks.append(seen(second.run_chunk()))
            second.set_text(text_of(pool, 4), recache=True)
            first.resume()
            chunks += [seen(chunk) for chunk in pool.run([first, second])]
            second.restart(seed=5)
            chunks.append(seen(second.run_chunk()))
    assert (pool.free, pool.sessions) == (2, [])
    return chunks


def test_sessions_of_a_pool_are_those_of_one_gpu(single: Pool, several: Pool) -> None:
    bound = several.manifest.workload.golden.tolerance  # that of engines against the eager model
    for found, expected in zip(life(several), life(single), strict=True):
        assert near(found, expected, bound)
    assert several.session_bytes == single.session_bytes
    assert several.stats.chunks == single.stats.chunks
    with pytest.raises(UsageError, match="text has shape"):
        several.open_session(text=np.zeros((1, 2, 3), np.float32))
    assert several.free == 2


def test_a_snapshot_is_the_same_file_from_two_ranks_and_one(
    single: Pool, several: Pool, tmp_path: Path
) -> None:
    with several.open_session(seed=1, text=text_of(several, 1)) as session:
        for _ in range(CHUNKS):
            session.run_chunk()
        session.save(tmp_path / "two")
        expected = seen(session.run_chunk())
    with single.restore(tmp_path / "two") as session:
        session.save(tmp_path / "one")
        assert near(seen(session.run_chunk()), expected, several.manifest.workload.golden.tolerance)
    with several.restore(tmp_path / "one") as session:
        session.save(tmp_path / "again")
        assert all(map(np.array_equal, seen(session.run_chunk()), expected))
    files = {name: load_file(tmp_path / name) for name in ("two", "one", "again")}
    assert (tmp_path / "two").read_bytes() == (tmp_path / "again").read_bytes()
    heads = files["one"]["kv.k"].reshape(single.manifest.buffers[0].shape[0], -1, 2, 128 * 4)
    assert heads[:, :, 0].any()
    assert heads[:, :, 1].any()
    lane_buffers = [
        buffer for buffer in several.manifest.buffers if buffer.rank_axis and buffer.role == "lane"
    ]
    assert {buffer.name for buffer in lane_buffers} >= {"vae.cache.00", "video.first", "video"}
    assert all(
        files["one"][buffer.name].size == 2 * buffer.nbytes // several.manifest.rows
        for buffer in lane_buffers
    )
    digests = {"seko.snapshot", "seko.sha256"}  # which artifact saved it, and the hash of that
    assert all(
        np.array_equal(files["one"][name], files["two"][name]) for name in files["two"].keys() - digests
    )


def test_a_snapshot_of_other_weights_model_or_layout_is_refused(
    opened: OpenArtifact, several: Pool, tmp_path: Path
) -> None:
    manifest = opened.manifest
    content = stream_content(manifest)
    name = manifest.weights[0].file
    others = (
        replace(manifest, files={**manifest.files, name: replace(manifest.files[name], sha256="0" * 64)}),
        replace(manifest, model={**manifest.model, "norm_eps": 1.0}),
        toy.changed(manifest, stream=replace(manifest.workload.stream, sink_frames=0)),
        toy.changed(manifest, schedule=replace(manifest.workload.schedule, shift=1.0)),
        toy.changed(manifest, kv=replace(manifest.workload.kv, scheme="fp4")),
    )
    assert len({content, *map(stream_content, others)}) == 1 + len(others)
    assert stream_content(replace(manifest, files={})) == ""
    assert stream_content(replace(manifest, ranks=1, state_rows=9)) == content
    with several.open_session(text=text_of(several, 1)) as session:
        session.run_chunk()
        session.save(tmp_path / "snapshot")
        several._digests = "0" * 64, stream_content(others[0])
        with pytest.raises(SnapshotError, match=r"is of artifact .* largest --batch"):
            several.restore(tmp_path / "snapshot")


@pytest.mark.slow  # a second group; that the death of a rank is told, test_group.py shows
def test_a_snapshot_and_a_paused_session_outlive_their_ranks(
    programs: Path, opened: OpenArtifact, tmp_path: Path
) -> None:
    with open_artifact(programs) as artifact, artifact.open_pool() as pool:
        running, paused = (pool.open_session(seed=n, text=text_of(pool, n)) for n in (1, 2))
        pool.run([running, paused])
        running.save(tmp_path / "running")
        paused.pause()
        os.kill(artifact.processes[1], signal.SIGKILL)
        with pytest.raises(RankLostError, match="rank 1 of 2"):
            run_on(running)
        paused.save(tmp_path / "paused")
        with pytest.raises(RankLostError, match="rank 1 of 2"):
            running.save(tmp_path / "late")
        running.close()
        paused.close()
    with opened.open_pool() as pool:
        for number, name in ((1, "running"), (2, "paused")):
            with pool.open_session(seed=number, text=text_of(pool, number)) as alone:
                first = alone.run_chunk().to_host()
                expected = alone.run_chunk().to_host()
            with pool.restore(tmp_path / name) as session:
                found = session.run_chunk()
                assert found.index == 1
                assert np.array_equal(found.to_host(), expected)
                assert not np.array_equal(expected, first)
