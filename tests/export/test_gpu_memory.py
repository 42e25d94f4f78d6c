"""Builds on a GPU whose memory is too small for everything that a build does at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from seko_export import BuildOptions, build, build_steps
from seko_export.backends import workers
from seko_export.backends.workers import compiled_beside
from seko_export.errors import MachineError
from seko_export.host.progress import silent
from seko_export.video.workload import VideoExport
from seko_runtime.errors import DeviceMemoryError
from tests.uncompiled import leave_uncompiled

FULL = "CUDA out of memory. Tried to allocate 6.88 GiB"
PIECES = {name: SimpleNamespace(name=name, large=False) for name in ("block", "decode", "head")}
FAULTS = {
    "block": torch.OutOfMemoryError(FULL),
    "decode": RuntimeError(f"Failed to run autotuning code block: {FULL}"),  # the compiler wraps torch's
}


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Threads in place of worker processes; what each pool did."""
    done: list[str] = []

    @contextmanager
    def threads(_: object, count: int) -> Iterator[ThreadPoolExecutor]:
        done.append(f"pool of {count}")
        with ThreadPoolExecutor(count) as pool:
            yield pool

    monkeypatch.setattr(workers, "_worker_pool", threads)
    monkeypatch.setattr(workers, "graph_of", lambda _: SimpleNamespace(pieces=PIECES))
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _: (0,))
    return done


def compile_all(folder: Path, compile_piece: Callable[..., None]) -> dict[str, float]:
    maker: Any = SimpleNamespace(form=None, suffix=".pt2", compile_piece=compile_piece)
    config: Any = None
    with compiled_beside(config, maker, folder, silent) as wait_for_engines:
        return wait_for_engines()


def test_engines_that_lacked_gpu_memory_are_compiled_again_alone(tmp_path: Path, pools: list[str]) -> None:
    def compile_piece(_: object, piece: Any, path: Path) -> None:
        pools.append(piece.name)
        if pools.count(piece.name) == 1 and piece.name in FAULTS:
            path.write_text("a part")
            raise FAULTS[piece.name]
        path.write_text(piece.name)

    assert set(compile_all(tmp_path, compile_piece)) == set(PIECES)
    assert pools == ["pool of 1", "block", "decode", "head", "pool of 1", "block", "decode"]
    assert {path.stem: path.read_text() for path in (tmp_path / "engines").iterdir()} == {
        name: name for name in PIECES
    }


def test_an_engine_that_lacks_gpu_memory_alone_ends_the_build(tmp_path: Path, pools: list[str]) -> None:
    def compile_piece(_: object, piece: Any, path: Path) -> None:
        if piece.name == "decode":
            raise FAULTS["decode"]
        path.write_text(piece.name)

    with pytest.raises(MachineError, match=r"^engine 'decode' did not compile: RuntimeError: .*6\.88 GiB$"):
        compile_all(tmp_path, compile_piece)
    assert pools == ["pool of 1", "pool of 1"]


@pytest.mark.parametrize(
    "fault", [torch.OutOfMemoryError(FULL), DeviceMemoryError("the device has too little")]
)
def test_goldens_that_lack_gpu_memory_are_recorded_when_all_engines_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    steps: list[str] = []
    leave_uncompiled(monkeypatch)
    compiled, record = build_steps.compiled_beside, VideoExport.record

    @contextmanager
    def noted(*arguments: Any) -> Iterator[Callable[[], dict[str, float]]]:
        with compiled(*arguments) as wait_for_engines:
            yield lambda: steps.append("engines") or wait_for_engines()  # type: ignore[func-returns-value]

    def recorded(*arguments: Any) -> Any:
        steps.append("goldens")
        if len(steps) == 1:
            raise fault
        return record(*arguments)

    monkeypatch.setattr(build_steps, "compiled_beside", noted)
    monkeypatch.setattr(VideoExport, "record", recorded)
    options = BuildOptions(preset="tiny", random_weights=0, backend="compile", target="cpu")
    build(options, tmp_path / "artifact", compiler_cache=False, note=lambda _: None)
    assert steps == ["goldens", "engines", "goldens"]
