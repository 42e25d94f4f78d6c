"""Pools of two ranks: the sessions of one GPU's pool, snapshots that either opens, and a server of them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from seko_runtime import OpenArtifact, open_artifact, read_manifest
from seko_runtime.errors import (
    PoolFullError,
    RankLostError,
    SessionClosedError,
    SnapshotError,
    StaleChunkError,
    UsageError,
)
from seko_runtime.opening.artifact import open_rank
from seko_runtime.video.chunk import Chunk
from seko_runtime.video.contract import ENCODER_PROGRAMS, resolve_video
from seko_runtime.video.pool import Pool, Session
from seko_runtime.video.row_numbers import stream_content
from seko_serve.client import AsyncClient
from seko_serve.fleet.box import Box
from seko_serve.fleet.directory import MemoryDirectory
from seko_serve.run import device
from seko_serve.settings import Settings
from tests.export.media_files import TEXT, VAE
from tests.parallel.conftest import SIDE, one_gpu, ranks_of_programs, weights_of
from tests.parallel.rank_faults import is_running
from tests.runtime import toy
from tests.serve.test_fleet_gateway import to_the_end
from tests.serve.test_server import watch
from tests.support.eager_pool import eager_pool

ENCODER = ("conv1", "encoder")  # parts of the VAE's names that encode
SERVED_S = 200.0  # until the server's test gives up
CHUNKS = 4  # the ring of six frames behind a sink of one wraps with the third


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
        eager_pool(one_gpu().changed(vae=VAE, text=TEXT), weights_of(programs), opened.manifest) as pool,
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


def same_pictures(found: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether video frames differ by rounding at most: few numbers, by one level of 255."""
    apart = np.abs(found.astype(int) - expected)
    return found.shape == expected.shape and apart.max() <= 1 and (apart > 0).mean() <= 1e-3


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


def test_a_wrong_call_is_the_callers_error_and_the_group_goes_on(several: Pool) -> None:
    text = text_of(several, 5)
    with several.open_session(seed=5, text=text) as session:
        with pytest.raises(UsageError, match="text has shape"):
            session.set_text(np.zeros((1, 2, 3), np.float32))
        with pytest.raises(UsageError, match="expected an array of numbers"):
            session.set_text(object())
        first = session.run_chunk()
        expected = first.to_host(), first.video()
        for _ in range(4):
            session.run_chunk()
        with pytest.raises(StaleChunkError, match="the frames of chunk 0"):
            first.video()
        session.restart()
        again = session.run_chunk()
        assert np.array_equal(again.to_host(), expected[0])
        assert np.array_equal(again.video(), expected[1])


def test_sessions_of_a_pool_are_those_of_one_gpu(opened: OpenArtifact, single: Pool, several: Pool) -> None:
    bound = several.manifest.workload.golden.tolerance  # that of engines against the eager model
    for found, expected in zip(life(several), life(single), strict=True):
        assert near(found, expected, bound)
    assert several.session_bytes == single.session_bytes
    assert several.stats.chunks == single.stats.chunks
    with pytest.raises(UsageError, match="text has shape"):
        several.open_session(text=np.zeros((1, 2, 3), np.float32))
    with pytest.raises(UsageError, match="one session or pool at a time"):
        opened.open_pool()
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


def test_a_manifest_whose_caches_have_no_heads_or_no_rank_is_refused(opened: OpenArtifact) -> None:
    manifest = opened.manifest
    resolve_video(manifest)
    without = tuple(buffer for buffer in manifest.buffers if buffer.name != "rank")
    with pytest.raises(Exception, match="need the host buffer 'rank'"):
        resolve_video(replace(manifest, buffers=without))
    for name, axis, words in (
        ("video", 1, "an even share of axis 2 of both"),
        ("video", 9, "an axis after the rows"),
        ("rank", 1, "an axis after the rows of a cache or lane buffer"),
    ):
        wrong = tuple(
            replace(buffer, rank_axis=axis) if buffer.name == name else buffer for buffer in manifest.buffers
        )
        with pytest.raises(Exception, match=words):
            resolve_video(replace(manifest, buffers=wrong))
    flat = tuple(
        replace(buffer, shape=(*buffer.shape[:1], buffer.shape[1] * buffer.shape[2] * buffer.shape[3]))
        if buffer.row_axis and buffer.role == "cache"
        else buffer
        for buffer in manifest.buffers
    )
    with pytest.raises(Exception, match="has rank_axis 2, expected an axis after the rows"):
        resolve_video(replace(manifest, buffers=flat))


