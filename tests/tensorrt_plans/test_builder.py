"""Our calls of the data-centre builder against a strict double, generated from the stubs of its bindings.

It shows that every call we make exists and takes what we give it. That a network is read and built is shown by the
builder for RTX (tests/tensorrt_plans/test_rtx.py); that this one does the same, by tests/tensorrt_plans/test_trt.py
where it is.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

from seko_export.backends.tensorrt_plans.builder import Plan, PlanBuilder, make_logger
from seko_export.backends.tensorrt_plans.form import plan_form
from seko_export.backends.tensorrt_plans.kernels import with_kernels
from seko_export.errors import PlanError, PlanFormError, TensorRtMissingError
from seko_export.host.progress import Progress, silent
from seko_export.host.tensorrt_library import DATA_CENTRE, RTX, TensorRt
from seko_kernels.plugin_ptx import compile_plugin
from tests.tensorrt_plans import double
from tests.tensorrt_plans.double import doubled
from tests.tensorrt_plans.plan_forms import form_of, gpu_config
from tests.tensorrt_plans.strict import StrictError

pytestmark = pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning")
ARCH = 90


@pytest.fixture(scope="module")
def models() -> dict[str, ModelProto]:
    """The forms of the pieces that plugins are in, and of one without."""
    return {name: form_of(gpu_config(), name) for name in ("block", "noise", "advance", "embed")}


@pytest.fixture
def trt() -> Iterator[Any]:
    with doubled() as module:
        yield module


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file in the place of the plugin library."""
    path = tmp_path / "plugins.so"
    path.write_bytes(b"")
    return path


def build_plan(model: ModelProto, library: Path, timings: bytes = b"", progress: Progress = silent) -> Plan:
    form = plan_form(model)
    made = with_kernels(form, (ARCH,))
    return PlanBuilder(DATA_CENTRE, library).build(made.model, form.aliases, (ARCH,), timings, progress)


