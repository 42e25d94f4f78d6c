"""The artifact that `seko-export build --backend onnx` makes: replayed without torch, whole passes, hostile files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import ModelProto, TensorProto, checker, helper

from seko_export.artifact.manifest_json import manifest_json
from seko_export.backends.onnx_form.form_check import all_nodes, open_shapes
from seko_export.video.bounds import TOLERANCES
from seko_runtime import open_artifact
from seko_runtime.errors import ArtifactError, EnvironmentLacksError
from seko_runtime.opening.artifact import check_artifact
from seko_runtime.video.manifest import VideoManifest, parse_video_manifest
from tests.conftest import Built
from tests.runtime.toy import file_entries
from tests.support.rows import rows_of
from tests.support.stacked import open_stacked

from .forms import ODD, ROWS, onnx_artifact

PASSES = {"denoise": "denoise.onnx", "context": "context.onnx"}
VERIFY = """
import json, sys
from seko_runtime.cli.commands import main
code = main(["verify", sys.argv[1], "--json"])
bad = {"torch", "triton", "onnx", "onnxscript", "seko_export", "seko_kernels"} & set(sys.modules)
sys.exit(code or (f"imported {bad}" if bad else 0))
"""


@pytest.fixture(scope="session")
def built() -> Built:
    """The artifact; not to be changed."""
    return onnx_artifact()


@pytest.fixture
def copy(built: Built, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(built.folder, tmp_path / "artifact"))


def test_it_was_verified_by_the_build_and_verifies_without_torch(built: Built) -> None:
    command = [sys.executable, "-W", "error", "-c", VERIFY, str(built.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict["ok"] is True
    first, *later = [error["golden"] for error in verdict["errors"]]
    assert first <= 1e-5
    # They read a past in FP4, of which another sum flips a code on some processors. That all stay within 1e-5 of the
    # eager model over an equal past, and how few codes flip, is shown by test_stream.py.
    assert later
    assert max(first, *later) == built.report["golden_error"] <= TOLERANCES[torch.float32]["lossy"]


def test_sizes_of_no_preset_are_built(built: Built) -> None:
    """Layers, width, heads and all else come from the checkpoint: no option and no preset says them."""
    model = parse_video_manifest((built.folder / "manifest.json").read_bytes()).model
    assert {name: model[name] for name in asdict(ODD)} == asdict(ODD)
    assert "does not tell" not in built.done.stderr  # nothing had to be assumed


def test_the_manifest_has_functional_engines_and_names_the_passes(built: Built) -> None:
    manifest = check_artifact(built.folder).manifest
    assert manifest.backend == "onnx"
    assert dict(manifest.extra) == {f"onnx_{name}": file for name, file in PASSES.items()}
    assert all(engine.file == f"engines/{engine.name}.onnx" for engine in manifest.engines)
    assert not any(engine.mutates for engine in manifest.engines)
    caches = {buffer.name for buffer in manifest.buffers if buffer.role == "cache"}
    written = {
        ref for call in manifest.programs["context"] for ref in call.outputs if ref.startswith("buffer:")
    }
    assert {ref.removeprefix("buffer:").partition("[")[0] for ref in written} == caches


def test_equal_seeds_give_equal_bytes_and_others_do_not(built: Built) -> None:
    with open_artifact(built.folder) as artifact:
        runs = []
        for seed in (5, 5, 6):
            with open_stacked(artifact, seeds=[seed] * ROWS) as session:
                runs.append([session.run_chunk().to_host().tobytes() for _ in range(2)])
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])


@pytest.mark.parametrize("program", PASSES)
def test_a_pass_is_whole_small_and_shares_the_artifacts_weights(built: Built, program: str) -> None:
    path = built.folder / PASSES[program]
    checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert [*open_shapes(model)] == []
    assert path.stat().st_size < 0.1 * built.report["weight_bytes"]
    manifest = parse_video_manifest((built.folder / "manifest.json").read_bytes())
    files = {weight.name: weight.file for weight in manifest.weights}
    assert model.graph.initializer
    for tensor in model.graph.initializer:
        assert tensor.data_location == TensorProto.EXTERNAL
        assert {e.key: e.value for e in tensor.external_data}["location"] == files[tensor.name]
    called = [node.op_type for node in model.graph.node]
    assert called.count("block") == manifest.model["layers"]
    assert len([f for f in model.functions if f.name == "block"]) == 1
    domains = {node.domain for node in all_nodes(model)}
    assert domains == {"", "seko", "seko.piece"}
    assert {(f.domain, f.name) for f in model.functions if f.domain == "seko"} >= {("seko", "nvfp4_write")}
    caches = [value.name for value in model.graph.output if value.name.startswith("next.kv.")]
    buffers = [buffer for buffer in manifest.buffers if buffer.role == "cache"]
    assert len(caches) == sum(buffer.shape[0] if buffer.row_axis else 1 for buffer in buffers)


def test_chunks_by_whole_passes_are_the_sessions(built: Built) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    passes = {
        name: onnxruntime.InferenceSession(built.folder / file, options, providers=["CPUExecutionProvider"])
        for name, file in PASSES.items()
    }
    with open_artifact(built.folder) as artifact, open_stacked(artifact, seeds=[5, 6]) as session:
        live, number = rows_of(session).device(), artifact.manifest.workload.schedule.denoise_passes
        state: dict[str, Any] = {}  # each cache's layers, which the passes hand on

        def run(name: str, turn: int) -> None:
            session = passes[name]
            feed = {
                i.name: _given(i.name, state, live.buffers, artifact.engines.loaded.weights, turn)
                for i in session.get_inputs()
            }
            results = session.run(None, feed)
            state.update(
                {o.name.removeprefix("next."): r for o, r in zip(session.get_outputs(), results, strict=True)}
            )

        for _ in range(3):
            wanted = session.run_chunk().to_host()  # its positions stay in the buffers
            live.chunk[
                ROWS, False, False
            ].begin.run()  # the first noise again, which the chunk has overwritten
            state["latents"] = live.buffers["latents"].copy()
            for turn in range(number):
                run("denoise", turn)
            run("context", number)
            assert np.linalg.norm(state["latents"] - wanted) <= 1e-5 * np.linalg.norm(wanted)
            for buffer in artifact.manifest.buffers:
                if buffer.role == "cache" and buffer.row_axis:
                    cache = live.buffers[buffer.name]
                    ours = np.stack([state[f"{buffer.name}.{layer}"] for layer in range(len(cache))])
                    assert (ours != cache).mean() <= 1e-3
                    assert ours.any()


def _given(
    name: str, state: Mapping[str, Any], buffers: Mapping[str, Any], weights: Mapping[str, Any], turn: int
) -> Any:
    """What a pass's input holds: what the pass before gave, this pass's entry of a table, or a buffer."""
    if name in state:
        return state[name]
    if name in weights:
        return weights[name][turn]
    if name in buffers:
        return buffers[name]
    buffer, _, layer = name.rpartition(".")
    return (
        np.zeros_like(buffers[buffer][int(layer)])
        if buffer.startswith("kv.")
        else buffers[buffer][int(layer)]
    )


def test_without_onnxruntime_it_is_refused(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EnvironmentLacksError, match=r"'onnx' needs onnxruntime, .*runtime\[onnx\]"):
        open_artifact(built.folder)


def test_it_opens_whatever_the_torch_and_the_processor(copy: Path) -> None:
    def elsewhere(manifest: VideoManifest) -> VideoManifest:
        return replace(manifest, target=replace(manifest.target, torch="1.0", arch="riscv64"))

    _edit(copy, elsewhere)
    with open_artifact(copy) as artifact, open_stacked(artifact, seeds=[1] * ROWS) as session:
        assert np.isfinite(session.run_chunk().to_host()).all()


def test_what_onnxruntime_cannot_read_is_refused(copy: Path) -> None:
    (copy / "engines/head.onnx").write_bytes(b"no model")
    _edit(copy)
    with pytest.raises(ArtifactError, match=r"engine head \(engines/head.onnx\) was refused by onnxruntime"):
        open_artifact(copy)


def test_data_outside_of_the_file_are_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = onnx.load(copy / "engines/head.onnx")
    inner = next(tensor for tensor in model.graph.initializer)
    content = onnx.numpy_helper.to_array(inner).tobytes()
    inner.ClearField("raw_data")
    inner.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "stray.bin"), ("offset", "0"), ("length", str(len(content)))):
        inner.external_data.add(key=key, value=value)
    (copy / "engines/head.onnx").write_bytes(model.SerializeToString())
    _edit(copy)
    (copy.parent / "stray.bin").write_bytes(content)
    monkeypatch.chdir(copy.parent)  # where onnxruntime would look for it
    with pytest.raises(ArtifactError, match="engine head"):
        open_artifact(copy)


@pytest.mark.parametrize(("side", "verb"), [("inputs", "takes"), ("outputs", "gives")])
def test_another_signature_is_refused(copy: Path, side: str, verb: str) -> None:
    model = ModelProto()
    model.ParseFromString((copy / "engines/noise.onnx").read_bytes())
    if side == "inputs":
        model.graph.input.add().CopyFrom(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))
    else:
        model.graph.node.add(op_type="Identity", input=["seeds"], output=["more"])
        model.graph.output.add().CopyFrom(helper.make_tensor_value_info("more", TensorProto.INT64, [1]))
    (copy / "engines/noise.onnx").write_bytes(model.SerializeToString())
    _edit(copy)
    with pytest.raises(ArtifactError, match=rf"engine noise {verb} \d tensors, the manifest says \d"):
        open_artifact(copy)


def test_another_dtype_is_refused(copy: Path) -> None:
    shutil.copyfile(copy / "engines/prompt.onnx", copy / "engines/head.onnx")
    _edit(copy)
    with pytest.raises(
        ArtifactError, match=r"engine head takes float32 \[.*\] as number 0, the manifest says"
    ):
        open_artifact(copy)


def test_an_engine_that_is_said_to_write_in_place_is_refused(copy: Path) -> None:
    def mutating(manifest: VideoManifest) -> VideoManifest:
        engines = [replace(e, mutates=("latents",)) if e.name == "advance" else e for e in manifest.engines]
        return replace(manifest, engines=tuple(engines))

    _edit(copy, mutating)
    with pytest.raises(ArtifactError, match="engine advance is said to write latents in place"):
        open_artifact(copy)


def _edit(folder: Path, change: Callable[[VideoManifest], VideoManifest] = lambda manifest: manifest) -> None:
    """Rewrite the manifest with the hashes that the files have now."""
    manifest = change(parse_video_manifest((folder / "manifest.json").read_bytes()))
    manifest = replace(manifest, files=file_entries(folder))
    (folder / "manifest.json").write_bytes(manifest_json(manifest))
