"""Plans of every piece by the real builder for RTX, which needs no GPU: they are built and checked, and not run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, helper

from seko_export import BuildOptions, build, build_steps
from seko_export.backends.onnx_form.functional import functional_piece
from seko_export.backends.tensorrt_plans import backend, builder
from seko_export.backends.tensorrt_plans.builder import Plan, PlanBuilder, check_aliases
from seko_export.backends.tensorrt_plans.exact_caches import CacheRows
from seko_export.backends.tensorrt_plans.form import PlanForm, plan_form
from seko_export.backends.tensorrt_plans.kernels import with_kernels
from seko_export.config.stream import StreamConfig
from seko_export.config.video import VideoBuild
from seko_export.engines.piece import dtype_name
from seko_export.errors import LoweringError, UsageError
from seko_export.families.layers.pieces import make_pieces
from seko_export.families.registry import graph_of
from seko_export.families.video import Preset
from seko_export.families.wan.presets import PRESETS
from seko_export.host import environment
from seko_export.host.progress import silent
from seko_runtime.opening.checked_artifact import read_manifest
from tests.tensorrt_plans.plan_forms import PAST_IN_8_BITS, WHOLE, form_of, gpu_config, write_form

ARCHS = (89, 120)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


@pytest.fixture(scope="module")
def models() -> dict[str, ModelProto]:
    """The forms of a small FP4 model, text encoder and VAE included: every piece.

    But for `vae_decode_first`, which is `vae_decode` without what a VAE keeps between chunks, and takes long.
    """
    return {name: form_of(WHOLE, name) for name in graph_of(WHOLE).pieces if name != "vae_decode_first"}


def build_plan(plans: PlanBuilder, form: PlanForm, archs: tuple[int, ...] = ARCHS) -> Plan:
    return plans.build(with_kernels(form, archs).model, form.aliases, archs, b"", silent)


def test_every_piece_has_a_form_with_the_signature_of_the_manifest_and_a_plan(
    plans: PlanBuilder, models: dict[str, ModelProto]
) -> None:
    """`PlanBuilder` compares the network with the form; here the form is compared with the manifest's signature. Plans
    of the transformer's pieces are those of the artifact below."""
    names = {"float32": (1,), "uint8": (2, 3), "int64": (7,), "bfloat16": (16,)}  # a plugin's bytes are int8
    graph = graph_of(WHOLE)
    pieces, caches = graph.pieces, backend.kv_caches(graph)
    assert caches["block"] == tuple(pieces["block"].mutates)
    assert {"block", "block_full", "embed", "head", "noise", "advance", "text_layer", "vae_decode"} <= set(
        pieces
    )
    for name in models:
        piece = pieces[name]
        form = plan_form(models[name], kv_caches=caches[name])
        written = {f"next.{cache}": cache for cache in caches[name]}
        assert form.aliases == written, name
        for ours, values in (
            (piece.signature, form.model.graph.input),
            (functional_piece(piece).outputs, form.model.graph.output),
        ):
            for argument, value in zip(ours, values, strict=True):
                tensor = value.type.tensor_type
                assert value.name.removeprefix("next.") == argument.name
                assert tuple(axis.dim_value for axis in tensor.shape.dim) == argument.shape
                assert tensor.elem_type in names[dtype_name(argument.dtype)]
        if name.startswith(("text", "vae")):
            assert len(build_plan(plans, form).content) > 10_000, name


def test_equal_builds_give_equal_bytes_and_a_changed_kernel_others(
    plans: PlanBuilder, models: dict[str, ModelProto]
) -> None:
    form = plan_form(models["noise"])
    first = build_plan(plans, form).content
    assert build_plan(plans, form).content == first
    assert all(b".target sm_%d" % arch in first for arch in ARCHS)
    changed = with_kernels(form, ARCHS).model
    (node,) = (node for node in changed.graph.node if node.op_type == "PtxKernel")
    (ptx,) = (attribute for attribute in node.attribute if attribute.name == "ptx")
    ptx.s = ptx.s + b"// another\n"
    assert plans.build(changed, form.aliases, ARCHS, b"", silent).content != first


