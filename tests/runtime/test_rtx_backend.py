"""Plans of TensorRT for RTX through whole artifacts, over doubles of its runtime and of the driver.

Where such a GPU is, tests/tensorrt_plans/test_trt.py runs real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seko_runtime import errors, open_artifact
from seko_runtime.backends import cuda_driver
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.format.manifest import Target
from seko_runtime.video.manifest import VideoManifest
from tests.support.stacked import open_stacked

from . import toy_whole
from .host_driver import HostDriver
from .lean_double import RTX_LIBRARY, doubled
from .test_numpy_memory import story
from .test_tensorrt_backend import artifact_of, manifest_of

VERSION = "1.7.1.116"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    host = HostDriver()
    monkeypatch.setattr(cuda_driver, "CudaDriver", lambda _: host)
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_driver, "device_arch", lambda _: "sm_89")
    return host


@pytest.fixture
def trt(driver: HostDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with doubled(toy_whole.eager_engines(), driver, rtx=True) as module:
        yield module


def rtx_manifest() -> VideoManifest:
    target = Target("cuda", "sm_89-sm_120", "2.13.0", None)
    return replace(manifest_of(), backend="tensorrt-rtx", target=target, extra={"tensorrt-rtx": VERSION})


def test_sessions_tell_the_story_that_they_tell_in_memory_of_torch(trt: Any, tmp_path: Path) -> None:
    with open_artifact(artifact_of(tmp_path / "artifact", rtx_manifest())) as artifact:
        assert max(error.golden for error in artifact.verify()) == 0.0
        results = story(CpuMemory(), lambda _: open_stacked(artifact, prompt=toy_whole.PROMPT, seeds=[3, 4]))
    assert results == story(CpuMemory())
    assert set(trt.log.strategies) == {trt.CudaGraphStrategy.DISABLED}  # the session captures chunks itself


def test_what_was_compiled_is_kept_in_a_private_folder_and_read_by_the_next_process(
    trt: Any, tmp_path: Path
) -> None:
    folder = artifact_of(tmp_path / "artifact", rtx_manifest())
    open_artifact(folder).close()
    cache_files = [*(tmp_path / "cache/seko/tensorrt-rtx").rglob("*.cache")]
    assert {path.parent.name for path in cache_files} == {f"{VERSION}-sm_89"}
    assert len(cache_files) == len({engine.file for engine in rtx_manifest().engines})
    assert all(
        path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0 for path in cache_files
    )
    trt.log.caches.clear()
    open_artifact(folder).close()
    assert {cache.known for cache in trt.log.caches} == {b"compiled"}
    cache_files[0].write_bytes(b"another driver's")
    cache_files[1].chmod(0o666)  # anyone may have put code there
    trt.log.caches.clear()
    open_artifact(folder).close()
    assert sorted({cache.known for cache in trt.log.caches}) == [b"", b"another driver's", b"compiled"]
    assert cache_files[0].read_bytes() == b"compiled"


@pytest.mark.usefixtures("trt")
def test_another_gpu_gets_our_error_before_a_plan_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = artifact_of(tmp_path / "artifact", rtx_manifest())
    monkeypatch.setattr(cuda_driver, "device_arch", lambda _: "sm_90")
    with pytest.raises(errors.ArtifactError, match="built for sm_89 and sm_120, cuda is sm_90"):
        open_artifact(folder)


def test_a_plan_that_cannot_run_here_is_refused_before_it_is_loaded(trt: Any, tmp_path: Path) -> None:
    folder = artifact_of(tmp_path / "artifact", rtx_manifest())
    name = rtx_manifest().engines[0].name
    trt.log.validity = ("INVALID", trt.EngineInvalidityDiagnostics.UNSUPPORTED_CC)
    with pytest.raises(
        errors.ArtifactError, match=f"engine {name} is for sm_89 and sm_120, .* this GPU, sm_89"
    ):
        open_artifact(folder)
    trt.log.validity = ("INVALID", trt.EngineInvalidityDiagnostics.OLD_CUDA_DRIVER)
    with pytest.raises(errors.ArtifactError, match=rf"engine {name} .*: old cuda driver; update the driver"):
        open_artifact(folder)
    trt.log.validity = ("SUBOPTIMAL", 0)
    open_artifact(folder).close()


def test_an_engine_that_cannot_be_captured_is_refused_with_the_reason(trt: Any, tmp_path: Path) -> None:
    trt.log.capturable = False
    with (
        open_artifact(artifact_of(tmp_path / "artifact", rtx_manifest())) as artifact,
        pytest.raises(errors.EngineRunError, match="cannot be captured on this GPU, says TensorRT for RTX"),
        open_stacked(artifact, prompt=toy_whole.PROMPT, seeds=[3, 4]) as session,
    ):
        session.run_chunk().to_host()


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize("built", ["1.8.0.1", "2.0.0.1"])
def test_plans_of_another_version(tmp_path: Path, built: str) -> None:
    manifest = replace(rtx_manifest(), extra={"tensorrt-rtx": built})
    with pytest.raises(
        errors.ArtifactError, match=rf"built with TensorRT for RTX {built}, the runtime here is"
    ):
        open_artifact(artifact_of(tmp_path / "artifact", manifest))


def test_the_plugin_library_is_loaded_from_the_bytes_that_were_hashed_and_once(
    trt: Any, tmp_path: Path
) -> None:
    loaded: list[bytes] = []
    registered: list[object] = []

    class Registry:
        def get_creator(self, *name: str) -> object:
            assert name == ("PtxKernel", "2", "seko")
            return registered[0] if registered else None

        def load_library(self, path: str) -> object:
            loaded.append(Path(path).read_bytes())
            registered.extend([object()] * (loaded[-1] == b"a library"))
            return object()

    registry = Registry()
    trt.get_plugin_registry = lambda: registry
    manifest = rtx_manifest()
    manifest = replace(manifest, extra={**manifest.extra, "tensorrt_plugins": "engines/plugins.so"})

    def artifact(name: str, content: bytes) -> Path:
        (tmp_path / name / "engines").mkdir(parents=True)
        (tmp_path / name / "engines/plugins.so").write_bytes(content)
        return artifact_of(tmp_path / name, manifest)

    with pytest.raises(errors.ArtifactError, match=r"library engines/plugins\.so was refused"):
        open_artifact(artifact("refused", b"no library"))
    folder = artifact("good", b"a library")
    open_artifact(folder).close()
    open_artifact(folder).close()
    assert loaded == [b"no library", b"a library"]
    registered.clear()
    (folder / "engines/plugins.so").write_bytes(b"a Library")
    with pytest.raises(errors.ArtifactError, match="SHA-256"):
        open_artifact(folder)
    assert len(loaded) == 2


def test_without_the_library_the_error_says_what_to_install(
    driver: HostDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, RTX_LIBRARY, None)
    with pytest.raises(errors.EnvironmentLacksError, match=r"pip install './runtime\[tensorrt-rtx\]'"):
        open_artifact(artifact_of(tmp_path / "artifact", rtx_manifest()))
    assert driver.live == {}
