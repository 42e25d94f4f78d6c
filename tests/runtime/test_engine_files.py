"""An engine's file against the manifest: one that is another engine's is refused, or `verify` shows it."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seko_runtime import errors
from seko_runtime.__main__ import main
from seko_runtime.backends.compile import CompileBackend
from seko_runtime.backends.engine_tensors import TENSORS_KEY, packed_name, tensors_text
from seko_runtime.backends.memory import Engine
from seko_runtime.format.manifest import EngineSpec, TensorSpec
from seko_runtime.opening import artifact as artifact_module
from seko_runtime.opening.artifact import open_artifact
from seko_runtime.video.manifest import VideoManifest, parse_video_manifest

from . import toy
from .conftest import Edit
from .eager_backend import EagerBackend

# torch's compiler, which the backend imports, warns of its own future
torch_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
Change = Callable[[EngineSpec], EngineSpec]


def with_engine(manifest: VideoManifest, name: str, change: Change) -> VideoManifest:
    engines = tuple(change(engine) if engine.name == name else engine for engine in manifest.engines)
    return replace(manifest, engines=engines)


@pytest.fixture
def sample(tmp_path: Path, small_artifact: Path) -> Path:
    """A copy of an artifact of the backend `compile`, to be changed."""
    copy = tmp_path / "sample"
    shutil.copytree(small_artifact, copy)
    return copy


def engine_file(folder: Path, name: str) -> Path:
    return folder / f"engines/{name}.pt2"


@torch_warns
def test_an_exported_program_in_the_place_of_another_is_refused_by_its_signature(
    sample: Path, edit_manifest: Edit, capsys: pytest.CaptureFixture[str]
) -> None:
    """head and noise swapped, hashes mended; both give a chunk's latents."""
    head, noise = (engine_file(sample, name).read_bytes() for name in ("head", "noise"))
    engine_file(sample, "head").write_bytes(renamed(noise, "head"))
    engine_file(sample, "noise").write_bytes(renamed(head, "noise"))
    edit_manifest(sample, lambda manifest: manifest)
    with pytest.raises(errors.ArtifactError, match=r"engine head takes int64 .* the manifest says float32"):
        open_artifact(sample)
    assert main(["run", str(sample), "-o", str(sample.parent / "out.npy")]) == 4
    assert "the manifest says" in capsys.readouterr().err


@torch_warns
@pytest.mark.parametrize("swap", ["files", "names"])
def test_an_exported_program_in_the_place_of_another_is_refused_by_its_name(
    sample: Path, edit_manifest: Edit, swap: str
) -> None:
    if swap == "files":
        for engine, other in (("head", "x"), ("noise", "head"), ("x", "noise")):
            engine_file(sample, engine).rename(engine_file(sample, other))
        edit_manifest(sample, lambda manifest: manifest)
    else:
        other = {"head": "engines/noise.pt2", "noise": "engines/head.pt2"}
        edit_manifest(
            sample,
            lambda manifest: replace(
                manifest, engines=tuple(replace(e, file=other.get(e.name, e.file)) for e in manifest.engines)
            ),
        )
    with pytest.raises(errors.ArtifactError, match=r"engine head: .* holds the engine noise"):
        open_artifact(sample)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda spec: replace(spec, inputs=spec.inputs[:-1]), "takes 5 tensors, the manifest says 4"),
        (lambda spec: replace(spec, outputs=spec.outputs * 2), "gives 1 tensors, the manifest says 2"),
        (
            lambda spec: replace(spec, outputs=(TensorSpec("velocity", (1, 4, 2, 4, 7), "float32"),)),
            r"gives float32 \[1, 4, 2, 4, 6\] as number 0, the manifest says float32 \[1, 4, 2, 4, 7\]",
        ),
        (
            lambda spec: replace(spec, inputs=(replace(spec.inputs[0], dtype="float16"), *spec.inputs[1:])),
            "takes float32 .* as number 0, the manifest says float16",
        ),
    ],
)
def test_both_sides_of_an_exported_program_are_compared(sample: Path, change: Change, words: str) -> None:
    manifest = parse_video_manifest((sample / "manifest.json").read_bytes())
    manifest = replace(
        with_engine(manifest, "head", change),
        engines=tuple(
            engine for engine in with_engine(manifest, "head", change).engines if engine.name == "head"
        ),
    )
    files = {"engines/head.pt2": memoryview(engine_file(sample, "head").read_bytes())}
    with pytest.raises(errors.ArtifactError, match=words):
        CompileBackend("cpu").load_engines(manifest, files)


def rewritten(package: bytes, change: Callable[[str, bytes], tuple[str, bytes]]) -> bytes:
    """A package with its entries changed, stored as before."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(package)) as source,
        zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target,
    ):
        for entry in source.infolist():
            name, content = change(entry.filename, source.read(entry))
            target.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content)
    return out.getvalue()


def renamed(package: bytes, name: str) -> bytes:
    """A package that says that it is another engine's."""
    return rewritten(package, lambda path, content: (name + path[path.index("/") :], content))


def carrying(package: bytes, text: str) -> bytes:
    """An AOTInductor package with a signature of its own in its metadata."""

    def change(path: str, content: bytes) -> tuple[str, bytes]:
        if path.endswith("_metadata.json"):  # what the exporter drops a second copy of
            content = json.dumps({**json.loads(content), TENSORS_KEY: text}).encode()
        return path, content

    return rewritten(package, change)


