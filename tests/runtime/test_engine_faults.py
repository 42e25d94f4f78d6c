"""What engines raise and what the machine refuses: errors of ours with their exit codes, never a traceback."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from seko_export.artifact.packing import pack_artifact
from seko_runtime import errors
from seko_runtime.backends.aoti import CudaEngine
from seko_runtime.backends.memory import Engine
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.cli.commands import main
from seko_runtime.format.unpacking import unpack_artifact
from seko_runtime.host.faults import captured
from seko_runtime.opening import artifact as artifact_module
from seko_runtime.opening.artifact import open_artifact, read_manifest
from seko_runtime.video.manifest import VideoManifest

from . import toy_pool, toy_whole
from .eager_backend import EagerBackend
from .toy_whole import open_whole

Planted = Callable[[str, BaseException], None]


class OutOfMemoryError(RuntimeError):
    """As torch names too little memory of a device."""


class AcceleratorError(RuntimeError):
    """As torch names a device that failed."""


def failing(fault: BaseException) -> Engine:
    def engine(_inputs: list[Any]) -> list[Any]:
        raise fault

    return engine


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Planted:
    """Let an engine of every artifact that is opened from now on raise."""

    def planted(name: str, fault: BaseException) -> None:
        class Backend(EagerBackend):
            def load_engines(
                self, manifest: VideoManifest, files: Mapping[str, memoryview]
            ) -> Mapping[str, Engine]:
                return {**super().load_engines(manifest, files), name: failing(fault)}

        monkeypatch.setattr(artifact_module, "open_backend", lambda *_: Backend())

    return planted


KINDS = [
    (ValueError("planted " + "x" * 5000), errors.EngineRunError, "failed while it ran"),
    (RuntimeError(), errors.EngineRunError, "failed while it ran"),
    (ZeroDivisionError("planted\n\nand a second line"), errors.EngineRunError, "failed while it ran"),
    (MemoryError("planted"), errors.EnvironmentLacksError, "gives no more memory"),
    (
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        errors.EnvironmentLacksError,
        "gives no more memory",
    ),
    (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), errors.EnvironmentLacksError, "gives no more memory"),
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), errors.EnvironmentLacksError, "refused a call"),
    (RuntimeError("can't start new thread"), errors.EnvironmentLacksError, "refused a call"),
    (OutOfMemoryError("CUDA out of memory"), errors.DeviceMemoryError, "too little free memory"),
    (AcceleratorError("CUDA error: an illegal memory access"), errors.DeviceFaultError, ""),
]


@pytest.mark.parametrize("name", ["begin", "step", "text", "vae_decode"])
@pytest.mark.parametrize(
    ("fault", "error", "words"), KINDS, ids=lambda value: getattr(value, "__name__", repr(value)[:30])
)
def test_what_an_engine_raises_is_an_error_of_ours_with_its_name(
    name: str, fault: Exception, error: type[errors.SekoRuntimeError], words: str
) -> None:
    def use() -> None:
        with open_whole(engines={name: failing(fault)}) as session:
            session.run_chunk()
            session.run_chunk()

    with pytest.raises(errors.SekoRuntimeError) as caught:
        use()
    assert type(caught.value) is error
    assert words in str(caught.value)
    assert caught.value.__cause__ is fault
    assert len(str(caught.value)) < 500
    if error is errors.EngineRunError:
        assert str(caught.value).startswith(f"engine {name} failed while it ran: {type(fault).__name__}")


def test_an_engine_that_fails_in_a_pool_is_named_too() -> None:
    with (
        toy_pool.open_pool(engines={"begin.1": failing(KeyError("planted"))}) as pool,
        pool.open_session(prompt=toy_whole.PROMPT) as session,
        pytest.raises(errors.EngineRunError, match=r"engine begin\.1 failed .* KeyError: 'planted'"),
    ):
        session.run_chunk()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_passes(kind: type[BaseException]) -> None:
    with open_whole(engines={"step": failing(kind())}) as session, pytest.raises(kind):
        session.run_chunk()


@pytest.mark.parametrize(
    ("fault", "error", "words"), KINDS, ids=lambda value: getattr(value, "__name__", repr(value)[:30])
)
@pytest.mark.parametrize("command", ["run", "verify"])
def test_the_command_line_ends_with_the_errors_exit_code(
    whole_folder: Path,
    plant: Planted,
    command: str,
    fault: Exception,
    error: type[errors.SekoRuntimeError],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant("step", fault)
    output = whole_folder.parent / "out.npy"
    more = ["-o", str(output)] if command == "run" else []
    assert main([command, str(whole_folder), *more]) == error.exit_code
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert words in said
    assert not output.exists()


class Recorder:
    """A capture as CUDA's: what breaks off inside is told by another error, from outside."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        try:
            work()
        except Exception:
            raise AcceleratorError("CUDA error: the capture was invalidated") from None
        return failing_launch


