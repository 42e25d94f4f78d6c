"""The runtime's TensorRT backend against strict doubles of the lean runtime and the driver: a contract, no proof.

The double of the lean runtime has the names and signatures of the real bindings' stubs; its plans are toys. What only a
real plan shows is in tests/tensorrt_plans/test_trt.py. The real lean runtime, where it is installed, is asked what it
can be asked without a GPU: that it is not reached without one, where it would crash.
"""

from __future__ import annotations

import json
import subprocess
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
from tests.runtime import toy
from tests.runtime.strict import StrictError
from tests.support.stacked import open_stacked

from . import toy_whole
from .eager_backend import write_whole
from .host_driver import HostDriver
from .lean_double import doubled, functional, plan_of
from .test_numpy_memory import story

ARCH = "sm_90"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    """The driver's double in the place of the driver."""
    host = HostDriver()
    monkeypatch.setattr(cuda_driver, "CudaDriver", lambda _: host)
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_driver, "device_arch", lambda _: ARCH)
    return host


@pytest.fixture
def trt(driver: HostDriver) -> Iterator[Any]:
    with doubled(toy_whole.eager_engines(), driver) as module:
        yield module


def manifest_of(rows: int = 2) -> VideoManifest:
    target = Target("cuda", ARCH, "2.13.0", "13.0")
    manifest = functional(toy_whole.whole_manifest(rows, target=target))
    return toy.changed(manifest, golden=replace(toy_whole.GOLDEN, seeds=tuple(range(rows))))


def artifact_of(
    folder: Path, manifest: VideoManifest, plans: dict[str, bytes] | None = None, *, in_place: bool = True
) -> Path:
    written = {engine.name: engine.mutates for engine in toy_whole.whole_manifest(2).engines}
    for spec in manifest.engines:
        path = folder / spec.file
        path.parent.mkdir(parents=True, exist_ok=True)
        plan = plan_of(spec, written[spec.name] if in_place else ())
        path.write_bytes((plans or {}).get(spec.name, plan))
    return write_whole(folder, manifest)


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize("in_place", [True, False])
def test_an_artifact_opens_replays_and_verifies(tmp_path: Path, in_place: bool) -> None:
    folder = artifact_of(tmp_path / "artifact", manifest_of(), in_place=in_place)
    with open_artifact(folder) as artifact:
        report = artifact.verify()
        assert max(error.golden for error in report) == 0.0
        assert (artifact.stats["caches_copied_back"] == 0) == in_place
        results = story(CpuMemory(), lambda _: open_stacked(artifact, prompt=toy_whole.PROMPT, seeds=[3, 4]))
    assert results == story(
        CpuMemory()
    )  # every kind of call that a session has, with the bytes of memory in torch