def test_a_planted_alias_or_type_is_refused(plans: PlanBuilder, models: dict[str, ModelProto]) -> None:
    form = plan_form(models["block"])

    def planted(field: str, place: int, value: int) -> None:
        model = with_kernels(form, ARCHS).model
        node = next(node for node in model.graph.node if node.name == "nvfp4_write_keys")
        (attribute,) = (candidate for candidate in node.attribute if candidate.name == field)
        attribute.ints[place] = value
        plans.build(model, form.aliases, ARCHS, b"", silent)

    with pytest.raises(LoweringError, match=r"gives \('next\.caches\.k_codes', .*, the form says"):
        planted("aliases", 0, 3)  # the scales' memory for codes
    right, other = with_kernels(form, ARCHS).model, {**form.aliases, "next.caches.k_codes": "caches.v_codes"}
    with pytest.raises(
        LoweringError, match=r"out of caches\.k_codes, expected PLUGIN_V3 in .* caches\.v_codes"
    ):
        plans.build(right, other, ARCHS, b"", silent)
    with pytest.raises(LoweringError, match=r"cannot read engine .block.: .*PtxKernel nvfp4_write_keys"):
        planted("aliases", 0, 99)  # no such input: the plugin itself refuses
    with pytest.raises(LoweringError, match="did not build engine 'block'"):
        planted("dtypes", 2, 0)  # codes as float32, which they are not
    with pytest.raises(LoweringError, match=r"'block'.*the form says"):
        planted("dtypes", -1, 8)  # new scales as int64


def test_attention_of_the_past_is_a_plugin_with_the_memory_that_it_asks_for(plans: PlanBuilder) -> None:
    """A layer of the context pass: it writes the cache, expands it to 8 bits, and attends to that."""
    form = plan_form(form_of(PAST_IN_8_BITS, "block_context"))
    model = with_kernels(form, ARCHS).model
    nodes = {node.name: node for node in model.graph.node if node.op_type == "PtxKernel"}
    assert set(nodes) == {"nvfp4_write", "nvfp4_write_keys", "fp8_expand", "attention_fp8"}
    scratch = {
        name: [*field.ints]
        for name, node in nodes.items()
        for field in node.attribute
        if field.name == "scratch"
    }
    assert scratch["attention_fp8"][0] == 0 < scratch["attention_fp8"][1]  # tensor descriptors of sm_120
    content = plans.build(model, form.aliases, ARCHS, b"", silent).content
    assert all(f"{name}_entry".encode() in content for name in nodes)
    for node, field, number in (("attention_fp8", "launch", 3), ("attention_fp8", "scratch", 1)):
        broken = with_kernels(form, ARCHS).model
        (attribute,) = (
            a for n in broken.graph.node if n.name == node for a in n.attribute if a.name == field
        )
        attribute.ints[:] = attribute.ints[:number]  # too few: the plugin itself refuses
        with pytest.raises(
            LoweringError, match=r"cannot read engine .block_context.: .*PtxKernel attention_fp8"
        ):
            plans.build(broken, form.aliases, ARCHS, b"", silent)


CROSSING = gpu_config("bf16")  # its ring of five frames is no whole number of chunks
WHOLE_CHUNKS = CROSSING.changed(
    stream=StreamConfig(32, 48, chunk_frames=2, sink_frames=2, ring_frames=4, batch=2)
)


@pytest.mark.parametrize("config", [WHOLE_CHUNKS, CROSSING], ids=["whole chunks", "chunks across the end"])
def test_exact_caches_are_written_by_tensorrts_layer_where_it_can_and_by_a_plugin_else(
    plans: PlanBuilder, monkeypatch: pytest.MonkeyPatch, config: VideoBuild
) -> None:
    rows = backend.cache_rows(config)
    assert (rows is None) == (config is CROSSING)
    assert backend.cache_writers(config) == (
        "TensorRT's cache update layer" if rows else "plugin cache_write"
    )
    kinds: list[str] = []

    def seen(network: Any, model: ModelProto, aliases: Any) -> None:
        check_aliases(network, model, aliases)
        kinds.extend(network.get_layer(place).type.name for place in range(network.num_layers))

    monkeypatch.setattr(builder, "check_aliases", seen)
    form = plan_form(form_of(config, "block"), rows)
    assert form.aliases == {"next.caches.k": "caches.k", "next.caches.v": "caches.v"}
    build_plan(plans, form, (89,))
    updates = sum("KV" in kind for kind in kinds)
    assert (updates, kinds.count("PLUGIN_V3")) == ((2, 0) if rows else (0, 2))
    shapes = {
        value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in form.model.graph.input
    }
    cache = next(argument for argument in make_pieces(config)["block"].inputs if argument.name == "caches.k")
    tokens = config.workload.stream.cache_tokens
    wanted = [2, 1, tokens, config.model.dim] if rows else [*cache.shape]
    assert shapes["caches.k"] == wanted


