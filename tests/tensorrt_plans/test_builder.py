"""Our builder against a strict double of TensorRT's, generated from the stubs of its bindings: a contract, no proof.

What it shows: every call we make exists and takes what we give it; the real `tensorrt.plugin` accepts our plugins and
hands a builder the kernels, launches and aliases that the tests in tests/kernels launch on a GPU. What it cannot show:
that TensorRT builds these networks, and that their numbers are right (tests/tensorrt_plans/test_trt.py, where a builder
is).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from seko_export.backends.onnx_form.translate import piece_model
from seko_export.backends.tensorrt_plans import registration
from seko_export.backends.tensorrt_plans.builder import build_plan, make_logger
from seko_export.backends.tensorrt_plans.form import plan_form
from seko_export.config.build import BuildConfig
from seko_export.errors import PlanError, PlanFormError, TensorRtMissingError
from seko_export.families.layers.pieces import make_pieces
from seko_export.host.tensorrt_library import require_tensorrt
from seko_kernels.plugins import compile_plugin
from tests.onnx import forms
from tests.tensorrt_plans import double
from tests.tensorrt_plans.double import doubled, has_plugin_package
from tests.tensorrt_plans.strict import StrictError

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
    pytest.mark.skipif(
        not has_plugin_package(), reason="needs the wheel tensorrt-cu13-bindings: its plugins"
    ),
]
ARCH = 90


def gpu_config(scheme: str = "fp4") -> BuildConfig:
    """The small build of the ONNX tests, as it would be for a GPU."""
    return replace(forms.config_of("fp32", 1), device="cuda", kv_scheme=scheme)


@pytest.fixture(scope="module")
def models() -> dict[str, ModelProto]:
    """The ONNX form of the pieces that plugins are in."""
    pieces = make_pieces(gpu_config())
    return {name: piece_model(pieces[name]) for name in ("block", "noise", "advance", "embed")}


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(registration, "_registered", {})
    with doubled() as module:
        yield module


def test_the_block_becomes_a_plan_whose_plugins_write_the_caches_in_place(
    trt: Any, models: dict[str, ModelProto]
) -> None:
    told: list[tuple[str, int, int]] = []
    plan = build_plan(plan_form(models["block"]), ARCH, b"", lambda *step: told.append(step))
    content = json.loads(plan.content)
    assert content["aliases"] == {
        f"next.caches.{cache}": f"caches.{cache}" for cache in ("k_codes", "k_scales", "v_codes", "v_scales")
    }
    assert content["inputs"] == [value.name for value in models["block"].graph.input]
    assert content["outputs"] == [value.name for value in models["block"].graph.output]
    assert content["flags"] == ["EXCLUDE_LEAN_RUNTIME", "VERSION_COMPATIBLE"]  # and TF32 is off
    assert trt.log.networks[0]._aot
    assert plan.timing_cache == b"timed"
    assert told[0] == ("building the plan of block: Building Engine", 0, 2)
    assert told[-1] == ("building the plan of block: Building Engine", 2, 2)
    assert len(told) == 4  # the inner phase is not told


@pytest.mark.parametrize("name", ["block", "noise", "advance"])
def test_tensorrt_is_handed_the_launches_that_the_kernel_tests_make(
    trt: Any, models: dict[str, ModelProto], name: str
) -> None:
    form = plan_form(models[name])
    build_plan(form, ARCH, b"", lambda *_: None)
    assert [launch["op"] for launch in trt.log.launches] == [*form.plugins]
    for launch in trt.log.launches:
        plugin = form.plugins[launch["op"]]
        sizes = dict(zip(plugin.inputs, launch["inputs"].values(), strict=True))
        wanted = plugin.launch(sizes, lambda a, b: -(-a // b))
        kernel = compile_plugin(plugin, sizes, "bfloat16", ARCH)
        assert (launch["grid_x"], launch["grid_y"], launch["grid_z"]) == (*wanted.grid, 1)
        assert (launch["block_x"], launch["block_y"], launch["block_z"]) == (kernel.threads, 1, 1)
        assert launch["shared"] == kernel.shared_bytes
        assert tuple(launch["scalars"]) == wanted.scalars
        assert launch["kernel"] == kernel.name
        assert launch["ptx"] == kernel.ptx.encode()


def test_a_form_keeps_attention_for_tensorrt_and_hands_bytes_over_as_int8(
    models: dict[str, ModelProto],
) -> None:
    form = plan_form(models["block"])
    assert {function.name for function in form.model.functions} == {"attention", "full_attention"}
    dtypes = {value.name: value.type.tensor_type.elem_type for value in form.model.graph.input}
    assert {dtypes[f"caches.{name}"] for name in ("k_codes", "k_scales", "v_codes", "v_scales")} == {
        TensorProto.INT8
    }
    assert plan_form(models["embed"]).narrowed > 0
    source = {value.name: value.type.tensor_type.elem_type for value in models["block"].graph.input}
    assert source["caches.k_codes"] == TensorProto.UINT8  # the form that was given is as it was


def test_an_exact_cache_is_refused_before_tensorrt_is_asked() -> None:
    cache = helper.make_tensor_value_info("caches.k", TensorProto.BFLOAT16, [4, 2])
    index = helper.make_tensor_value_info("index", TensorProto.INT64, [1, 1])
    row = helper.make_tensor_value_info("row", TensorProto.BFLOAT16, [1, 2])
    result = helper.make_tensor_value_info("next.caches.k", TensorProto.BFLOAT16, [4, 2])
    node = helper.make_node("ScatterND", ["caches.k", "index", "row"], ["next.caches.k"])
    model = helper.make_model(helper.make_graph([node], "block", [cache, index, row], [result]))
    with pytest.raises(PlanFormError, match=r"'block' writes caches\.k .*--fp4-kv"):
        plan_form(model)


@pytest.mark.usefixtures("trt")
def test_what_the_parser_cannot_read_is_told_in_its_words(models: dict[str, ModelProto]) -> None:
    model = ModelProto()
    model.CopyFrom(models["advance"])
    model.graph.node.append(helper.make_node("BitwiseXor", ["seeds", "seeds"], ["lost"], name="here"))
    with pytest.raises(
        PlanError, match="cannot read engine 'advance': BitwiseXor here: no importer and no plugin"
    ):
        build_plan(plan_form(model), ARCH, b"", lambda *_: None)


@pytest.mark.usefixtures("trt")
def test_another_signature_than_the_forms_is_refused(
    models: dict[str, ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(double.PARSED, TensorProto.INT64, "INT32")
    with pytest.raises(PlanError, match=r"takes \('frames', \(1, 2\), 'INT32'\), the form says .*'INT64'"):
        build_plan(plan_form(models["embed"]), ARCH, b"", lambda *_: None)


@pytest.mark.usefixtures("trt")
def test_a_timing_cache_of_another_gpu_is_told_and_left(models: dict[str, ModelProto]) -> None:
    told: list[str] = []
    build_plan(plan_form(models["noise"]), ARCH, b"another GPU's", lambda step, *_: told.append(step))
    assert "the timing cache is another GPU's; building noise without it" in told


def test_a_build_that_fails_says_what_tensorrt_said(
    trt: Any, models: dict[str, ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trt.IBuilderConfig._behaviour, "set_preview_feature", lambda *_: None)
    with pytest.raises(PlanError, match="did not build engine 'block': aliased plugin I/O is not enabled"):
        build_plan(plan_form(models["block"]), ARCH, b"", lambda *_: None)


@pytest.mark.usefixtures("trt")
def test_plugins_of_another_latent_shape_need_another_process(models: dict[str, ModelProto]) -> None:
    build_plan(plan_form(models["noise"]), ARCH, b"", lambda *_: None)
    build_plan(plan_form(models["advance"]), ARCH, b"", lambda *_: None)  # the same plugin again
    config = gpu_config()
    other = replace(config, stream=replace(config.stream, height=64))
    with pytest.raises(PlanError, match="seko::gaussian is registered in this process"):
        build_plan(plan_form(piece_model(make_pieces(other)["noise"])), ARCH, b"", lambda *_: None)


def test_without_a_builder_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(TensorRtMissingError, match="pip install tensorrt-cu13"):
        require_tensorrt()


def test_an_old_tensorrt_is_refused(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert require_tensorrt() == trt.__version__
    monkeypatch.setattr(trt, "__version__", "10.16.1.11")
    with pytest.raises(TensorRtMissingError, match=r"10\.16\.1\.11 is too old"):
        require_tensorrt()


def test_the_double_refuses_what_the_stubs_do_not_have(trt: Any) -> None:
    builder = trt.Builder(make_logger())
    network = builder.create_network(0)
    config = builder.create_builder_config()
    for wrong in (
        lambda: builder.build_cuda_engine(network),
        lambda: builder.create_network("flags"),
        lambda: builder.build_serialized_network(network),
        lambda: builder.build_serialized_network(config, network),
        lambda: config.set_flag(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03),
        lambda: config.set_timing_cache(config.create_timing_cache(b"")),
        lambda: setattr(config, "max_workspace_size", 1),
        lambda: setattr(config, "progress_monitor", object()),
        lambda: trt.INetworkDefinition(),
        lambda: trt.OnnxParser(network),
    ):
        with pytest.raises(StrictError):
            wrong()
    with pytest.raises(AttributeError):
        trt.BuilderFlag.FP16  # noqa: B018 - gone in 11
    with pytest.raises(StrictError, match="step_complete does not take"):
        type("Monitor", (trt.IProgressMonitor,), {"step_complete": lambda _, step: step})


def test_onnx_still_accepts_what_a_plan_is_parsed_from(models: dict[str, ModelProto]) -> None:
    for model in models.values():
        onnx.checker.check_model(plan_form(model).model)