def run_on(session: Session) -> None:
    """Make chunks until it fails."""
    while True:
        session.run_chunk()


@pytest.mark.slow  # a second group; that the death of a rank is told, test_group.py shows
def test_a_rank_that_dies_ends_its_group_alone_and_sessions_outlive_it(
    programs: Path, opened: OpenArtifact, tmp_path: Path
) -> None:
    """All get one error. What was saved or paused goes on in another group, which did not notice."""
    with open_artifact(programs) as artifact, artifact.open_pool() as pool:
        members = artifact.processes
        running, paused = (pool.open_session(seed=n, text=text_of(pool, n)) for n in (1, 2))
        pool.run([running, paused])
        running.save(tmp_path / "running")
        paused.pause()
        os.kill(members[1], signal.SIGKILL)
        with pytest.raises(RankLostError, match="rank 1 of 2") as first:
            run_on(running)
        assert not any(map(is_running, members))
        paused.save(tmp_path / "paused")
        with pytest.raises(RankLostError, match="rank 1 of 2") as second:
            running.save(tmp_path / "late")
        assert str(second.value) == str(first.value)
        running.close()
        paused.close()
    with pytest.raises(SessionClosedError):
        running.run_chunk()
    with pytest.raises(SessionClosedError):
        artifact.open_pool()
    with opened.open_pool() as pool:
        for number, name in ((1, "running"), (2, "paused")):
            with pool.open_session(seed=number, text=text_of(pool, number)) as alone:
                before = alone.run_chunk().to_host()
                expected = alone.run_chunk().to_host()
            with pool.restore(tmp_path / name) as session:
                found = session.run_chunk()
                assert found.index == 1
                assert np.array_equal(found.to_host(), expected)
                assert not np.array_equal(expected, before)


@pytest.mark.slow  # loads a rank's programs again
def test_a_picture_is_encoded_by_rank_0_alone_and_begins_the_stream_of_all(
    programs: Path, opened: OpenArtifact, single: Pool, several: Pool
) -> None:
    image = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), np.uint8)

    def first_chunk(pool: Pool, **picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        with pool.open_session(seed=1, text=text_of(pool, 1), **picture) as session:
            return seen(session.run_chunk())

    bound, expected = opened.manifest.workload.golden.tolerance, first_chunk(single, image=image)
    assert near(first_chunk(several, image=image), expected, bound)
    assert not near(first_chunk(single), expected, bound)
    with open_rank(programs, rank=1) as other:
        loaded = other.engines.loaded
        lacking = {engine.name for engine in other.manifest.engines} - loaded.engines.keys()
        assert lacking == {
            call.engine for name in ENCODER_PROGRAMS for call in other.manifest.programs.get(name, ())
        }
        encoding = {weight.name for weight in other.manifest.weights if weight.name.split(".")[1] in ENCODER}
        assert encoding
        assert not encoding & loaded.weights.keys()


@pytest.mark.slow  # a server with two processes of its own
def test_a_server_of_two_ranks_makes_their_stream_and_saves_it(
    programs: Path, several: Pool, tmp_path: Path
) -> None:
    chunks = 2

    async def test() -> np.ndarray:
        directory = MemoryDirectory(time.monotonic)
        settings = Settings(programs, "cpu", port=0, snapshots=str(tmp_path / "store"), opens_per_s=1e5)
        box = Box(settings, device(settings), lambda: directory, read_manifest(programs)[1])
        serving = asyncio.create_task(box.serve())
        while not box.started:
            assert not serving.done(), serving
            await asyncio.sleep(0.05)
        async with AsyncClient(box.facts().inside) as client:
            await client.open(codecs=["rgb24"], prompt="a b", seed=3)
            media = (await watch(client, chunks))[0]
            box.stop()
            rest, code = await to_the_end(client)
            assert code == "stopping"
            await serving
            name = client.ready["session"]
        assert any(file.name.startswith(str(name)) for file in (tmp_path / "store").iterdir())
        assert [packet.serial for packet in media + rest] == list(range(len(media + rest)))
        return np.stack([np.frombuffer(packet.payload, np.uint8) for packet in media])

    pictures = asyncio.run(asyncio.wait_for(test(), SERVED_S))
    with several.open_session(seed=3, prompt="a b") as session:
        expected = np.concatenate([session.run_chunk().video()[0] for _ in range(chunks)])
    assert np.array_equal(pictures, expected.reshape(len(expected), -1))
