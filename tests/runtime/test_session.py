"""Sessions over plain callables: order, ring, rows, failures, ends. No files and no native engines."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.errors import (
    ArtifactError,
    DeviceFaultError,
    SessionClosedError,
    UsageError,
)
from seko_runtime.sessions.artifact import OpenArtifact, OpenedFiles
from seko_runtime.video.session import Session
from tests.support.stacked import stacked_session

from . import toy


def open_toy(
    batch: int = 1, seeds: list[int] | None = None, **engines: Callable[[list[Any]], list[Any]]
) -> Session:
    return stacked_session(
        toy.toy_manifest(batch),
        {**toy.eager_engines(), **engines},
        toy.toy_weights(),
        CpuMemory(),
        seeds=list(range(batch)) if seeds is None else seeds,
        text=toy.toy_text(batch),
    )


def chunks_of(session: Session, count: int) -> list[bytes]:
    return [session.run_chunk().to_host().tobytes() for _ in range(count)]


def test_two_sessions_of_one_seed_give_equal_bytes_and_another_seed_does_not() -> None:
    with open_toy(seeds=[5]) as first, open_toy(seeds=[5]) as second, open_toy(seeds=[6]) as other:
        expected = chunks_of(first, 6)
        assert chunks_of(second, 6) == expected
        assert not set(chunks_of(other, 6)) & set(expected)
        assert first.stats.chunks == 6


def test_frames_are_absolute_and_the_host_tensors_follow_the_ring() -> None:
    seen: list[list[int]] = []

    def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append([*inputs[4][0].tolist(), *inputs[5].tolist()])
        return [inputs[0]]

    with open_toy(step=step) as session:
        frames = [session.run_chunk().frames.tolist() for _ in range(4)]
    assert frames == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    per_chunk = toy.LAYERS * (toy.PASSES + 1)
    tokens = toy.TOKENS
    wanted = [[0, 1, 2 * tokens], [2, 3, 4 * tokens], [4, 1, 5 * tokens], [2, 3, 5 * tokens]]
    assert seen[::per_chunk] == wanted
    assert len(seen) == 4 * per_chunk


def test_the_pass_index_runs_over_the_denoise_passes_and_then_the_context() -> None:
    gains: list[float] = []

    def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        gains.append(float(inputs[2]))
        return [inputs[0]]

    with open_toy(step=step) as session:
        session.run_chunk()
    assert gains == [0.5, 0.5, 0.25, 0.25, 0.125, 0.125]


def test_the_full_programs_run_once_every_row_has_filled_its_cache() -> None:
    manifest = toy.toy_manifest(2)
    full = tuple(
        toy.Call("full_copy" if call.engine == "copy" else call.engine, call.inputs, call.outputs)
        for call in manifest.programs["denoise_full"]
    )
    copy = manifest.engines[-1]
    manifest = toy.toy_manifest(
        2,
        programs={**manifest.programs, "denoise_full": full},
        engines=(*manifest.engines, toy.EngineSpec("full_copy", copy.file, copy.inputs, copy.outputs)),
    )
    runs: list[int] = []

    def full_copy(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        runs.append(1)
        return [inputs[0].clone()]

    engines = {**toy.eager_engines(), "full_copy": full_copy}
    per_chunk = 2 * toy.PASSES
    with stacked_session(
        manifest, engines, toy.toy_weights(), CpuMemory(), seeds=[0, 1], text=toy.toy_text(2)
    ) as session:
        chunks_of(session, 2)
        assert not runs
        session.run_chunk()  # frames 4 and 5 fill the five slots
        assert len(runs) == per_chunk
        session.restart_row(1)
        session.run_chunk()  # row 1 has two frames: back to the programs that mask
        assert len(runs) == per_chunk


def test_a_restarted_row_finds_its_cache_clean_and_the_other_rows_untouched() -> None:
    caches: list[torch.Tensor] = []

    def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        caches.append(inputs[6])
        inputs[6].fill_(float("nan"))
        return [inputs[0]]

    with open_toy(2, step=step) as session:
        session.run_chunk()
        session.restart_row(1)
        half = toy.CACHE * toy.TOKENS
        assert len({cache.data_ptr() for cache in caches}) == toy.LAYERS
        for cache in caches:
            assert torch.isnan(cache[:half]).all()
            assert (cache[half:] == 0).all()


def test_set_text_runs_the_prompt_program_and_nothing_else_changes() -> None:
    with open_toy() as changed, open_toy() as unchanged:
        first = chunks_of(changed, 1)
        assert chunks_of(unchanged, 1) == first
        unchanged.set_text(torch.tensor(toy.toy_text()) * 2)
        assert chunks_of(changed, 1) != chunks_of(unchanged, 1)
        unchanged.set_text(toy.toy_text())
        with open_toy() as three:
            assert chunks_of(three, 1) == first


def test_what_does_not_fit_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no integer"):
        open_toy(seeds=[1 << 62])
    with open_toy() as session:
        with pytest.raises(UsageError, match="text holds a number that is not finite"):
            session.set_text(np.full((1, 5, 4), np.nan, np.float32))
        with pytest.raises(UsageError, match="step is 0, expected at least 1"):
            session.cache_sample(0)
        with pytest.raises(UsageError, match="text has shape"):
            session.set_text(np.zeros((1, 2, 3), np.float32))
        with pytest.raises(UsageError, match="found neither prompt nor text"):
            session.set_text(None)
        with pytest.raises(UsageError, match="expected a numpy array"):
            session.set_text(_Shaped())


class _Shaped:
    shape = (1, toy.TEXT_TOKENS, toy.TEXT_DIM)


def test_an_engine_that_gives_back_another_shape_is_refused_on_its_first_run() -> None:
    cut = open_toy(copy=lambda inputs: [inputs[0][..., :1]])
    with cut, pytest.raises(ArtifactError, match="engine copy gave y"):
        cut.run_chunk()
    twice = open_toy(copy=lambda inputs: [inputs[0], inputs[0]])
    with twice, pytest.raises(ArtifactError, match="gave 2 tensors"):
        twice.run_chunk()


def test_a_closed_session_says_so_and_its_memory_is_gone() -> None:
    session = open_toy()
    chunk = session.run_chunk()
    reference = weakref.ref(chunk.latents)
    session.close()
    session.close()
    for use in (
        session.run_chunk,
        chunk.to_host,
        lambda: session.set_text(None),
        lambda: session.restart_row(0),
    ):
        with pytest.raises(SessionClosedError, match="closed"):
            use()
    del chunk, use
    gc.collect()
    assert reference() is None


def test_a_pool_whose_device_has_failed_frees_its_memory_all_the_same() -> None:
    class FailingMemory(CpuMemory):
        failed, closes = False, 0

        def wait(self) -> None:
            if self.failed:
                raise DeviceFaultError("planted")

        def close(self) -> None:
            self.closes += 1

    memory = FailingMemory()
    session = stacked_session(
        toy.toy_manifest(1), toy.eager_engines(), toy.toy_weights(), memory, seeds=[0], text=toy.toy_text(1)
    )
    latents = weakref.ref(session.run_chunk().latents)
    memory.failed = True
    with pytest.raises(DeviceFaultError):
        session.close()
    gc.collect()
    assert (latents(), memory.closes) == (None, 1)


def test_an_artifact_closes_everything_although_one_part_fails() -> None:
    closed: list[str] = []

    def part(name: str, error: Exception | None = None) -> Any:
        def close() -> None:
            closed.append(name)
            if error is not None:
                raise error

        return SimpleNamespace(close=close, closed=False)

    files = OpenedFiles(toy.toy_manifest(1), digest="", device="cpu", golden={})
    artifact = OpenArtifact(files, part("engines"))
    artifact._keep(part("first", DeviceFaultError("planted")))
    artifact._keep(part("second"))
    with pytest.raises(DeviceFaultError):
        artifact.close()
    artifact.close()
    assert closed == ["first", "second", "engines"]
