"""What only a GPU shows of a streamed cache: the same bytes out of captured chunks, and what lies where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.random_checkpoint import write_random_checkpoint
from seko_export.build_steps import build_artifact
from seko_export.config.schedule import Schedule
from seko_export.config.target import TargetConfig
from seko_export.config.video import VideoBuild, VideoConfig
from seko_export.families.wan.presets import PRESETS
from seko_runtime import Session, open_artifact
from tests.support.no_host_sync import no_host_sync
from tests.support.one_launch import events_of_one_launch
from tests.support.rows import rows_of
from tests.support.stacked import open_stacked

from .resident_copy import resident_copy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CHUNKS = 14


@pytest.fixture(scope="module", params=["bf16 plain 6", "bf16 fused 5", "fp4 plain 5", "fp4 fused 6"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tiny model with that many layers, its cache on the host; and a copy with its cache on the device."""
    scheme, kernels, layers = request.param.split()
    home = tmp_path_factory.mktemp("streamed")
    tiny = PRESETS["tiny"]
    model = replace(tiny.model, layers=int(layers))
    stream = replace(tiny.stream, batch=2, offload_cache=True)
    config = VideoBuild(
        model, VideoConfig(stream, Schedule.warped(2), scheme), TargetConfig("cuda", fused=kernels == "fused")
    )
    write_random_checkpoint(home / "tiny.pt", model, format="self-forcing", seed=0, dtype=torch.float32)
    build_artifact(config, home / "tiny.pt", home / "streamed")
    return home / "streamed", resident_copy(home / "streamed", home / "resident")


def test_captured_chunks_give_the_bytes_of_a_resident_cache(built: tuple[Path, Path]) -> None:
    lives = []
    for folder in built:
        with open_artifact(folder) as artifact:
            assert all(error.within for error in artifact.verify())
            with open_stacked(artifact, seeds=[3, 4]) as session:
                lives.append(list(life_of(session)))
    assert lives[0] == lives[1]
    assert len(set(lives[0])) > CHUNKS


def test_chunks_in_a_hurry_give_the_same_bytes(built: tuple[Path, Path]) -> None:
    """The host queues all of them before the first one is done; only what is on the device orders them."""
    runs = []
    for hurried in (False, True):
        with open_artifact(built[0]) as artifact, open_stacked(artifact, seeds=[3, 4]) as session:
            latents = []
            for _ in range(CHUNKS):
                latents.append(torch.cat([row.latents for row in session.run_chunk().rows]))
                if not hurried:
                    torch.cuda.synchronize()
            runs.append(torch.stack(latents).cpu().numpy().tobytes())
    assert runs[0] == runs[1]


def test_a_chunk_is_one_graph_launch_with_its_copies_in_it(built: tuple[Path, Path]) -> None:
    with open_artifact(built[0]) as artifact, open_stacked(artifact) as session:
        names = events_of_one_launch(session)
        layers = [buffer for buffer in artifact.manifest.buffers if buffer.device_layers]
        passes = artifact.manifest.workload.schedule.denoise_passes + 1
        fetched = [name for name in names if "Memcpy HtoD" in name]
        stored = [name for name in names if "Memcpy DtoH" in name]
        positions = 1  # the host's small tensors, in one copy before the launch
        assert len(fetched) == passes * sum(layer.shape[0] for layer in layers) + positions
        assert len(stored) == sum(layer.shape[0] for layer in layers)
        assert session.stats.graph_launches == session.stats.chunks


def test_steady_chunks_wait_for_nothing_and_allocate_nothing(built: tuple[Path, Path]) -> None:
    with open_artifact(built[0]) as artifact, open_stacked(artifact) as session:
        for _ in range(6):
            session.run_chunk()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_host_sync():
            for _ in range(20):  # more than the host blocks in flight
                session.run_chunk()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_the_device_holds_the_seats_and_not_the_models_layers(built: tuple[Path, Path]) -> None:
    readings = []
    for folder in (*built, *built):  # what libraries keep for good is there after the first time
        with open_artifact(folder) as artifact:
            before = requested_bytes()
            with open_stacked(artifact) as session:
                session.run_chunk()
                torch.cuda.synchronize()
                readings.append((requested_bytes() - before, artifact.manifest.device_pool_bytes))
    *_, (streamed, seats), (resident, layers) = readings
    assert seats < layers
    assert resident - streamed == layers - seats


def test_what_was_page_locked_is_given_back(built: tuple[Path, Path]) -> None:
    """The same host memory can be locked again: CUDA refuses a range that still is."""
    for _ in range(3):
        with open_artifact(built[0]) as artifact, open_stacked(artifact) as session:
            session.run_chunk().to_host()
            homes = rows_of(session).device().layers.homes
            addresses = {home.data_ptr(): home.nbytes for home in homes.values()}
            tensors = list(
                homes.values()
            )  # past the session's end, so that the range is still this process's
        for address, nbytes in addresses.items():
            assert int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0
            assert int(torch.cuda.cudart().cudaHostUnregister(address)) == 0
        del tensors


def life_of(session: Session) -> Iterator[bytes]:
    """Chunks and caches past the wrap, with a new prompt, a rebuilt cache and a row that begins anew."""
    spec = next(buffer for buffer in session.manifest.buffers if buffer.name == "text.embeddings")
    text = torch.randn(spec.shape, generator=torch.Generator().manual_seed(5)).numpy()
    for number in range(CHUNKS):
        if number == 6:
            session.set_text(text, recache=True)
        if number == 9:
            session.restart_row(1, seed=8)
        yield session.run_chunk().to_host().tobytes()
    sample = session.cache_sample(1)
    yield from (sample[name].tobytes() for name in sorted(sample))


def requested_bytes() -> int:
    """Bytes of all tensors on the device, as they were asked for."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])
