"""`--backend tensorrt` up to TensorRT: what is refused before, forms to plans, timings kept, the manifest."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onnx import ModelProto

from seko_export import build_steps as build
from seko_export.artifact.describe import describe
from seko_export.artifact.manifest_json import manifest_json
from seko_export.backends import export_backend
from seko_export.backends.tensorrt_plans import backend, builder, plugin_library
from seko_export.backends.tensorrt_plans.builder import Plan
from seko_export.config.pool import PoolConfig
from seko_export.engines.piece import dtype_name
from seko_export.errors import MachineError, UsageError
from seko_export.families.layers.pieces import make_pieces
from seko_export.host.progress import Progress
from seko_export.host.tensorrt_library import DATA_CENTRE, RTX, TensorRt
from seko_export.video.workload import VideoExport
from seko_runtime.format.manifest import FileEntry, Weight
from seko_runtime.video.contract import resolve_video
from seko_runtime.video.manifest import parse_video_manifest
from tests.tensorrt_plans.plan_forms import gpu_config, write_form

pytestmark = pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning")


@pytest.fixture(autouse=True)
def _headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of the builder's major version, and a file in the place of what is compiled with them."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include/NvInferVersion.h").write_text("#define NV_TENSORRT_MAJOR 11\n")
    monkeypatch.setenv(plugin_library.HEADERS_VARIABLE, str(tmp_path / "include"))
    monkeypatch.setattr(
        plugin_library, "compile_plugin_library", lambda _, goal: goal.write_bytes(b"compiled")
    )


BACKEND = export_backend("tensorrt")


VERSION = "11.4.0.106"


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TensorRT that can be imported, and its lean runtime; nothing of it is called."""
    module = SimpleNamespace(__version__=VERSION, Builder=None, OnnxParser=None)
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "tensorrt_lean" or find(name))


class Timing:
    """In the place of `PlanBuilder`: it gives the engine's name for a plan, and timings."""

    known: list[bytes]  # the timings that it was given, over all plans

    def __init__(self, library: TensorRt, plugins: Path) -> None:
        assert library is DATA_CENTRE
        assert plugins.read_bytes() == b"compiled"

    def build(
        self, model: ModelProto, _: Mapping[str, str], archs: Sequence[int], timings: bytes, __: Progress
    ) -> Plan:
        assert archs == [90]
        self.known.append(timings)
        return Plan(model.graph.name.encode(), b"timed")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Builders that are `Timing`, on a machine with an sm_90; what timings they are given."""
    seen: list[bytes] = []
    monkeypatch.setattr(Timing, "known", seen, raising=False)
    monkeypatch.setattr(builder, "PlanBuilder", Timing)
    monkeypatch.setattr(backend, "local_arch", lambda: "sm_90")
    return seen


@pytest.mark.shows("tensorrt", "written")
def test_what_cannot_be_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    config = gpu_config()
    with pytest.raises(UsageError, match="for GPUs"):
        BACKEND.check_build(config.changed(device="cpu"))
    with pytest.raises(UsageError, match="--kv int8: give --kv bf16 or --kv fp4"):
        BACKEND.check_build(gpu_config("int8"))
    with pytest.raises(UsageError, match="no pools yet"):
        BACKEND.check_build(config.changed(pool=PoolConfig(2, (1, 2))))
    with pytest.raises(UsageError, match="no reference frames yet"):
        BACKEND.check_build(config.changed(stream=replace(config.workload.stream, reference_frames=1)))
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "tensorrt_lean" else object()
    )
    with pytest.raises(MachineError, match=r"runtime\[tensorrt\]"):
        BACKEND.check()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(MachineError, match="onnxscript"):
        BACKEND.check()
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    with pytest.raises(MachineError, match="cannot be imported"):
        BACKEND.check()


def test_the_manifest_of_plans_is_consistent() -> None:
    """Every call fits its engine's signature, nothing is written in place, and the opener knows who built it."""
    config = gpu_config()
    files = {f"engines/{name}.plan": FileEntry("0" * 64, 1) for name in make_pieces(config)}
    manifest = describe(config, BACKEND, (), files)
    assert manifest.extra == {
        "tensorrt": VERSION,
        "tensorrt_caches": "plugins nvfp4_write_keys and nvfp4_write",
    }
    assert {engine.file for engine in manifest.engines} == set(files)
    assert not any(engine.mutates for engine in manifest.engines)
    tensors = {
        a.ref.removeprefix("weight:").partition("[")[0]: a
        for p in make_pieces(config).values()
        for a in p.signature
    }
    tables = config.workload.schedule.tables(config.workload.stream)
    weights = [
        Weight(name, tuple(table.shape), dtype_name(table.dtype), "w") for name, table in tables.items()
    ]
    for ref, argument in tensors.items():
        if argument.ref.startswith("weight:") and ref not in tables:
            names = {ref.replace("{layer}", str(layer)) for layer in range(config.model.layers)}
            weights += [
                Weight(name, argument.shape, dtype_name(argument.dtype), "w") for name in sorted(names)
            ]
    manifest = replace(manifest, weights=tuple(weights), files={**files, "w": FileEntry("0" * 64, 1)})
    programs = resolve_video(manifest)
    assert {"denoise", "denoise_full", "context", "context_full"} <= set(programs)
    assert parse_video_manifest(manifest_json(manifest)) == manifest