def test_the_block_becomes_a_plan_whose_plugins_write_the_caches_in_place(
    trt: Any, models: dict[str, ModelProto], library: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    plan = build_plan(models["block"], library, progress=lambda *step: told.append(step))
    content = json.loads(plan.content)
    assert plan_form(models["block"]).aliases == {
        f"next.caches.{cache}": f"caches.{cache}" for cache in ("k_codes", "k_scales", "v_codes", "v_scales")
    }
    assert content["inputs"] == [value.name for value in models["block"].graph.input]
    assert content["outputs"] == [value.name for value in models["block"].graph.output]
    assert content["flags"] == ["EXCLUDE_LEAN_RUNTIME", "VERSION_COMPATIBLE"]  # and TF32 is off
    assert trt.log.networks[0]._typed
    assert plan.timing_cache == b"timed"
    assert told[0] == ("building the plan of block: Building Engine", 0, 2)
    assert told[-1] == ("building the plan of block: Building Engine", 2, 2)
    assert len(told) == 4  # the inner phase is not told


@pytest.mark.parametrize("name", ["block", "noise", "advance"])
def test_a_plugin_carries_the_launches_that_the_kernel_tests_make(
    models: dict[str, ModelProto], name: str
) -> None:
    form = plan_form(models[name])
    made = with_kernels(form, (89, 120))
    shapes = {
        value.name: tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in (*made.model.graph.input, *made.model.graph.value_info, *made.model.graph.output)
    }
    nodes = [node for node in made.model.graph.node if node.op_type == "PtxKernel"]
    assert {node.name for node in nodes} == {*form.plugins}
    for node in nodes:
        plugin = form.plugins[node.name]
        fields = {one.name: helper.get_attribute_value(one) for one in node.attribute}
        sizes = dict(zip(plugin.inputs, (shapes[one] for one in node.input), strict=True))
        wanted = plugin.launch(sizes, lambda a, b: -(-a // b))
        kernels = [compile_plugin(plugin, sizes, "bfloat16", arch) for arch in (89, 120)]
        assert fields["launch"] == [*wanted.grid, kernels[0].threads]
        assert fields["scalars"] == [len(wanted.scalars), *wanted.scalars]
        assert fields["shared"] == [kernel.shared_bytes for kernel in kernels]
        assert fields["scratch"] == [kernel.scratch_bytes for kernel in kernels]
        assert fields["archs"] == [89, 120]
        assert fields["entry"].decode() == kernels[0].name
        assert fields["ptx"].decode().split("\f") == [kernel.ptx for kernel in kernels]
        assert fields["inputs"] == [len(node.input)]
        assert [text for file, text in made.ptx.items() if f".{node.name}." in file] == [
            kernel.ptx for kernel in kernels
        ]


def test_a_form_leaves_attention_to_tensorrt_and_hands_bytes_over_as_int8(
    models: dict[str, ModelProto],
) -> None:
    form = plan_form(models["block"])
    assert not form.model.functions
    attention = [node for node in form.model.graph.node if node.op_type == "Attention"]
    assert [len(node.input) for node in attention] == [
        4,
        3,
    ]  # over the cache with a bias, over the text without
    dtypes = {value.name: value.type.tensor_type.elem_type for value in form.model.graph.input}
    assert {dtypes[f"caches.{name}"] for name in ("k_codes", "k_scales", "v_codes", "v_scales")} == {
        TensorProto.INT8
    }
    assert plan_form(models["embed"]).narrowed > 0
    source = {value.name: value.type.tensor_type.elem_type for value in models["block"].graph.input}
    assert source["caches.k_codes"] == TensorProto.UINT8  # the form that was given is as it was


def test_a_cache_that_nothing_writes_in_place_is_refused_before_tensorrt_is_asked() -> None:
    cache = helper.make_tensor_value_info("caches.k", TensorProto.BFLOAT16, [4, 2])
    result = helper.make_tensor_value_info("next.caches.k", TensorProto.BFLOAT16, [4, 2])
    node = helper.make_node("Neg", ["caches.k"], ["next.caches.k"])
    model = helper.make_model(helper.make_graph([node], "block", [cache], [result]))
    with pytest.raises(PlanFormError, match=r"'block' writes caches\.k .*--fp4-kv"):
        plan_form(model, kv_caches=("caches.k",))
    assert plan_form(model).aliases == {}  # of a small one, a VAE's for example, a copy will do


@pytest.mark.usefixtures("trt")
def test_what_the_parser_cannot_read_is_told_in_its_words(
    models: dict[str, ModelProto], library: Path
) -> None:
    model = ModelProto()
    model.CopyFrom(models["advance"])
    model.graph.node.append(helper.make_node("BitwiseXor", ["seeds", "seeds"], ["lost"], name="here"))
    with pytest.raises(
        PlanError, match="cannot read engine 'advance': BitwiseXor here: no importer and no plugin"
    ):
        build_plan(model, library)


@pytest.mark.usefixtures("trt")
def test_another_signature_than_the_forms_is_refused(
    models: dict[str, ModelProto], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(double.PARSED, TensorProto.INT64, "INT32")
    with pytest.raises(PlanError, match=r"takes \('frames', \(1, 2\), 'INT32'\), the form says .*'INT64'"):
        build_plan(models["embed"], library)


def test_a_timing_cache_of_another_gpu_is_left(
    trt: Any, models: dict[str, ModelProto], library: Path
) -> None:
    build_plan(models["noise"], library, b"another GPU's")
    assert trt.log.configs[-1]._cache._bytes == b""


def test_a_build_that_fails_says_what_tensorrt_said(
    trt: Any, models: dict[str, ModelProto], library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(trt.IBuilderConfig._behaviour, "set_preview_feature", lambda *_: None)
    with pytest.raises(PlanError, match="did not build engine 'block': aliased plugin I/O is not enabled"):
        build_plan(models["block"], library)


@pytest.mark.usefixtures("trt")
def test_a_plugin_library_that_tensorrt_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="does not load the plugin library"):
        PlanBuilder(DATA_CENTRE, tmp_path / "none.so")


@pytest.mark.parametrize("library", [DATA_CENTRE, RTX], ids=lambda one: one.backend)
def test_without_a_builder_the_error_says_what_to_install(
    library: TensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library.module, None)
    with pytest.raises(TensorRtMissingError, match=re.escape(f"pip install {library.install}")):
        library.load()


def test_an_old_tensorrt_is_refused(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert DATA_CENTRE.load().__version__ == trt.__version__
    monkeypatch.setattr(trt, "__version__", "10.16.1.11")
    with pytest.raises(TensorRtMissingError, match=r"10\.16\.1\.11 is too old"):
        DATA_CENTRE.load()


def test_the_double_refuses_what_the_stubs_do_not_have(trt: Any) -> None:
    builder = trt.Builder(make_logger(trt))
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