def test_a_package_carries_the_name_of_its_engine(built_toy: Path) -> None:
    for name in toy.MODULES:
        assert packed_name(memoryview(engine_file(built_toy, name).read_bytes())) == name
    for other in (b"", b"PK", b"PK\3\4", b"no zip at all, but long enough for a header"):
        assert packed_name(memoryview(other)) == ""


def test_a_package_of_equal_signature_in_the_place_of_another_is_refused_by_its_name(
    artifact: Path, edit_manifest: Edit
) -> None:
    """`again` is of copy's signature; nothing but its name tells that the file is copy's."""
    package = engine_file(artifact, "copy").read_bytes()

    def add(manifest: VideoManifest) -> VideoManifest:
        copy = next(engine for engine in manifest.engines if engine.name == "copy")
        again = replace(copy, name="again", file="engines/again.pt2")
        return replace(manifest, engines=(*manifest.engines, again))

    engine_file(artifact, "again").write_bytes(renamed(package, "again"))
    edit_manifest(artifact, add)
    with open_artifact(artifact) as opened:
        assert all(error.within for error in opened.verify())
    engine_file(artifact, "again").write_bytes(package)
    edit_manifest(artifact, lambda manifest: manifest)
    with pytest.raises(errors.ArtifactError, match=r"engine again: .* holds the engine copy"):
        open_artifact(artifact)


def outputs_doubled(spec: EngineSpec) -> EngineSpec:
    return replace(spec, outputs=(*spec.outputs, replace(spec.outputs[0], name="more")))


def test_outputs_of_a_package_are_counted_when_it_is_loaded(artifact: Path, edit_manifest: Edit) -> None:
    def change(manifest: VideoManifest) -> VideoManifest:
        call = manifest.programs["prompt"][0]
        programs = {**manifest.programs, "prompt": (replace(call, outputs=("value:sum", "value:more")),)}
        return replace(with_engine(manifest, "prompt", outputs_doubled), programs=programs)

    edit_manifest(artifact, change)
    with pytest.raises(errors.ArtifactError, match="engine prompt gives 1 tensors, the manifest says 2"):
        open_artifact(artifact)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda spec: spec, None),
        (
            lambda spec: replace(spec, inputs=(replace(spec.inputs[0], shape=(1, 5, 5)), *spec.inputs[1:])),
            r"engine prompt takes float32 \[1, 5, 5\] as number 0, the manifest says float32 \[1, 5, 4\]",
        ),
        (
            lambda spec: replace(spec, outputs=(replace(spec.outputs[0], dtype="bfloat16"),)),
            "engine prompt gives bfloat16",
        ),
        (lambda spec: replace(spec, inputs=spec.inputs[:1], mutates=()), "engine prompt takes 1 tensors"),
        (
            lambda spec: replace(spec, mutates=("text", "mean")),
            "engine prompt writes text, mean in place, the manifest says mean",
        ),
    ],
)
def test_what_a_package_says_of_its_tensors_is_compared(
    artifact: Path, edit_manifest: Edit, change: Change, words: str | None
) -> None:
    manifest = parse_video_manifest((artifact / "manifest.json").read_bytes())
    text = tensors_text(change(next(engine for engine in manifest.engines if engine.name == "prompt")))
    file = engine_file(artifact, "prompt")
    file.write_bytes(carrying(file.read_bytes(), text))
    edit_manifest(artifact, lambda manifest: manifest)
    if words is None:
        with open_artifact(artifact) as opened:
            assert all(error.within for error in opened.verify())
        return
    with pytest.raises(errors.ArtifactError, match=words):
        open_artifact(artifact)


@pytest.mark.parametrize(
    "text", ["", "{}", "[1, 2, 3]", "[[], [], [99]]", "[[[[1], 2, 3]], [], []]", "[" * 9999]
)
def test_a_package_that_says_nonsense_of_its_tensors_is_refused(
    artifact: Path, edit_manifest: Edit, text: str
) -> None:
    file = engine_file(artifact, "copy")
    file.write_bytes(carrying(file.read_bytes(), text))
    edit_manifest(artifact, lambda manifest: manifest)
    with pytest.raises(errors.ArtifactError, match="engine copy"):
        open_artifact(artifact)


def test_verify_shows_an_engine_that_nothing_static_tells_from_the_right_one(
    whole_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Swapped(EagerBackend):
        def load_engines(
            self, manifest: VideoManifest, files: Mapping[str, memoryview]
        ) -> Mapping[str, Engine]:
            def half(inputs: list[Any]) -> list[Any]:  # of copy's signature
                return [inputs[0] * 0.5]

            return {**super().load_engines(manifest, files), "copy": half}

    assert main(["verify", str(whole_folder)]) == 0
    monkeypatch.setattr(artifact_module, "open_backend", lambda *_: Swapped())
    assert main(["verify", str(whole_folder)]) == 6
    assert "a golden is missed: chunk 0" in capsys.readouterr().err


def test_what_a_backend_does_not_know_of_a_load_is_the_artifacts_fault(
    whole_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(EagerBackend):
        def load_engines(self, *_: object) -> Mapping[str, Engine]:
            raise LookupError("planted")

    monkeypatch.setattr(artifact_module, "open_backend", lambda *_: Failing())
    assert main(["verify", str(whole_folder)]) == 4
    assert "the engines cannot be loaded: LookupError: planted" in capsys.readouterr().err
