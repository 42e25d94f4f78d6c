"""Builds on a GPU whose memory is too small for everything that a build does at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seko_export import BuildOptions, build, build_steps
from seko_export.backends import workers
from seko_export.backends.workers import _Watch, compiled_in_background, kernels_compiled_in_background
from seko_export.errors import ExportError, MachineError
from seko_export.host.gpu_memory import lacks_gpu_memory
from seko_export.host.progress import silent
from seko_export.video.workload import VideoExport
from seko_runtime.errors import DeviceMemoryError
from tests.support.tiers import first_is_fast
from tests.support.uncompiled import leave_uncompiled

FULL = "CUDA out of memory. Tried to allocate 6.88 GiB"
PIECES = {name: SimpleNamespace(name=name, large=False) for name in ("block", "decode", "head")}
FAULTS = {
    "block": torch.OutOfMemoryError(FULL),
    "decode": RuntimeError(f"Failed to run autotuning code block: {FULL}"),  # the compiler wraps torch's
}


@pytest.mark.parametrize(
    "fault",
    [
        torch.OutOfMemoryError(),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        DeviceMemoryError(f"the device has too little free memory: OutOfMemoryError: {FULL}; close"),
    ],
    ids=("torch", "CUDA", "Triton", "cuBLAS", "runtime"),
)
def test_each_librarys_lack_of_gpu_memory_is_known(fault: Exception) -> None:
    assert lacks_gpu_memory(fault)
    assert not lacks_gpu_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_a_workers_lack_of_gpu_memory_arrives_as_what_it_is() -> None:
    arrived = ForkingPickler.loads(ForkingPickler.dumps(workers._GpuMemoryError("no memory")))
    assert isinstance(arrived, workers._GpuMemoryError)
    assert str(arrived) == "no memory"


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Threads in place of worker processes; what each pool did."""
    done: list[str] = []

    class Threads(ThreadPoolExecutor):
        def shutdown(self, *arguments: Any, **options: Any) -> None:
            super().shutdown(*arguments, **options)
            done.append("end")

    @contextmanager
    def threads(_: object, count: int) -> Iterator[ThreadPoolExecutor]:
        done.append(f"pool of {count}")
        yield Threads(count)

    monkeypatch.setattr(workers, "_worker_pool", threads)
    monkeypatch.setattr(workers, "graph_of", lambda _: SimpleNamespace(pieces=PIECES))
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: range(8))
    return done


def compile_all(folder: Path, compile_piece: Callable[..., None]) -> dict[str, float]:
    maker: Any = SimpleNamespace(form=None, suffix=".pt2", compile_piece=compile_piece)
    config: Any = None
    with compiled_in_background(config, maker, folder, silent) as wait_for_engines:
        return wait_for_engines()


def test_engines_that_lacked_gpu_memory_are_compiled_again_alone(tmp_path: Path, pools: list[str]) -> None:
    def compile_piece(_: object, piece: Any, path: Path) -> None:
        pools.append(piece.name)
        if pools.count(piece.name) == 1 and piece.name in FAULTS:
            path.write_text("a part")
            raise FAULTS[piece.name]
        path.write_text(piece.name)

    assert set(compile_all(tmp_path, compile_piece)) == set(PIECES)
    first, second = pools[:5], pools[5:]
    assert (first[0], sorted(first[1:4]), first[4]) == ("pool of 3", ["block", "decode", "head"], "end")
    assert (second[0], sorted(second[1:])) == ("pool of 1", ["block", "decode"])
    assert {path.stem: path.read_text() for path in (tmp_path / "engines").iterdir()} == {
        name: name for name in PIECES
    }


