"""A built pool: its engines hold their goldens, its sessions are those of streams alone, on a CPU and on a GPU."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.bench import thread_soak
from scripts.random_checkpoint import write_random_checkpoint
from seko_export.build_steps import build_artifact
from seko_export.config.pool import PoolConfig
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.workloads.base import BuildResult
from seko_runtime import open_artifact
from seko_runtime.video.pool import Pool, Session
from tests.support.no_host_sync import no_host_sync
from tests.support.small_artifact import MODEL, STREAM
from tests.support.uncompiled import leave_uncompiled

SESSIONS = 3


@pytest.fixture(autouse=True)
def programs_as_they_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled when a `compile` artifact is opened here, nor in processes started here, but for a GPU."""
    if request.node.get_closest_marker("gpu") is None:
        leave_uncompiled(monkeypatch)


@pytest.fixture(scope="module")
def pool_artifact(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """A small model with an FP4 cache, three sessions in calls of one and two: programs, which run as they are.

    Compiling them for a CPU would show what `fp4` shows: a pool's compiled engines are tested on a GPU.
    """
    home = tmp_path_factory.mktemp("pool")
    pool = PoolConfig(SESSIONS, (1, 2))
    config = VideoBuild(MODEL, VideoConfig(STREAM, Schedule.warped(), "fp4", pool=pool), TargetConfig("cpu"))
    write_random_checkpoint(home / "small.pt", MODEL, format="self-forcing", seed=0, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        leave_uncompiled(patch)
        return build_artifact(
            config, home / "small.pt", home / "artifact", backend="compile", compiler_cache=False
        )


def gpu_build(goal: Path, *further: str) -> Path:
    """The same for this machine's GPU."""
    from click.testing import CliRunner

    from seko_export.cli.commands import main

    options = ["build", "--preset", "tiny", "--fp4-kv", "--sessions", "3", "--batch", "1,2", "-o", str(goal)]
    done = CliRunner().invoke(main, [*options, *further])
    assert done.exit_code == 0, done.output
    return goal


@pytest.fixture(scope="module")
def gpu_pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the attention that such a build takes there: one engine for full and filling rows."""
    return gpu_build(tmp_path_factory.mktemp("gpu_pool") / "artifact")


@pytest.fixture(scope="module")
def masked_pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With torch's attention, so one engine with a mask and one without."""
    return gpu_build(tmp_path_factory.mktemp("masked_pool") / "artifact", "--attention", "torch")


@contextmanager
def opened(folder: Path) -> Iterator[Pool]:
    with open_artifact(folder) as artifact, artifact.open_pool() as pool:
        try:
            yield pool
        finally:
            for session in pool.sessions:
                session.close()


def text_of(pool: Pool, number: int) -> np.ndarray:
    """A text [1, tokens, text_dim] for each number."""
    shape = next(buffer.shape for buffer in pool.manifest.buffers if buffer.name == "text.embeddings")[1:]
    return np.random.default_rng(number).standard_normal((1, *shape)).astype(np.float32)


def open_numbered(pool: Pool, number: int) -> Session:
    return pool.open_session(seed=number, text=text_of(pool, number), name=f"stream {number}")


def alone(folder: Path, number: int, other: int, chunks: int) -> list[bytes]:
    """What a stream gives in calls of two beside the same other one, from its beginning."""
    with opened(folder) as pool:
        pair = [open_numbered(pool, number), open_numbered(pool, other)]
        return [pool.run(pair)[0].to_host().tobytes() for _ in range(chunks)]


def mixed(folder: Path, tmp_path: Path) -> tuple[list[bytes], Pool]:
    """The same stream 1 in calls of two beside others that come, go and pause; it is moved about itself."""
    latents: list[bytes] = []

    def run(pool: Pool, sessions: Sequence[Session]) -> None:
        latents.append(pool.run(sessions)[0].to_host().tobytes())

    with opened(folder) as pool:
        third = open_numbered(pool, 7)
        third.run_chunk()
        mine = open_numbered(pool, 1)
        run(pool, [mine, third])
        other = open_numbered(pool, 4)
        run(pool, [mine, other])
        third.close()
        mine.pause()
        other.run_chunk()
        late = open_numbered(pool, 9)
        mine.resume()
        run(pool, [mine, late])
        mine.save(tmp_path / "stream 1")
        mine.close()
        mine = pool.restore(tmp_path / "stream 1")
        run(pool, [mine, other])
        other.pause()
        run(pool, [mine, late])
    return latents, pool


@pytest.mark.slow
def test_what_a_build_of_a_pool_says(pool_artifact: BuildResult) -> None:
    manifest = json.loads((pool_artifact.artifact / "manifest.json").read_text())
    assert manifest["pool"] == {"buckets": [1, 2]}
    assert manifest["state_rows"] == SESSIONS + 1
    assert len(manifest["workload"]["golden"]["seeds"]) == 2
    names = {engine["name"] for engine in manifest["engines"]}
    assert {"block.1", "block.2", "prompt", "prompt_kv"} <= names
    assert "block" not in names
    assert pool_artifact.golden_error < 1e-3


@pytest.mark.slow
def test_a_stream_of_a_built_pool_is_its_own(pool_artifact: BuildResult, tmp_path: Path) -> None:
    chunks, _ = mixed(pool_artifact.artifact, tmp_path)
    assert chunks == alone(pool_artifact.artifact, 1, 2, len(chunks))


@pytest.mark.slow
def test_inspect_profile_and_run_take_a_pool(pool_artifact: BuildResult, invoke, tmp_path: Path) -> None:
    from seko_runtime.cli.commands import main as runtime_main

    shown = invoke("inspect", pool_artifact.artifact, "--json")
    assert shown.exit_code == 0, shown.output
    result = invoke("profile", pool_artifact.artifact, "--chunks", 1, "--json")
    assert result.exit_code == 0, result.output
    assert "block.2" in json.loads(result.stdout.splitlines()[-1])["engines"]
    code = runtime_main(
        ["run", str(pool_artifact.artifact), "--chunks", "2", "-o", str(tmp_path / "out.npy")]
    )
    assert code == 0
    assert np.load(tmp_path / "out.npy").shape[:2] == (2, 2)  # chunks, and the largest call's rows


@pytest.mark.slow
def test_a_soak_finds_no_chunk_that_is_not_its_sessions_own(
    pool_artifact: BuildResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The benchmark's threads, for a short story each."""
    monkeypatch.setattr(thread_soak, "STORY_CHUNKS", 8)
    options = Namespace(work=tmp_path, rows=tmp_path / "rows.jsonl", chunks=24, threads=3, seed=0)
    thread_soak.soak(pool_artifact.artifact, options)
    row = json.loads(options.rows.read_text())
    assert (row["figure"], row["value"]) == ("thread_soak_mismatches", 0)
    assert row["compared"] == 24


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestGpu:
    """What only a GPU shows of a pool."""

    pytestmark = needs_gpu

    def test_a_stream_is_its_own(self, gpu_pool: Path, tmp_path: Path) -> None:
        chunks, _ = mixed(gpu_pool, tmp_path)
        assert chunks == alone(gpu_pool, 1, 2, len(chunks))

    def test_a_call_is_one_launch_that_waits_for_nothing_and_allocates_nothing(self, gpu_pool: Path) -> None:
        with opened(gpu_pool) as pool:
            a, b, c = (open_numbered(pool, number) for number in range(3))
            for _ in range(4):
                pool.run([a, b])
                pool.run([c])
            launches = pool.stats.graph_launches
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            with no_host_sync():
                for _ in range(6):
                    pool.run([b, c])
                    pool.run([a])
            assert pool.stats.graph_launches == launches + 12
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

    @pytest.mark.parametrize(("artifact", "mixed_launches"), [("gpu_pool", 1), ("masked_pool", 2)])
    def test_a_call_of_full_and_filling_rows_waits_for_nothing_and_allocates_nothing(
        self, artifact: str, mixed_launches: int, request: pytest.FixtureRequest
    ) -> None:
        with opened(request.getfixturevalue(artifact)) as pool:
            a, b, c = (open_numbered(pool, number) for number in range(3))
            stream = pool.manifest.workload.stream
            fill = -(-stream.cache_frames // stream.chunk_frames)
            for _ in range(fill):
                pool.run([a, b])
            pool.run([c, a])
            launches, chunks = pool.stats.graph_launches, pool.stats.chunks
            assert launches == chunks + mixed_launches - 1
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            with no_host_sync():
                for _ in range(2 * fill):
                    pool.run([b, c])
            filling = fill - 2  # chunks of c: it has made one, and is full in its fill-th
            assert pool.stats.graph_launches - launches == 2 * fill + filling * (mixed_launches - 1)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

    def test_sessions_that_come_and_go_leave_no_memory(self, gpu_pool: Path) -> None:
        with opened(gpu_pool) as pool:
            for number in range(3):
                open_numbered(pool, number).close()
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.current"]
            for number in range(20):
                with open_numbered(pool, number) as session:
                    session.run_chunk()
            torch.cuda.synchronize()
            assert torch.cuda.memory_stats()["allocation.all.current"] == before

    def test_goldens_hold(self, gpu_pool: Path) -> None:
        with open_artifact(gpu_pool) as artifact:
            assert all(error.within for error in artifact.verify())
