"""CUDA: decoding beside the chunks gives the bytes of decoding in order, without host waits or new memory. A GPU."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seko_runtime.backends.cuda_memory import CudaLane, CudaMemory
from seko_runtime.opening.artifact import OpenArtifact, open_artifact, read_manifest
from seko_runtime.video.decoding import FRAME_BLOCKS
from tests.support.no_host_sync import no_host_sync
from tests.support.rows import rows_of
from tests.support.stacked import Stacked, open_stacked, stacked_session

from . import toy_whole
from .toy_whole import CHUNK_VIDEO, FIRST_FRAMES, open_whole

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own future
]
CHUNKS = 12
SLEEP = 3_000_000  # clock cycles, a few milliseconds: far longer than the toy's chunk
TEXTS = [np.linspace(-1 + turn, 1, 2 * 5 * 4, dtype=np.float32).reshape(2, 5, 4) for turn in range(3)]


def captures(artifact: OpenArtifact) -> bool:
    return artifact.manifest.backend == "aoti"


def skip_unless_captured(folder: Path) -> None:
    """`compile` compiles anew at each open and decodes in order: two tests of it are enough."""
    if read_manifest(folder)[0].backend != "aoti":
        pytest.skip("decodes in order, as two other tests see")


def levels_apart(a: np.ndarray, b: np.ndarray) -> int:
    """Largest difference of two pictures; the toy's levels count modulo 256."""
    away = np.abs(a.astype(np.int64) - b.astype(np.int64))
    return int(np.minimum(away, 256 - away).max())


@contextmanager
def slow_lane(every: int, main: bool = False) -> Iterator[None]:
    """Put a sleeping kernel before every ``every``-th decoding, or before its copy on the main stream."""
    turn = [0]
    real_ordered, real_feed = CudaLane.ordered, CudaLane.feed

    def sleep() -> None:
        turn[0] += 1
        if turn[0] % every == 0:
            torch.cuda._sleep(SLEEP)

    @contextmanager
    def ordered(lane: CudaLane) -> Iterator[None]:
        with real_ordered(lane):
            if not main and not torch.cuda.is_current_stream_capturing():
                sleep()
            yield

    def feed(lane: CudaLane, target: torch.Tensor, source: torch.Tensor) -> None:
        if main:
            sleep()
        real_feed(lane, target, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaLane, "ordered", ordered)
        patch.setattr(CudaLane, "feed", feed)
        yield


def run_ahead(session: Stacked, ahead: int, chunks: int = CHUNKS) -> list[bytes]:
    """Each row's frames and latents, read when so many more chunks are queued; prompts change, a row restarts."""
    queued: deque[Any] = deque()
    out: list[bytes] = []

    def take() -> None:
        chunk, latents = queued.popleft()
        out.append(b"".join(frames.tobytes() for frames in chunk.video_rows()))
        out.append(latents.cpu().numpy().tobytes())

    for number in range(chunks):
        if number == 4:
            session.set_text(TEXTS[1])
        if number == 6:
            session.restart_row(1, seed=77)
        if number == 8:
            session.set_text(TEXTS[2], recache=True)
        chunk = session.run_chunk()
        queued.append((chunk, torch.cat([row.latents for row in chunk.rows])))
        if len(queued) > ahead:
            take()
    while queued:
        take()
    return out


@pytest.fixture(scope="module")
def in_order(built_cuda_whole: Path) -> list[bytes]:
    """What decoding on the chunks' own stream gives, the host waiting for every chunk."""
    with (
        open_artifact(built_cuda_whole) as artifact,
        open_stacked(artifact, text=TEXTS[0], overlap=False) as session,
    ):
        assert not session.overlaps_decoding
        return run_ahead(session, 0)


@pytest.mark.parametrize("ahead", [0, 1, FRAME_BLOCKS - 1])
@pytest.mark.parametrize(("every", "main"), [(1_000_000, False), (1, False), (3, False), (2, True)])
def test_overlap_gives_the_bytes_of_decoding_in_order(
    built_cuda_whole: Path, in_order: list[bytes], ahead: int, every: int, main: bool
) -> None:
    if (ahead, every) != (1, 3):
        skip_unless_captured(built_cuda_whole)
    with (
        open_artifact(built_cuda_whole) as artifact,
        slow_lane(every, main),
        open_stacked(artifact, text=TEXTS[0]) as session,
    ):
        assert session.overlaps_decoding == captures(artifact)
        got = run_ahead(session, ahead)
    assert got == in_order


def test_frames_agree_with_the_eager_modules(built_cuda_whole: Path) -> None:
    with open_artifact(built_cuda_whole) as artifact, open_stacked(artifact, seeds=[3, 4]) as session:
        text = artifact.golden_text()
        with open_whole(2, seeds=[3, 4], text=text) as eager:
            for number in range(8):
                if number == 5:
                    session.restart_row(0)
                    eager.restart_row(0)
                got, wanted = session.run_chunk(), eager.run_chunk()
                for a, b in zip(got.video_rows(), wanted.video_rows(), strict=True):
                    assert a.shape == b.shape
                    assert levels_apart(a, b) <= 1