def failing_launch() -> None:
    raise RuntimeError("planted in a launch")


def test_an_engine_that_fails_in_a_capture_is_told_and_not_what_the_capture_says_of_it() -> None:
    def work() -> None:
        raise errors.EngineRunError("engine step failed")

    with pytest.raises(errors.EngineRunError, match="engine step failed"):
        captured(Recorder(), work, "the chunk")


def test_what_a_launch_raises_is_told() -> None:
    launch = captured(Recorder(), lambda: None, "the chunk")
    with pytest.raises(
        errors.EngineRunError, match="the chunk failed while it ran: RuntimeError: planted in a"
    ):
        launch()


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """Let this process open ``spare`` more files and no other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(descriptor) for descriptor in os.listdir("/proc/self/fd"))
    descriptors = [
        os.open("/dev/null", os.O_RDONLY) for _ in range(highest + 1 - len(os.listdir("/proc/self/fd")))
    ]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors, default=highest) + 1 + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize("spare", [0, 1, 2, 4])
def test_too_many_open_files_is_the_machines_fault_and_not_the_artifacts(
    whole_folder: Path, spare: int
) -> None:
    archive = whole_folder.parent / "whole.tar"
    pack_artifact(whole_folder, archive)
    before = sorted(os.listdir("/proc/self/fd"))
    with few_descriptors(spare), pytest.raises(errors.EnvironmentLacksError, match="Too many open files"):
        open_artifact(whole_folder)
    with few_descriptors(0), pytest.raises(errors.EnvironmentLacksError, match="Too many open files"):
        read_manifest(whole_folder)
    with few_descriptors(0), pytest.raises(errors.EnvironmentLacksError, match="Too many open files"):
        unpack_artifact(archive, whole_folder.parent / "unpacked")
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (MemoryError(), "gives no more memory"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "refused a call"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "refused a call"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("place", ["hashlib.sha256", "mmap.mmap", "os.preadv"])
def test_memory_and_disk_that_fail_in_an_open_end_with_exit_code_5(
    whole_folder: Path, monkeypatch: pytest.MonkeyPatch, place: str, fault: Exception, words: str
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise fault

    monkeypatch.setattr(f"seko_runtime.format.artifact_files.{place}", refuse)
    with pytest.raises(errors.EnvironmentLacksError, match=words):
        open_artifact(whole_folder)
    assert main(["verify", str(whole_folder)]) == 5


def test_memory_that_ends_in_a_session_is_told_to_who_uses_the_api(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        raise MemoryError

    no_memory = pytest.raises(errors.EnvironmentLacksError, match="no more memory")
    with open_whole() as session:
        chunk = session.run_chunk()
        monkeypatch.setattr(CpuMemory, "park", refuse)
        with no_memory:
            chunk.to_host()
        monkeypatch.setattr(CpuMemory, "copy", refuse)
        with no_memory:
            session.run_chunk()
    monkeypatch.setattr(CpuMemory, "host_block", refuse)
    with no_memory:
        open_whole()


def test_an_engine_that_lacks_memory_of_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTInductor's code raises a RuntimeError for all that fails, and torch's allocator counts."""
    refused, device = [0], torch.device("cuda:7")

    class Loader:
        def boxed_run(self, inputs: list[Any]) -> list[Any]:
            if inputs[0] == "large":
                refused[0] += 1
            raise RuntimeError("run_func_( container_handle_, ...")

    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_ooms": refused[0]})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 100))
    engine, other = CudaEngine(Loader(), device), CudaEngine(Loader(), device)
    with pytest.raises(RuntimeError, match="run_func_"):
        engine(["small"])
    with pytest.raises(errors.DeviceMemoryError, match=r"5 of 100 bytes are free; .*--fit"):
        engine(["large"])
    for each in (engine, other):
        with pytest.raises(RuntimeError, match="run_func_"):
            each(["small"])