@pytest.mark.usefixtures("trt")
def test_a_plan_whose_hash_is_right_and_that_tensorrt_refuses(tmp_path: Path) -> None:
    whole = plan_of(manifest_of().engines[0])
    name = manifest_of().engines[0].name
    for number, content in enumerate((whole[: len(whole) // 2], b"", b"a plan of another runtime")):
        folder = artifact_of(tmp_path / str(number), manifest_of(), {name: content})
        with pytest.raises(
            errors.ArtifactError, match=rf"engine {name} .*: .*magic tag does not match; rebuild"
        ):
            open_artifact(folder)


@pytest.mark.usefixtures("trt")
def test_a_plan_that_changed_after_the_build_is_not_reached(tmp_path: Path) -> None:
    folder = artifact_of(tmp_path / "artifact", manifest_of())
    path = folder / manifest_of().engines[0].file
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(errors.ArtifactError, match="bytes, the manifest says"):
        open_artifact(folder)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(errors.ArtifactError, match="SHA-256"):
        open_artifact(folder)


@pytest.mark.parametrize(
    ("built", "error", "words"),
    [
        (
            "11.5.0.1",
            errors.ArtifactError,
            r"built with TensorRT 11\.5\.0\.1, the runtime here is 11\.4\.0\.106",
        ),
        ("12.0.0.1", errors.ArtifactError, r"of 12\.x that is at least 12\.0\.0\.1"),
        ("10.16.1.11", errors.ArtifactError, r"of 10\.x"),
        ("new", errors.ManifestError, "'new', expected the version"),
        (None, errors.ManifestError, "None, expected the version"),
    ],
)
@pytest.mark.usefixtures("trt")
def test_plans_of_another_version(
    tmp_path: Path, built: str | None, error: type[Exception], words: str
) -> None:
    manifest = manifest_of()
    extra = {} if built is None else {"tensorrt": built}
    folder = artifact_of(tmp_path / "artifact", replace(manifest, extra=extra))
    with pytest.raises(error, match=words):
        open_artifact(folder)


@pytest.mark.usefixtures("trt")
def test_a_plan_with_another_signature(tmp_path: Path) -> None:
    manifest = manifest_of()
    spec = next(engine for engine in manifest.engines if engine.name == "step")
    plan = json.loads(plan_of(spec))
    for number, (side, change, words) in enumerate(
        (
            (
                "inputs",
                lambda signature: signature[1:],
                r"takes 6 tensors, the manifest says 7 \(not on both sides: latents\)",
            ),
            (
                "inputs",
                lambda signature: [[signature[0][0], [1], signature[0][2]], *signature[1:]],
                r"takes latents as FLOAT \[1\]",
            ),
            (
                "outputs",
                lambda signature: [[signature[0][0], signature[0][1], "INT64"], *signature[1:]],
                r"gives out as INT64",
            ),
        )
    ):
        changed = {side: change(plan[side])}
        folder = artifact_of(tmp_path / str(number), manifest, {"step": plan_of(spec, **changed)})
        with pytest.raises(errors.ArtifactError, match=words):
            open_artifact(folder)


@pytest.mark.usefixtures("trt")
def test_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = artifact_of(tmp_path / "artifact", manifest_of())
    monkeypatch.setattr(cuda_driver, "device_arch", lambda _: "sm_89")
    with pytest.raises(errors.ArtifactError, match="built for sm_90, cuda is sm_89"):
        open_artifact(folder)
    with pytest.raises(errors.EnvironmentLacksError, match="cuda:1 does not exist"):
        open_artifact(folder, device="cuda:1")


@pytest.mark.usefixtures("trt")
def test_sessions_leave_nothing_behind(tmp_path: Path, driver: HostDriver) -> None:
    import gc

    folder = artifact_of(tmp_path / "artifact", manifest_of())
    with (
        open_artifact(folder) as artifact,
        open_stacked(artifact, prompt=toy_whole.PROMPT, seeds=[3, 4]) as session,
    ):
        session.run_chunk().to_host()
    del artifact, session
    gc.collect()
    assert driver.live == {}


def test_the_double_refuses_what_the_stubs_do_not_have(trt: Any) -> None:
    runtime = trt.Runtime(type("Quiet", (trt.ILogger,), {"log": lambda *_: None})())
    for wrong in (
        lambda: runtime.deserialize_cuda_engine(7),
        lambda: runtime.deserialize(b""),
        lambda: trt.ICudaEngine(),
        lambda: trt.Runtime(),
    ):
        with pytest.raises(StrictError):
            wrong()


def test_without_the_library_the_error_says_what_to_install(
    tmp_path: Path, driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = artifact_of(tmp_path / "artifact", manifest_of())
    monkeypatch.setitem(sys.modules, "tensorrt_lean", None)
    with pytest.raises(errors.EnvironmentLacksError, match=r"pip install './runtime\[tensorrt\]'"):
        open_artifact(folder)
    assert driver.live == {}


def test_the_real_lean_runtime_is_not_reached_without_a_driver(tmp_path: Path) -> None:
    """Deserialising without a driver ends the process (11.4): that we do not come so far is the point."""
    pytest.importorskip("tensorrt_lean", reason="needs tensorrt-lean-cu13 and its libraries")
    try:
        cuda_driver.load_driver()
    except errors.EnvironmentLacksError:
        pass
    else:
        pytest.skip("this machine has a driver")
    folder = artifact_of(tmp_path / "artifact", manifest_of())
    command = [sys.executable, "-m", "seko_runtime", "verify", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == errors.EnvironmentLacksError.exit_code
    assert "libcuda.so.1" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    "content", [b"", b"no plan" * 100, b"ptrt" + bytes(4096)], ids=["empty", "foreign", "cut"]
)
def test_the_real_lean_runtime_refuses_what_is_no_plan(tmp_path: Path, content: bytes) -> None:
    lean = pytest.importorskip("tensorrt_lean", reason="needs tensorrt-lean-cu13 and its libraries")
    target = Target("cuda", cuda_driver.device_arch(0), "2.11.0", "13.0")
    manifest = replace(manifest_of(), target=target, extra={"tensorrt": lean.__version__})
    name = manifest.engines[0].name
    folder = artifact_of(tmp_path / "artifact", manifest, {name: content})
    with pytest.raises(errors.ArtifactError, match=f"engine {name}"):
        open_artifact(folder)
