"""CUDA: one launch a chunk, no host sync, no allocation, equal bytes, memory given back. Needs a GPU."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import EnvironmentLacksError
from seko_runtime.opening.artifact import OpenArtifact, open_artifact
from tests.support.no_host_sync import no_host_sync
from tests.support.one_launch import events_of_one_launch
from tests.support.stacked import open_stacked, stacked_session

from . import toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own future
]


def eager_chunks(count: int, seed: int) -> list[np.ndarray]:
    with stacked_session(
        toy.toy_manifest(),
        toy.eager_engines(),
        toy.toy_weights(),
        CpuMemory(),
        seeds=[seed],
        text=toy.toy_text(),
    ) as session:
        return [session.run_chunk().to_host() for _ in range(count)]


def captured(artifact: OpenArtifact) -> bool:
    return artifact.manifest.backend == "aoti"


def test_replays_agree_with_the_eager_modules_through_fill_and_wrap(built_cuda_toy: Path) -> None:
    with open_artifact(built_cuda_toy) as artifact, open_stacked(artifact, seeds=[2]) as session:
        for wanted in eager_chunks(8, 2):
            np.testing.assert_allclose(session.run_chunk().to_host(), wanted, rtol=0, atol=1e-5)
        assert all(error.within for error in artifact.verify())


def test_once_uploaded_the_weights_need_no_file(built_cuda_toy: Path, tmp_path: Path) -> None:
    """Their maps are gone when the artifact is open: to truncate the files then is no SIGBUS."""
    folder = tmp_path / "toy"
    shutil.copytree(built_cuda_toy, folder)
    with open_artifact(folder) as artifact:
        assert str(folder) not in Path("/proc/self/maps").read_text()
        for path in (folder / "weights").iterdir():
            os.truncate(path, 0)
        assert all(error.within for error in artifact.verify())


def test_a_chunk_is_one_graph_launch(built_cuda_toy: Path) -> None:
    with open_artifact(built_cuda_toy) as artifact, open_stacked(artifact) as session:
        if not captured(artifact):
            pytest.skip("cudagraph trees launch one graph an engine call")
        events_of_one_launch(session)
        assert session.stats.graph_launches == session.stats.chunks == 6
        assert session.stats.captured_graphs == 2


def test_steady_chunks_wait_for_nothing_and_allocate_nothing(built_cuda_toy: Path) -> None:
    with open_artifact(built_cuda_toy) as artifact, open_stacked(artifact) as session:
        for _ in range(6):
            session.run_chunk()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_host_sync():
            for _ in range(20):  # more than the host blocks in flight
                session.run_chunk()
        if captured(artifact):
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_two_runs_give_equal_bytes_also_when_the_host_never_waits(built_cuda_toy: Path) -> None:
    runs: list[bytes] = []
    for hurried in (False, True):
        with open_artifact(built_cuda_toy) as artifact, open_stacked(artifact, seeds=[9]) as session:
            chunks = []
            for _ in range(12):
                latents = session.run_chunk().latents
                chunks.append(
                    latents.clone()
                )  # on the caller's stream: ordered before the next chunk overwrites it
                if not hurried:
                    torch.cuda.synchronize()
            runs.append(torch.stack(chunks).cpu().numpy().tobytes())
    assert runs[0] == runs[1]


def test_a_restarted_row_gives_its_stream_anew(built_cuda_toy: Path) -> None:
    with open_artifact(built_cuda_toy) as artifact, open_stacked(artifact, seeds=[4]) as session:
        first = [session.run_chunk().to_host().tobytes() for _ in range(6)]
        session.restart_row(0)
        assert [session.run_chunk().to_host().tobytes() for _ in range(6)] == first


def test_sessions_side_by_side_do_not_touch_each_other(built_cuda_toy: Path) -> None:
    with open_artifact(built_cuda_toy) as artifact:
        with open_stacked(artifact, seeds=[1]) as alone:
            expected = [alone.run_chunk().to_host().tobytes() for _ in range(6)]
        with open_stacked(artifact, seeds=[1]) as session:
            got = [session.run_chunk().to_host().tobytes() for _ in range(2)]
            with open_stacked(artifact, seeds=[2]) as other:
                other.run_chunk()
                got += [session.run_chunk().to_host().tobytes()]
                other.run_chunk()
            got += [session.run_chunk().to_host().tobytes() for _ in range(3)]
    assert got == expected


def test_a_closed_artifact_gives_its_memory_back(built_cuda_toy: Path) -> None:
    def use() -> None:
        with open_artifact(built_cuda_toy) as artifact, open_stacked(artifact) as session:
            for _ in range(4):
                session.run_chunk().to_host()

    use()  # what libraries keep for good, such as workspaces, is there after the first time
    gc.collect()
    torch.cuda.empty_cache()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    for _ in range(3):
        use()
    gc.collect()
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_weights_reach_the_device_bit_for_bit(built_cuda_toy: Path) -> None:
    with open_artifact(built_cuda_toy) as artifact:
        for name, wanted in toy.toy_weights().items():
            assert torch.equal(artifact.engines.loaded.weights[name].cpu(), wanted)
            assert artifact.engines.loaded.weights[name].data_ptr() % 256 == 0


def test_what_a_session_takes_lies_in_blocks_that_grow(built_cuda_toy: Path) -> None:
    torch.cuda.empty_cache()
    with open_artifact(built_cuda_toy) as artifact, open_stacked(artifact, seeds=[0]) as session:
        session.run_chunk().to_host()
        taken = [segment for segment in torch.cuda.memory_snapshot() if segment["is_expandable"]]
    assert taken


def test_a_device_that_is_not_there_is_named(built_cuda_toy: Path) -> None:
    with pytest.raises(EnvironmentLacksError, match="cuda:99 does not exist"):
        open_artifact(built_cuda_toy, device="cuda:99")