def test_rows_of_a_cache_update_are_where_the_form_writes_them() -> None:
    """The nodes that TensorRT's layer stands for, run by onnxruntime, against a plain write of the same tokens."""
    import numpy as np
    import onnxruntime

    rows, tokens, chunk, heads, dim = 2, 12, 4, 2, 3
    cache = helper.make_tensor_value_info("caches.k", 1, [rows * tokens, heads, dim])
    index = helper.make_tensor_value_info("token_index", 7, [rows * chunk])
    x = helper.make_tensor_value_info("x", 1, [rows * chunk, heads, dim])
    result = helper.make_tensor_value_info("next.caches.k", 1, [rows * tokens, heads, dim])
    nodes = [
        helper.make_node("Unsqueeze", ["token_index", "axis"], ["places"]),
        helper.make_node("ScatterND", ["caches.k", "places", "x"], ["next.caches.k"]),
    ]
    axis = helper.make_tensor("axis", 7, [1], [1])
    graph = helper.make_graph(nodes, "block", [cache, index, x], [result], [axis])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    form = plan_form(model, CacheRows(rows, tokens, chunk))
    assert [node.op_type for node in form.model.graph.node].count("TensorScatter") == 1
    random = np.random.default_rng(0)
    cache_array = random.normal(size=(rows * tokens, heads, dim)).astype(np.float32)
    new = random.normal(size=(rows * chunk, heads, dim)).astype(np.float32)
    places = np.concatenate([np.arange(8, 12), tokens + np.arange(0, 4)])
    session = onnxruntime.InferenceSession(form.model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"caches.k": cache_array.reshape(rows, 1, tokens, heads * dim), "token_index": places, "x": new}
    (updated,) = session.run(None, feed)
    cache_array[places] = new
    assert updated.reshape(cache_array.shape).tobytes() == cache_array.tobytes()


@pytest.mark.usefixtures("plans")
def test_gpus_that_it_does_not_build_for_are_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in ("sm_90", "sm_89,sm_100"):
        options = BuildOptions(preset="tiny", backend="tensorrt-rtx", target=target)
        with pytest.raises(
            UsageError, match=r"none of the GPUs that this backend builds for: .*sm_89, sm_120"
        ):
            build(options, tmp_path / "artifact")
    monkeypatch.setattr(environment, "local_gpu_arch", lambda: "sm_90")
    with pytest.raises(UsageError, match="--target auto, this machine's sm_90, is none of the GPUs"):
        build(BuildOptions(preset="tiny", backend="tensorrt-rtx"), tmp_path / "artifact")
    with pytest.raises(UsageError, match="one GPU, which is here"):
        build(BuildOptions(preset="tiny", backend="aoti", target="sm_89,sm_120"), tmp_path / "artifact")
    with pytest.raises(UsageError, match="--no-goldens: the scales of --kv fp4 are calibrated"):
        build(
            BuildOptions(preset="tiny", backend="tensorrt-rtx", target="sm_89", fp4_kv=True, no_goldens=True),
            tmp_path / "artifact",
        )


@pytest.mark.shows("tensorrt-rtx", "built")
@pytest.mark.usefixtures("plans")
def test_an_artifact_for_gpus_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole build, but for the processes that translate its pieces: those forms are there."""

    @contextmanager
    def beside(config: VideoBuild, maker: Any, artifact: Path, _: Any) -> Iterator[Any]:
        folder, suffix = maker.form
        (artifact / folder).mkdir()
        for name in graph_of(config).pieces:
            write_form(config, name, str(artifact / folder / f"{name}{suffix}"))
        yield dict

    monkeypatch.setattr(build_steps, "compiled_in_background", beside)
    monkeypatch.setitem(PRESETS, "small", Preset(CROSSING.model, CROSSING.workload.stream))
    options = BuildOptions(
        preset="small",
        random_weights=0,
        fp4_kv=True,
        backend="tensorrt-rtx",
        target="sm_120,sm_89",
        no_goldens=True,
    )
    steps: list[str] = []
    noted: list[str] = []
    result = build(
        options, tmp_path / "artifact", progress=lambda step, *_: steps.append(step), note=noted.append
    )
    assert any("scales of --kv fp4 are not calibrated" in note for note in noted)
    assert result.golden_error is None
    manifest, _ = read_manifest(result.artifact)
    assert manifest.target.archs == ("sm_89", "sm_120")
    assert (manifest.backend, manifest.workload.golden) == ("tensorrt-rtx", None)
    assert manifest.extra["tensorrt_caches"] == "plugins nvfp4_write_keys and nvfp4_write"
    assert any(weight.name == "blocks.1.kv.k_global_scale" for weight in manifest.weights)
    assert {engine.file for engine in manifest.engines} <= set(manifest.files)
    assert not any(engine.mutates for engine in manifest.engines)
    library = manifest.extra["tensorrt_plugins"]
    for file in (library, "engines/ptx/block.nvfp4_write.sm_89.ptx", "engines/ptx/noise.gaussian.sm_120.ptx"):
        assert (
            manifest.files[file].sha256 == hashlib.sha256((result.artifact / file).read_bytes()).hexdigest()
        )
    assert any(line.startswith("building plans with TensorRT for RTX") for line in steps)
    bill = json.loads((result.artifact / "sbom.cdx.json").read_text())
    assert {"tensorrt-rtx-cu13-libs", "triton"} <= {component["name"] for component in bill["components"]}
