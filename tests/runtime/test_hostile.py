"""Hostile and broken artifacts: each has its own error, exit code 4, and no native code has been loaded by then."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from seko_export.artifact.manifest_json import manifest_json
from seko_runtime import errors
from seko_runtime.backends import runtime_backend
from seko_runtime.backends.aoti import AotiBackend
from seko_runtime.cli.commands import main
from seko_runtime.format.manifest import FORMAT_VERSION, Target
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.video.manifest import VideoManifest, parse_video_manifest

from . import toy
from .conftest import Edit

ENGINE, WEIGHTS = "engines/step.pt2", "weights/0.safetensors"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of anything that would load an engine."""
    calls: list[str] = []

    def refuse(*_: object) -> object:
        calls.append("load")
        raise RuntimeError("native code was about to be loaded")

    monkeypatch.setattr(AotiBackend, "load_engines", refuse)
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", refuse)
    return calls


def refused(folder: Path, error: type[errors.ArtifactError], words: str, loads: list[str]) -> None:
    with pytest.raises(errors.SekoRuntimeError) as caught:
        open_artifact(folder)
    assert type(caught.value) is error
    assert words in str(caught.value)
    assert main(["verify", str(folder)]) == 4
    assert loads == []


def flip_byte(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", [ENGINE, WEIGHTS, toy.GOLDEN.file])
def test_a_truncated_file(artifact: Path, loads: list[str], file: str) -> None:
    os.truncate(artifact / file, (artifact / file).stat().st_size - 1)
    refused(artifact, errors.ArtifactError, f"{file} has", loads)


@pytest.mark.parametrize("file", [ENGINE, WEIGHTS, toy.GOLDEN.file])
@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_flipped_bit(artifact: Path, loads: list[str], file: str, place: int) -> None:
    flip_byte(artifact / file, place)
    refused(artifact, errors.ArtifactError, f"{file} has SHA-256", loads)


def test_a_wrong_hash_in_the_manifest(artifact: Path, loads: list[str]) -> None:
    path = artifact / "manifest.json"
    manifest = parse_video_manifest(path.read_bytes())
    files = {**manifest.files, ENGINE: replace(manifest.files[ENGINE], sha256="0" * 64)}
    path.write_bytes(manifest_json(replace(manifest, files=files)))
    refused(artifact, errors.ArtifactError, "the manifest says 0000", loads)


@pytest.mark.parametrize("place", range(0, 3000, 377))
def test_a_flipped_bit_in_the_manifest_is_an_artifact_error_or_another_name(
    artifact: Path, place: int
) -> None:
    """The manifest is the root of trust: what flips there and still fits together is another artifact's digest."""
    with open_artifact(artifact) as whole:
        digest = whole.digest
    flip_byte(artifact / "manifest.json", place)
    try:
        with open_artifact(artifact) as changed:
            assert changed.digest != digest
    except (errors.ArtifactError, errors.EnvironmentLacksError):
        return


def test_no_manifest_and_no_folder(artifact: Path, loads: list[str]) -> None:
    (artifact / "manifest.json").unlink()
    refused(artifact, errors.ManifestError, "holds no manifest.json", loads)
    refused(artifact / "nothing", errors.ArtifactError, "was not found", loads)
    refused(artifact / ENGINE, errors.ArtifactError, "is no folder", loads)


def test_a_truncated_manifest(artifact: Path, loads: list[str]) -> None:
    os.truncate(artifact / "manifest.json", 500)
    refused(artifact, errors.ManifestError, "no UTF-8 JSON", loads)


def test_a_huge_manifest(artifact: Path, loads: list[str]) -> None:
    os.truncate(artifact / "manifest.json", 1 << 40)  # sparse
    refused(artifact, errors.ManifestError, "which is no manifest", loads)


def test_a_newer_format(artifact: Path, loads: list[str]) -> None:
    path = artifact / "manifest.json"
    newer = FORMAT_VERSION + 1
    path.write_bytes(path.read_bytes().replace(b'"format_version": 1', f'"format_version": {newer}'.encode()))
    refused(artifact, errors.ManifestError, f"format version {newer}", loads)


@pytest.mark.parametrize("bad", ["/etc/hostname", "../outside.safetensors", "weights/../../x"])
def test_an_absolute_or_climbing_path(artifact: Path, loads: list[str], bad: str) -> None:
    path = artifact / "manifest.json"
    path.write_bytes(path.read_bytes().replace(WEIGHTS.encode(), bad.encode()))
    refused(artifact, errors.ManifestError, repr(bad), loads)


@pytest.mark.parametrize("path", [WEIGHTS, "weights", "manifest.json"])
def test_a_symbolic_link(artifact: Path, loads: list[str], path: str) -> None:
    (artifact / path).rename(artifact.parent / "elsewhere")
    (artifact / path).symlink_to(artifact.parent / "elsewhere")
    words = path if path == "manifest.json" else f"'{path}' is a symbolic link"
    refused(artifact, errors.ArtifactError, words, loads)


@pytest.mark.parametrize("surplus", ["notes.txt", "engines/other.pt2", ".hidden"])
def test_a_surplus_file(artifact: Path, loads: list[str], surplus: str) -> None:
    (artifact / surplus).write_bytes(b"")
    refused(artifact, errors.ArtifactError, repr(surplus), loads)


def test_a_surplus_folder(artifact: Path, loads: list[str]) -> None:
    (artifact / "more").mkdir()
    refused(artifact, errors.ArtifactError, "folder 'more'", loads)


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder"])
def test_something_else_in_a_files_place(artifact: Path, loads: list[str], kind: str) -> None:
    path = artifact / WEIGHTS
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
        refused(artifact, errors.ArtifactError, "neither a regular file", loads)
    elif kind == "socket":
        before = Path.cwd()
        os.chdir(path.parent)  # a socket's path must be short
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(before)
        refused(artifact, errors.ArtifactError, "neither a regular file", loads)
    else:
        path.mkdir()
        refused(artifact, errors.ArtifactError, "folder", loads)


def test_a_missing_file(artifact: Path, loads: list[str]) -> None:
    (artifact / ENGINE).unlink()
    refused(artifact, errors.ArtifactError, f"{ENGINE} is not in", loads)


@pytest.mark.parametrize(
    ("field", "value", "error", "words"),
    [
        ("arch", "riscv64", errors.ArtifactError, "engines are built for riscv64"),
        ("cpu_flags", ("avx2048",), errors.ArtifactError, "avx2048"),
        ("torch", "1.0.0", errors.ArtifactError, "torch==1.0.0"),
    ],
)
def test_another_target(
    artifact: Path,
    loads: list[str],
    edit_manifest: Edit,
    field: str,
    value: Any,
    error: type[errors.ArtifactError],
    words: str,
) -> None:
    edit_manifest(
        artifact, lambda manifest: replace(manifest, target=replace(manifest.target, **{field: value}))
    )
    refused(artifact, error, words, loads)


def test_another_kind_of_device(artifact: Path, loads: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        errors.ArtifactError, match="built for cpu, opened on cuda; rebuild it on a machine with a GPU"
    ):
        open_artifact(artifact, device="cuda")
    with pytest.raises(errors.UsageError, match="expected auto, cpu, cuda or cuda:N"):
        open_artifact(artifact, device="tpu")
    assert main(["verify", str(artifact), "--device", "cuda:0"]) == 4
    assert capsys.readouterr().err.startswith("error: artifact is built for cpu")
    assert loads == []


@pytest.mark.parametrize("backend", ["tensorrt", "other"])
def test_a_backend_that_cannot_run_here(
    artifact: Path, loads: list[str], edit_manifest: Edit, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_lean", None)  # it may be installed here
    edit_manifest(artifact, lambda manifest: replace(manifest, backend=backend))
    with pytest.raises(errors.EnvironmentLacksError, match=backend):
        open_artifact(artifact)
    assert main(["verify", str(artifact)]) == 5
    assert loads == []


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            ModuleNotFoundError("no torch", name="torch"),
            r"which is not installed; in Seko.s folder, pip install",
        ),
        (ModuleNotFoundError("no networkx", name="networkx"), r"torch needs networkx"),
        (ImportError("libcublas.so.13: cannot open"), r"is installed and cannot be loaded: libcublas"),
        (OSError("libcudnn.so.9: file too short"), r"is installed and cannot be loaded: libcudnn"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_library_that_cannot_be_imported_is_told_from_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, words: str
) -> None:
    def refuse(_name: str) -> None:
        raise fault

    monkeypatch.setattr("seko_runtime.backends.base.importlib", SimpleNamespace(import_module=refuse))
    with pytest.raises(errors.EnvironmentLacksError, match=words):
        runtime_backend("aoti").check_library()


def rewrite_weights(artifact: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = {
        name: weight.numpy() for name, weight in toy.toy_weights().items() if name != "layers.1.weight"
    }
    change(tensors)
    toy.write_safetensors(artifact / WEIGHTS, tensors)


def test_weights_that_are_not_the_manifests(artifact: Path, loads: list[str], edit_manifest: Edit) -> None:
    def missing(tensors: dict[str, np.ndarray]) -> None:
        del tensors["gain"]

    def shape(tensors: dict[str, np.ndarray]) -> None:
        tensors["gain"] = tensors["gain"][:2]

    def dtype(tensors: dict[str, np.ndarray]) -> None:
        tensors["gain"] = tensors["gain"].view(np.int32)

    for change, words in (
        (missing, "no tensor gain"),
        (shape, "gain in weights/0.safetensors has shape"),
        (dtype, "gain in weights/0.safetensors is int32"),
    ):
        rewrite_weights(artifact, change)
        # The hashes are right again: only the tensors are wrong.
        edit_manifest(artifact, lambda manifest: manifest)
        refused(artifact, errors.ArtifactError, words, loads)


def test_a_huge_weights_header(artifact: Path, loads: list[str], edit_manifest: Edit) -> None:
    content = (artifact / WEIGHTS).read_bytes()
    (artifact / WEIGHTS).write_bytes((1 << 60).to_bytes(8, "little") + content[8:])
    edit_manifest(artifact, lambda manifest: manifest)
    refused(artifact, errors.ArtifactError, "announces a header", loads)


def test_a_golden_of_another_shape(artifact: Path, loads: list[str], edit_manifest: Edit) -> None:
    toy.write_safetensors(
        artifact / toy.GOLDEN.file, {"text": toy.toy_text(), "latents.0": np.zeros(3, np.float32)}
    )
    edit_manifest(artifact, lambda manifest: manifest)
    refused(artifact, errors.ArtifactError, "latents.0", loads)


def test_a_program_that_contradicts_an_engines_signature(
    artifact: Path, loads: list[str], edit_manifest: Edit
) -> None:
    def change(manifest: VideoManifest) -> VideoManifest:
        engines = tuple(
            replace(engine, inputs=(replace(engine.inputs[0], dtype="float16"), *engine.inputs[1:]))
            for engine in manifest.engines
        )
        return replace(manifest, engines=engines)

    edit_manifest(artifact, change)
    refused(artifact, errors.ArtifactError, "float16", loads)


def test_an_engine_file_that_is_another_engine_is_refused_once_it_is_loaded(
    artifact: Path, edit_manifest: Edit
) -> None:
    """Its inputs are counted when it is loaded, its outputs checked when it first runs: never called with less."""
    (artifact / ENGINE).write_bytes((artifact / "engines/copy.pt2").read_bytes())
    edit_manifest(artifact, lambda manifest: manifest)
    with pytest.raises(errors.ArtifactError, match="engine step takes 1 tensors, the manifest says 7"):
        open_artifact(artifact)


def test_an_engine_file_that_is_no_package_is_an_artifact_error(artifact: Path, edit_manifest: Edit) -> None:
    (artifact / ENGINE).write_bytes(b"no zip at all")
    edit_manifest(artifact, lambda manifest: manifest)
    with pytest.raises(errors.ArtifactError, match="engine step"):
        open_artifact(artifact)


def test_opening_leaks_no_descriptor_when_it_fails(artifact: Path, loads: list[str]) -> None:
    (artifact / "more").mkdir()
    before = set(os.listdir("/proc/self/fd"))  # what earlier tests left may be closed meanwhile
    for _ in range(3):
        with pytest.raises(errors.ArtifactError, match="folder 'more'"):
            open_artifact(artifact)
    assert set(os.listdir("/proc/self/fd")) <= before
    assert loads == []


def test_a_gpu_artifact_of_another_host(artifact: Path, loads: list[str], edit_manifest: Edit) -> None:
    target = Target("cuda", "sm_90", "2.13.0", "13.0", host_arch="riscv64")
    edit_manifest(artifact, lambda manifest: replace(manifest, target=target))
    refused(artifact, errors.ArtifactError, "built for riscv64", loads)


def test_an_engine_name_as_long_as_names_may_be(artifact: Path, edit_manifest: Edit) -> None:
    long = "e" * 255

    def rename(manifest: VideoManifest) -> VideoManifest:
        first = manifest.engines[0]
        programs = {
            name: tuple(replace(c, engine=long) if c.engine == first.name else c for c in calls)
            for name, calls in manifest.programs.items()
        }
        return replace(
            manifest, engines=(replace(first, name=long), *manifest.engines[1:]), programs=programs
        )

    edit_manifest(artifact, rename)
    with open_artifact(artifact) as opened:
        assert all(error.within for error in opened.verify())


def test_a_folder_in_the_place_of_the_manifest(artifact: Path, loads: list[str]) -> None:
    (artifact / "manifest.json").unlink()
    (artifact / "manifest.json").mkdir()
    refused(artifact, errors.ArtifactError, "is no regular file", loads)