def test_forms_become_plans_one_by_one_and_timings_are_kept(
    known: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forms = tmp_path / "forms"
    forms.mkdir()
    names = ("advance", "embed", "noise")
    for name in names:
        write_form(gpu_config(), name, str(forms / f"{name}.onnx"))
    steps: list[str] = []
    seconds = backend.build_plans(
        DATA_CENTRE, gpu_config(), forms, tmp_path / "engines", lambda step, *_: steps.append(step)
    )
    assert tuple(seconds) == names
    assert not forms.exists()
    for name in names:
        assert (tmp_path / "engines" / f"{name}.plan").read_text() == name
        timings = backend.timing_cache_file(DATA_CENTRE, name, ("sm_90",))
        assert timings.read_bytes() == b"timed"
        assert timings.parent == tmp_path / "cache/seko/tensorrt" / f"{VERSION}-sm_90"
    assert any(line.startswith("engine embed: ") and "float64 become float32" in line for line in steps)
    assert not [line for line in steps if line.startswith("engine advance: ")]
    assert known == [b""] * 3

    forms.mkdir()
    write_form(gpu_config(), "noise", str(forms / "noise.onnx"))
    backend.build_plans(DATA_CENTRE, gpu_config(), forms, tmp_path / "again", lambda *_: None)
    assert known[3:] == [b"timed"]


@pytest.mark.usefixtures("known")
def test_a_build_turns_its_forms_into_plans_and_leaves_no_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a build's steps; checkpoint, goldens and verification, which need a GPU, are stood in for."""
    config = gpu_config()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = SimpleNamespace(notes=(), adapters=(), quantised={})
    monkeypatch.setattr(build, "load_checkpoint", lambda *_, **__: checkpoint)
    monkeypatch.setattr(
        build, "family_of", lambda _: SimpleNamespace(weights=lambda *_: [], tables=lambda *_: {})
    )
    monkeypatch.setattr(build, "write_weights", lambda *_: ())
    monkeypatch.setattr(
        build, "_verify", lambda _: {"digest": "0", "worst": {"golden": 0.0}, "errors": [{"cache": 0.0}]}
    )
    recording = SimpleNamespace(scales={}, table=None, exact=False, rounding=None, write=lambda _: None)
    monkeypatch.setattr(VideoExport, "record", lambda *_: recording)

    @contextmanager
    def beside(config: Any, maker: Any, artifact: Path, _: Any) -> Iterator[Any]:
        folder, suffix = maker.form
        (artifact / folder).mkdir()
        for name in ("noise", "advance"):
            write_form(config, name, str(artifact / folder / f"{name}{suffix}"))
        yield dict

    monkeypatch.setattr(build, "compiled_in_background", beside)
    result = build.build_artifact(config, tmp_path / "checkpoint", tmp_path / "artifact", backend="tensorrt")
    assert set(result.engine_s) == {"noise", "advance"}
    files = {
        path.relative_to(result.artifact).as_posix() for path in result.artifact.rglob("*") if path.is_file()
    }
    assert files == {
        "manifest.json",
        "sbom.cdx.json",
        "engines/noise.plan",
        "engines/advance.plan",
        "engines/ptx_kernel.so",
        "engines/ptx/noise.gaussian.sm_90.ptx",
        "engines/ptx/advance.gaussian.sm_90.ptx",
    }
    manifest = json.loads((result.artifact / "manifest.json").read_bytes())
    assert manifest["backend"] == "tensorrt"
    assert manifest["extra"]["tensorrt"] == VERSION
    assert manifest["extra"]["tensorrt_plugins"] == "engines/ptx_kernel.so"
    assert set(manifest["files"]) == files - {"manifest.json"}


def test_headers_of_another_major_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin that is compiled with them would end the process that loads it, without a message."""
    (tmp_path / "include/NvInferVersion.h").write_text("#define TRT_MAJOR_ENTERPRISE 10\n")
    with pytest.raises(MachineError, match="are of version 10, plugins for TensorRT are compiled with 11"):
        plugin_library.tensorrt_headers(DATA_CENTRE)
    assert plugin_library.tensorrt_headers(RTX) == tmp_path / "include"  # tried with its builder
    (tmp_path / "include/NvInferVersion.h").unlink()
    with pytest.raises(MachineError, match="cannot be read"):
        plugin_library.tensorrt_headers(RTX)
    monkeypatch.delenv(plugin_library.HEADERS_VARIABLE)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MachineError, match="TENSORRT_INCLUDE_DIR, or pip install --no-deps kernel-lens"):
        plugin_library.tensorrt_headers(RTX)