def test_a_rebuilt_cache_is_the_eager_sessions(built_cuda_whole: Path) -> None:
    with (
        open_artifact(built_cuda_whole) as artifact,
        open_stacked(artifact, text=TEXTS[0]) as session,
        open_whole(2, text=TEXTS[0]) as eager,
    ):
        for number in range(10):
            if number in (3, 7):
                session.set_text(TEXTS[number % 3], recache=True)
                eager.set_text(TEXTS[number % 3], recache=True)
            got, wanted = session.run_chunk().to_host(), eager.run_chunk().to_host()
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_lanes_have_streams_and_pools_of_their_own(built_cuda_whole: Path) -> None:
    skip_unless_captured(built_cuda_whole)
    with open_artifact(built_cuda_whole) as artifact, open_stacked(artifact) as session:
        memory, lane = rows_of(session).memory, rows_of(session).device().decoder._lane  # type: ignore[union-attr]
        assert lane._stream.cuda_stream != memory.stream.cuda_stream  # type: ignore[attr-defined]
        assert lane._pool != memory._pool  # type: ignore[attr-defined]
        assert len(lane._graphs) == 4  # type: ignore[attr-defined] # two rows, first and steady


def test_a_steady_stream_waits_for_its_frames_alone_and_allocates_nothing(built_cuda_whole: Path) -> None:
    skip_unless_captured(built_cuda_whole)
    with open_artifact(built_cuda_whole) as artifact, open_stacked(artifact) as session:
        stream = session.stream()
        assert next(stream).shape[1] == FIRST_FRAMES
        for _ in range(8):
            next(stream)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with no_host_sync():
            for _ in range(30):
                assert next(stream).shape[1] == CHUNK_VIDEO
            session.run_chunk()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_prompt_that_is_held_waits_for_nothing(built_cuda_whole: Path) -> None:
    skip_unless_captured(built_cuda_whole)
    pytest.importorskip("tokenizers")
    with open_artifact(built_cuda_whole) as artifact, open_stacked(artifact, prompt="a red disc") as session:
        session.run_chunk()
        first = session.run_chunk().to_host()
        for prompt in ("a blue ring", "a red disc"):
            session.set_prompt(prompt)
            session.run_chunk()
        with no_host_sync():
            session.set_prompt("a blue ring")
            session.set_prompt("a red disc")
        # Two rows hold two prompts: each prompt is encoded once, and was asked for five times by each row's session.
        assert (session.stats.prompt_cache_hits, session.stats.prompt_cache_misses) == (8, 2)
        for row in range(2):
            session.restart_row(row)
        session.run_chunk()
        assert session.run_chunk().to_host().tobytes() == first.tobytes()


def test_a_closed_artifact_gives_its_memory_back(built_cuda_whole: Path) -> None:
    skip_unless_captured(built_cuda_whole)

    def use(overlap: bool) -> None:
        with open_artifact(built_cuda_whole) as artifact:
            with open_stacked(artifact, overlap=overlap) as session:
                stream = session.stream()
                for _ in range(4):
                    next(stream)
            session = open_stacked(artifact, overlap=overlap)
            session.run_chunk()  # closed with the artifact while its decoding may be under way

    use(True)
    use(False)
    gc.collect()
    torch.cuda.empty_cache()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    for _ in range(3):
        use(True)
    gc.collect()
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_sessions_side_by_side_decode_apart(built_cuda_whole: Path) -> None:
    skip_unless_captured(built_cuda_whole)
    with open_artifact(built_cuda_whole) as artifact:
        with open_stacked(artifact, text=TEXTS[0]) as alone:
            expected = [frames.tobytes() for frames in alone.stream(chunks=8)]
        with open_stacked(artifact, text=TEXTS[0]) as session, slow_lane(2):
            got = []
            for frames in session.stream(chunks=8):
                got.append(frames.tobytes())
                if len(got) in (2, 5):
                    with open_stacked(artifact, text=TEXTS[1], seeds=[8, 9]) as other:
                        next(other.stream())
                        other.run_chunk()
    assert got == expected


def test_uncaptured_modules_on_the_device_decode_in_order() -> None:
    """As the exporter records its goldens: eager modules, memory that is told not to capture."""
    device = torch.device("cuda")
    memory = CudaMemory(device)
    memory.captures = False
    weights = {name: tensor.to(device) for name, tensor in toy_whole.whole_weights(2).items()}
    with (
        stacked_session(
            toy_whole.whole_manifest(2),
            toy_whole.eager_engines(),
            weights,
            memory,
            seeds=[0, 1],
            text=TEXTS[0],
        ) as session,
        open_whole(2, text=TEXTS[0]) as eager,
    ):
        assert not session.overlaps_decoding
        for _ in range(6):
            assert levels_apart(session.run_chunk().video(), eager.run_chunk().video()) <= 1
