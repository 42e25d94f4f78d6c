"""What only a GPU shows of weights on the host: the same bytes out of captured chunks, what lies where, and a GPU that
is too small."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from seko_export import BuildOptions, build
from seko_runtime import open_artifact, read_manifest
from seko_runtime.errors import DeviceMemoryError
from tests.support.no_host_sync import no_host_sync
from tests.support.one_launch import events_of_one_launch

from .resident_copy import resident_copy
from .test_gpu_offload_cache import requested_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ("a red disc bouncing", "a blue ring spinning")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sample with layers and text encoder on the host, and the same artifact with them on the device."""
    home = tmp_path_factory.mktemp("on-host")
    options = BuildOptions(preset="sample", fp4_kv=True, no_vae=True, offload_text=True, offload_layers=True)
    build(options, home / "streamed")
    return home / "streamed", resident_copy(home / "streamed", home / "resident")


def test_captured_chunks_and_prompts_give_the_same_bytes(built: tuple[Path, Path]) -> None:
    lives = []
    for folder in built:
        with open_artifact(folder) as artifact:
            assert all(error.within for error in artifact.verify())
            with artifact.open_session(prompt=PROMPTS[0], seed=3) as session:
                chunks = [session.run_chunk().to_host().tobytes() for _ in range(6)]
                session.set_prompt(PROMPTS[1], recache=True)
                chunks += [session.run_chunk().to_host().tobytes() for _ in range(6)]
        lives.append(chunks)
    assert lives[0] == lives[1]
    assert len({*lives[0]}) == 12


def test_a_chunk_is_one_launch_with_its_copies_and_waits_for_nothing(built: tuple[Path, Path]) -> None:
    with open_artifact(built[0]) as artifact, artifact.open_session(prompt=PROMPTS[0]) as session:
        manifest = artifact.manifest
        taken = [
            ref
            for name, calls in manifest.programs.items()
            for call in calls
            for ref in call.inputs
            if name.startswith(("denoise", "context"))
            and ref.removeprefix("weight:") in manifest.host_weights
        ]
        names = events_of_one_launch(session)
        fetched = [name for name in names if "Memcpy HtoD" in name]
        assert len(fetched) > len(set(taken))
        with no_host_sync():
            for _ in range(20):
                session.run_chunk()


def test_the_device_holds_seats_and_not_the_weights(built: tuple[Path, Path]) -> None:
    readings = []
    for folder in (*built, *built):
        before = requested_bytes()
        with open_artifact(folder) as artifact, artifact.open_session(prompt=PROMPTS[0]) as session:
            session.run_chunk()
            torch.cuda.synchronize()
            readings.append(requested_bytes() - before)
    manifest, _ = read_manifest(built[0])
    on_host = sum(weight.nbytes for weight in manifest.weights if weight.on_host)
    *_, streamed, resident = readings
    assert resident - streamed > 0.5 * on_host


@contextmanager
def limited_to(more: int) -> Iterator[None]:
    """A limit of this process: what it has now, and some more bytes."""
    gc.collect()  # what is freed under the limit would add to them
    torch.cuda.empty_cache()
    whole = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + more) / whole)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_what_does_not_fit_says_so_before_it_allocates(built: tuple[Path, Path]) -> None:
    with open_artifact(built[1]) as artifact:
        weights = sum(weight.nbytes for weight in artifact.manifest.weights)
        buffers = sum(buffer.nbytes for buffer in artifact.manifest.buffers)
    before = requested_bytes()
    with (
        limited_to(weights),  # enough for them, but not for a session
        pytest.raises(DeviceMemoryError, match=r"takes at least .* GB of GPU memory, .* rebuild with --fit"),
    ):
        open_artifact(built[1])
    with open_artifact(built[1]) as artifact:
        held = requested_bytes()
        with (
            limited_to(buffers // 2),
            pytest.raises(DeviceMemoryError, match=f"a session takes {buffers} bytes"),
        ):
            artifact.open_session(prompt=PROMPTS[0])
        assert requested_bytes() == held
    gc.collect()  # the refused openings' frames
    assert requested_bytes() == before
