"""Fixtures: one toy artifact with real AOTInductor packages, built once a session, copied for each test."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.format.manifest import Target
from seko_runtime.video.manifest import VideoManifest, parse_video_manifest
from tests.support.manifest_schema import check_manifest
from tests.support.shared import made_once
from tests.support.stacked import stacked_session

from . import order_watch, toy, toy_whole
from .eager_backend import EagerBackend, write_whole

Edit = Callable[[Path, Callable[[VideoManifest], VideoManifest]], None]


@pytest.fixture(scope="session")
def built_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy artifact for this machine's CPU; not to be changed."""

    def make(folder: Path) -> None:
        build_packages(folder, "cpu")
        finish_artifact(folder, toy.toy_manifest(golden=toy.GOLDEN))

    return made_once(tmp_path_factory, "toy", make)


@pytest.fixture(scope="session")
def built_compile_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy artifact for the `compile` backend on this machine's CPU; not to be changed."""
    folder = tmp_path_factory.mktemp("artifacts") / "toy-compile"
    save_programs(folder, "cpu")
    return finish_artifact(folder, toy.toy_manifest(golden=toy.GOLDEN, backend="compile"))


@pytest.fixture(scope="session", params=["aoti", "compile"])
def built_cuda_toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy artifact for this machine's GPU, by each backend."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = tmp_path_factory.mktemp("artifacts") / f"toy-{request.param}"
    (build_packages if request.param == "aoti" else save_programs)(folder, "cuda")
    manifest = toy.toy_manifest(golden=toy.GOLDEN, backend=request.param, target=cuda_target())
    return finish_artifact(folder, manifest)


@pytest.fixture(scope="session", params=["aoti", "compile"])
def built_cuda_whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole toy's artifact of two rows for this machine's GPU, by each backend."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = tmp_path_factory.mktemp("artifacts") / f"whole-{request.param}"
    manifest = toy_whole.whole_manifest(2, backend=request.param, target=cuda_target())
    manifest = toy.changed(manifest, golden=replace(toy_whole.GOLDEN, seeds=(0, 1)))
    (build_packages if request.param == "aoti" else save_programs)(
        folder, "cuda", toy_whole.MODULES, manifest
    )
    return write_whole(folder, manifest)


def cuda_target() -> Target:
    """This machine's GPU."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return Target("cuda", arch, torch.__version__.split("+")[0], torch.version.cuda)


@pytest.fixture
def artifact(built_toy: Path, tmp_path: Path) -> Path:
    """A copy of the toy artifact, to be damaged."""
    copy = tmp_path / "toy"
    shutil.copytree(built_toy, copy)
    return copy


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> order_watch.World:
    """Stand-ins for torch.cuda that note the order of all work."""
    return order_watch.made_world(monkeypatch)


@pytest.fixture(scope="session")
def built_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole toy's artifact, with stand-ins for engines; not to be changed."""
    folder = tmp_path_factory.mktemp("artifacts") / "whole"
    return write_whole(folder, toy_whole.whole_manifest(golden=toy_whole.GOLDEN))


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `built_whole`, of a backend for which nothing compares torch's version, and so imports it: for processes that
    then start in a fraction of the time."""
    folder = tmp_path_factory.mktemp("artifacts") / "whole"
    return write_whole(folder, toy_whole.whole_manifest(golden=toy_whole.GOLDEN, backend="onnx"))


@pytest.fixture
def whole_folder(built_whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the whole toy's artifact, opened without native code."""
    monkeypatch.setattr("seko_runtime.opening.artifact.open_backend", lambda *_: EagerBackend())
    return shutil.copytree(built_whole, tmp_path / "whole")


@pytest.fixture
def edit_manifest() -> Edit:
    """Rewrite an artifact's manifest, files table included, as an attacker or a builder of another machine would."""

    def edit(folder: Path, change: Callable[[VideoManifest], VideoManifest]) -> None:
        manifest = change(parse_video_manifest((folder / "manifest.json").read_bytes()))
        manifest = replace(manifest, files=toy.file_entries(folder))
        (folder / "manifest.json").write_bytes(manifest_json(manifest))

    return edit


def build_packages(
    folder: Path,
    device: str,
    modules: Mapping[str, Callable[[], torch.nn.Module]] = toy.MODULES,
    manifest: VideoManifest | None = None,
) -> None:
    """Compile each toy engine to an AOTInductor package."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler: AOTInductor cannot build its packages")
    (folder / "engines").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it compiles
        for name, module in modules.items():
            torch._inductor.aoti_compile_and_package(
                torch.export.export(module(), toy.example_inputs(name, device, manifest)),
                package_path=str(folder / f"engines/{name}.pt2"),
            )


def save_programs(
    folder: Path,
    device: str,
    modules: Mapping[str, Callable[[], torch.nn.Module]] = toy.MODULES,
    manifest: VideoManifest | None = None,
) -> None:
    """Save each toy engine as an exported program."""
    (folder / "engines").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, module in modules.items():
            program = torch.export.export(module(), toy.example_inputs(name, device, manifest))
            torch.export.save(program, folder / f"engines/{name}.pt2")


def finish_artifact(folder: Path, manifest: VideoManifest) -> Path:
    """Add weights, goldens from the eager modules, and the manifest to a folder that has engines."""
    weights = {name: tensor.numpy() for name, tensor in toy.toy_weights().items()}
    for file in {weight.file for weight in manifest.weights}:
        toy.write_safetensors(
            folder / file,
            {weight.name: weights[weight.name] for weight in manifest.weights if weight.file == file},
        )
    golden = {"text": toy.toy_text()}
    with stacked_session(
        manifest, toy.eager_engines(), toy.toy_weights(), CpuMemory(), seeds=[0], text=golden["text"]
    ) as session:
        for chunk in range(toy.GOLDEN.chunks[-1] + 1):
            latents = session.run_chunk().to_host()
            if chunk in toy.GOLDEN.chunks:
                golden[f"latents.{chunk}"] = golden[f"exact.{chunk}"] = latents
    toy.write_safetensors(folder / toy.GOLDEN.file, golden)
    manifest = replace(manifest, files=toy.file_entries(folder))
    (folder / "manifest.json").write_bytes(manifest_json(manifest))
    return check_manifest(folder)
