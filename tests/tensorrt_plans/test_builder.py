"""Plans by the real builder for RTX, in the place of the data-centre one too, whose API it has.

So both ways to configure a builder are called here. That the data-centre builder does the same is shown by
tests/tensorrt_plans/test_trt.py where it is; mypy checks each call against the stubs of its bindings.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

from seko_export.backends.tensorrt_plans import builder
from seko_export.backends.tensorrt_plans.builder import Plan, PlanBuilder, configure
from seko_export.backends.tensorrt_plans.form import plan_form
from seko_export.backends.tensorrt_plans.kernels import with_kernels
from seko_export.errors import LoweringError, MachineError
from seko_export.host.progress import Progress, silent
from seko_export.host.tensorrt_library import DATA_CENTRE, RTX, TensorRt
from seko_kernels.plugin_ptx import compile_plugin
from tests.tensorrt_plans.plan_forms import form_of, gpu_config

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning"),
]
ARCH = 89
TIMING = replace(RTX, targets=())  # configured as the builder that times kernels on the GPU that is here


@pytest.fixture(scope="module")
def models() -> dict[str, ModelProto]:
    """The forms of the pieces that plugins are in, and of one without."""
    return {name: form_of(gpu_config(), name) for name in ("block", "noise", "advance", "embed")}


def build_plan(plans: PlanBuilder, model: ModelProto, progress: Progress = silent) -> Plan:
    form = plan_form(model)
    compiled = with_kernels(form, (ARCH,))
    return plans.build(compiled.model, form.aliases, (ARCH,), b"", progress)


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that plans are built with."""
    seen: list[Any] = []

    def configure_and_record(library: TensorRt, module: Any, config: Any, *rest: Any) -> Any:
        seen.append(config)
        return configure(library, module, config, *rest)

    monkeypatch.setattr(builder, "configure", configure_and_record)
    return seen


def test_a_block_becomes_a_plan_for_the_gpus_that_are_named(
    plans: PlanBuilder, models: dict[str, ModelProto], configs: list[Any]
) -> None:
    """`PlanBuilder` itself compares the network with the form, and what is written in place with its aliases."""
    progress: list[tuple[str, int, int]] = []
    plan = build_plan(plans, models["block"], lambda *step: progress.append(step))
    assert plan_form(models["block"]).aliases == {
        f"next.caches.{cache}": f"caches.{cache}" for cache in ("k_codes", "k_scales", "v_codes", "v_scales")
    }
    flags = RTX.load().BuilderFlag
    (config,) = configs
    assert len(plan.content) > 10_000
    assert not plan.timing_cache
    assert config.num_compute_capabilities == 1
    assert not config.get_flag(flags.TF32)
    assert {step.partition(":")[0] for step, _, _ in progress} == {"building the plan of block"}
    assert len({step for step, _, _ in progress}) == 1  # the outermost phase
    (*_, (_, done, steps)) = progress
    assert done == steps
    assert [done for _, done, _ in progress] == sorted(done for _, done, _ in progress)


