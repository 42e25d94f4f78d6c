"""Fixtures: one toy artifact with real AOTInductor packages, built once a session, copied for each test."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seko_runtime.backends.torch_memory import CpuMemory
from seko_runtime.manifest import Manifest
from seko_runtime.session import Session

from . import toy


@pytest.fixture(scope="session")
def built_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy artifact for this machine's CPU; not to be changed."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler: AOTInductor cannot build its packages")
    folder = tmp_path_factory.mktemp("artifacts") / "toy"
    (folder / "engines").mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, while it compiles
        for name, module in toy.MODULES.items():
            program = torch.export.export(module(), toy.example_inputs(name))
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(folder / f"engines/{name}.pt2"),
                inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
            )
    return finish_artifact(folder, toy.toy_manifest(golden=toy.GOLDEN))


@pytest.fixture
def artifact(built_toy: Path, tmp_path: Path) -> Path:
    """A copy of the toy artifact, to be damaged."""
    copy = tmp_path / "toy"
    shutil.copytree(built_toy, copy)
    return copy


@pytest.fixture
def edit_manifest() -> Callable[[Path, Callable[[Manifest], Manifest]], None]:
    """Rewrite an artifact's manifest, files table included, as an attacker or a builder of another machine would."""

    def edit(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
        manifest = change(Manifest.from_json((folder / "manifest.json").read_bytes()))
        manifest = replace(manifest, files=toy.file_entries(folder))
        (folder / "manifest.json").write_bytes(manifest.to_json())

    return edit


def finish_artifact(folder: Path, manifest: Manifest) -> Path:
    """Add weights, goldens from the eager modules, and the manifest to a folder that has engines."""
    weights = {name: tensor.numpy() for name, tensor in toy.toy_weights().items()}
    for file in {weight.file for weight in manifest.weights}:
        toy.write_safetensors(
            folder / file,
            {weight.name: weights[weight.name] for weight in manifest.weights if weight.file == file},
        )
    golden = {"text": toy.toy_text()}
    with Session(
        manifest, toy.eager_engines(), toy.toy_weights(), CpuMemory(), seeds=[0], text=golden["text"]
    ) as session:
        for chunk in range(toy.GOLDEN.chunks[-1] + 1):
            latents = session.run_chunk().to_host()
            if chunk in toy.GOLDEN.chunks:
                golden[f"latents.{chunk}"] = golden[f"exact.{chunk}"] = latents
    toy.write_safetensors(folder / toy.GOLDEN.file, golden)
    manifest = replace(manifest, files=toy.file_entries(folder))
    (folder / "manifest.json").write_bytes(manifest.to_json())
    return folder