@pytest.mark.parametrize("fault", [None, RuntimeError("CUDA out of memory"), RuntimeError("no such kernel")])
def test_kernels_of_a_recording_may_lack_gpu_memory_and_nothing_else(
    pools: list[str], fault: Exception | None
) -> None:
    maker: Any = None

    def compile_kernels() -> None:
        pools.append("called")
        if fault is not None:
            raise fault

    refused = pytest.raises(ExportError, match=r"^kernels of the recording did not .*: no such kernel$")
    with (
        kernels_compiled_in_background(maker, compile_kernels) as wait_for_kernels,
        refused if str(fault) == "no such kernel" else nullcontext(),
    ):
        wait_for_kernels()
    assert pools[:2] == ["pool of 1", "called"]


def test_an_engine_that_lacks_gpu_memory_alone_ends_the_build(tmp_path: Path, pools: list[str]) -> None:
    def compile_piece(_: object, piece: Any, path: Path) -> None:
        if piece.name == "decode":
            raise FAULTS["decode"]
        path.write_text(piece.name)

    with pytest.raises(
        MachineError,
        match=r"^engine 'decode' .*, because GPU memory was short: RuntimeError: .*6\.88 GiB; end",
    ):
        compile_all(tmp_path, compile_piece)
    assert pools == ["pool of 3", "end", "pool of 1"]


def test_what_is_told_of_engines_goes_on_behind_one_that_lacked_gpu_memory(tmp_path: Path) -> None:
    futures = {Future[float](): name for name in PIECES}
    by_name = {name: future for future, name in futures.items()}
    watch = _Watch(futures, dict.fromkeys(PIECES, 1.0), tmp_path, workers=3)
    for name in PIECES:
        (tmp_path / name).mkdir()
    by_name["decode"].set_exception(workers._GpuMemoryError("no memory"))
    assert watch() == "engines: 3 of 3 left, compiling block, head"
    by_name["block"].set_result(2.0)
    assert watch().startswith("engines: 2 of 3 left, compiling head, about ")


@pytest.mark.parametrize("fault", first_is_fast([torch.OutOfMemoryError, DeviceMemoryError]))
def test_goldens_that_lack_gpu_memory_are_recorded_when_all_engines_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    steps: list[str] = []
    told: list[str] = []
    held: list[weakref.ref[torch.Tensor]] = []
    leave_uncompiled(monkeypatch)
    compiled, record = build_steps.compiled_in_background, VideoExport.record

    @contextmanager
    def noted(*arguments: Any) -> Iterator[Callable[[], dict[str, float]]]:
        with compiled(*arguments) as wait_for_engines:

            def wait_and_note() -> dict[str, float]:
                assert held[0]() is None  # the first attempt's tensors are gone
                steps.append("engines")
                return wait_for_engines()

            yield wait_and_note

    def recorded(*arguments: Any) -> Any:
        steps.append("goldens")
        if len(steps) == 1:
            weights = torch.zeros(1)
            held.append(weakref.ref(weights))
            raise fault(f"OutOfMemoryError: {FULL}")
        return record(*arguments)

    def progress(step: str, *_: object, **__: object) -> None:
        told.append(step)

    monkeypatch.setattr(build_steps, "compiled_in_background", noted)
    monkeypatch.setattr(VideoExport, "record", recorded)
    options = BuildOptions(preset="tiny", random_weights=0, backend="compile", target="cpu")
    build(options, tmp_path / "artifact", compiler_cache=False, progress=progress, note=lambda _: None)
    assert steps == ["goldens", "engines", "goldens"]
    (again,) = [step for step in told if step.startswith("goldens are recorded again")]
    assert again.endswith(FULL)


def test_another_fault_while_goldens_are_recorded_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded(*_: object) -> None:
        raise ZeroDivisionError("planted")

    leave_uncompiled(monkeypatch)
    monkeypatch.setattr(VideoExport, "record", recorded)
    options = BuildOptions(preset="tiny", random_weights=0, backend="compile", target="cpu")
    with pytest.raises(ZeroDivisionError, match="planted"):
        build(options, tmp_path / "artifact", compiler_cache=False, note=lambda _: None)