def test_a_builder_that_times_kernels_is_told_so_and_gives_its_timings(
    plans: PlanBuilder, models: dict[str, ModelProto], configs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_library", TIMING)
    plan = build_plan(plans, models["noise"])
    flags = RTX.load().BuilderFlag
    (config,) = configs
    assert config.get_flag(flags.VERSION_COMPATIBLE)
    assert config.get_flag(flags.EXCLUDE_LEAN_RUNTIME)
    assert not config.get_flag(flags.TF32)
    assert plan.timing_cache


def test_a_timing_cache_of_another_gpu_is_left() -> None:
    """RTX's builder takes every cache; the rule is that of TensorRT's."""
    caches: list[bytes] = []
    config: Any = SimpleNamespace(
        set_flag=lambda _: None,
        create_timing_cache=lambda content: content,
        set_timing_cache=lambda cache, ignore: (
            caches.append(cache) or ignore or not cache.startswith(b"other")
        ),
    )
    flags = SimpleNamespace(VERSION_COMPATIBLE=0, EXCLUDE_LEAN_RUNTIME=1)
    module = SimpleNamespace(BuilderFlag=flags)
    assert configure(DATA_CENTRE, module, config, (90,), b"other GPU's") == b""
    assert configure(DATA_CENTRE, module, config, (90,), b"this GPU's") == b"this GPU's"
    assert caches == [b"other GPU's", b"", b"this GPU's"]


@pytest.mark.parametrize("name", ["block", "noise", "advance"])
def test_a_plugin_carries_the_launches_that_the_kernel_tests_make(
    models: dict[str, ModelProto], name: str
) -> None:
    form = plan_form(models[name])
    form_with_kernels = with_kernels(form, (89, 120))
    shapes = {
        value.name: tuple(axis.dim_value for axis in value.type.tensor_type.shape.dim)
        for value in (
            *form_with_kernels.model.graph.input,
            *form_with_kernels.model.graph.value_info,
            *form_with_kernels.model.graph.output,
        )
    }
    nodes = [node for node in form_with_kernels.model.graph.node if node.op_type == "PtxKernel"]
    assert {node.name for node in nodes} == {*form.plugins}
    for node in nodes:
        plugin = form.plugins[node.name]
        fields = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        sizes = dict(zip(plugin.inputs, (shapes[tensor] for tensor in node.input), strict=True))
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
        assert [text for file, text in form_with_kernels.ptx.items() if f".{node.name}." in file] == [
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
    with pytest.raises(LoweringError, match=r"'block' writes caches\.k .*--fp4-kv"):
        plan_form(model, kv_caches=("caches.k",))
    assert plan_form(model).aliases == {}  # of a small one, a VAE's for example, a copy will do


def test_what_the_parser_cannot_read_is_told_in_its_words(
    plans: PlanBuilder, models: dict[str, ModelProto]
) -> None:
    model = ModelProto()
    model.CopyFrom(models["advance"])
    model.graph.node.append(helper.make_node("BitwiseXor", ["seeds", "seeds"], ["lost"], name="here"))
    with pytest.raises(LoweringError, match=r"cannot read engine 'advance': BitwiseXor here: .+"):
        build_plan(plans, model)


def test_another_signature_than_the_forms_is_refused(
    plans: PlanBuilder, models: dict[str, ModelProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(builder._DTYPES, TensorProto.INT64, "INT32")
    with pytest.raises(
        LoweringError, match=r"takes \('frames', \(1, 2\), 'INT64'\), the form says .*'INT32'"
    ):
        build_plan(plans, models["embed"])


def test_a_build_that_fails_says_what_tensorrt_said(
    plans: PlanBuilder, models: dict[str, ModelProto]
) -> None:
    form = plan_form(models["noise"])
    model = with_kernels(form, (ARCH,)).model
    (node,) = (node for node in model.graph.node if node.name == "gaussian")
    (dtypes,) = (field for field in node.attribute if field.name == "dtypes")
    dtypes.ints[0] = 0  # seeds as float32, which they are not
    with pytest.raises(LoweringError, match=r"did not build engine 'noise': (?!it gave no)"):
        plans.build(model, form.aliases, (ARCH,), b"", silent)


@pytest.mark.usefixtures("plans")
def test_a_plugin_library_that_tensorrt_does_not_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(builder, "PLUGIN_NAME", "Another")  # the process has ours
    with pytest.raises(LoweringError, match="does not load the plugin library"):
        PlanBuilder(RTX, Path("none.so"))


@pytest.mark.parametrize("library", [DATA_CENTRE, RTX], ids=lambda library: library.backend)
def test_without_a_builder_the_error_says_what_to_install(
    library: TensorRt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library.module, None)
    with pytest.raises(MachineError, match=re.escape(f"pip install {library.install}")):
        library.load()


def test_an_old_tensorrt_and_one_without_a_builder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(__version__="10.16.1.11")
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    with pytest.raises(MachineError, match=r"tensorrt 10\.16\.1\.11 has no builder"):
        DATA_CENTRE.load()
    module.Builder = module.OnnxParser = object
    with pytest.raises(MachineError, match=r"10\.16\.1\.11 is too old"):
        DATA_CENTRE.load()
    module.__version__ = "11.0.0.1"
    assert DATA_CENTRE.load() is module
