"""Layers whose attention to an FP4 cache is a plugin: their form computes what the layer does, and what is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor

from seko_export import BuildOptions
from seko_export.backends import export_backend
from seko_export.backends.onnx_form import kept_ops
from seko_export.backends.onnx_form.functional import FunctionalModule
from seko_export.backends.tensorrt_plans.form import plan_form
from seko_export.engines.piece import Argument
from seko_export.errors import LoweringError, UsageError
from seko_export.families.registry import graph_of
from seko_export.options.resolve import resolve_build
from seko_kernels import fused_reference
from tests.tensorrt_plans.plan_forms import PAST_IN_8_BITS, form_of

pytestmark = pytest.mark.filterwarnings(r"ignore:.*isinstance\(treespec, LeafSpec\):FutureWarning")
WRITTEN = [4, 2]  # the slots of the chunk
OP_BODIES = {
    "fp8_expand": kept_ops.fp8_expand,
    "attention_fp8": fused_reference.attention_fp8,
    "nvfp4_write": kept_ops.nvfp4_write,
    "nvfp4_write_keys": kept_ops.nvfp4_write,
}
# Dtypes that NumPy knows through ml_dtypes alone, with their bits as torch and NumPy both have them.
BITS = {
    torch.bfloat16: (ml_dtypes.bfloat16, torch.int16, np.int16),
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, torch.uint8, np.uint8),
}


def to_numpy(tensor: Tensor) -> Any:
    if tensor.dtype not in BITS:
        return tensor.numpy()
    theirs, bits, _ = BITS[tensor.dtype]
    return tensor.contiguous().view(bits).numpy().view(theirs)


def to_torch(array: Any) -> Tensor:
    for dtype, (theirs, _, bits) in BITS.items():
        if array.dtype == theirs:
            return torch.from_numpy(np.ascontiguousarray(array).view(bits)).view(dtype)
    return torch.from_numpy(np.ascontiguousarray(array))


def plugin_op(name: str) -> type[OpRun]:
    """What stands for a plugin where ONNX's own evaluator runs a form: the reference of its kernel."""

    def run(self: OpRun, *arrays: Any, **_: Any) -> tuple[Any, ...]:  # noqa: ARG001 - a method
        outputs = OP_BODIES[name](*(to_torch(array) for array in arrays))
        return tuple(to_numpy(output) for output in (outputs if isinstance(outputs, tuple) else (outputs,)))

    return type(name, (OpRun,), {"op_domain": kept_ops.DOMAIN, "_run": run})


def example(argument: Argument, frame_tokens: int, cache_tokens: int, generator: torch.Generator) -> Tensor:
    """A tensor such as a full cache's second chunk has."""
    name, shape = argument.name, argument.shape
    if name == "write_slots":
        return torch.tensor([WRITTEN])
    if name == "valid_tokens":
        return torch.tensor([cache_tokens])
    if name == "token_index":
        return torch.cat([torch.arange(frame_tokens) + slot * frame_tokens for slot in WRITTEN])
    if name.endswith("_codes"):
        return torch.randint(0, 256, shape, generator=generator).byte()
    if name.startswith("caches."):  # scales
        return torch.randint(0x20, 0x50, shape, generator=generator).byte()
    if name.startswith("scales.") and not name.endswith("_mean"):
        return 2.0 ** torch.randint(-6, -3, shape, generator=generator).float()
    return torch.randn(shape, generator=generator).mul(0.5).to(argument.dtype)


def test_the_form_with_plugins_gives_what_the_layer_gives() -> None:
    """Run by ONNX's evaluator with the kernels' references; bfloat16 rounds elsewhere there, so bounds are its own."""
    piece = graph_of(PAST_IN_8_BITS).pieces["block_context"]
    form = plan_form(form_of(PAST_IN_8_BITS, piece.name), kv_caches=piece.mutates)
    assert set(form.plugins) == {"fp8_expand", "attention_fp8", "nvfp4_write", "nvfp4_write_keys"}
    (expand,) = (node for node in form.model.graph.node if node.op_type == "fp8_expand")
    assert [name for name in expand.input if "caches." in name] == [
        f"next.caches.{name}" for name in ("k_codes", "k_scales", "v_codes", "v_scales")
    ]
    stream, generator = PAST_IN_8_BITS.workload.stream, torch.Generator().manual_seed(0)
    inputs = [example(a, stream.frame_tokens, stream.cache_tokens, generator) for a in piece.signature]
    with torch.no_grad():
        wanted = FunctionalModule(piece)(*(tensor.clone() for tensor in inputs))
    evaluator = ReferenceEvaluator(form.model, new_ops=[plugin_op(name) for name in OP_BODIES])
    feed = {a.name: to_numpy(tensor) for a, tensor in zip(piece.signature, inputs, strict=True)}
    outputs = [to_torch(array) for array in evaluator.run(None, feed)]
    written = torch.zeros(stream.cache_tokens, dtype=torch.bool)
    written[inputs[[a.name for a in piece.signature].index("token_index")]] = True
    for ours, theirs in zip(outputs, wanted, strict=True):
        if ours.dtype == torch.uint8:
            assert torch.equal(ours[~written], theirs[~written])
            assert (ours[written] == theirs[written]).float().mean() > 0.95
        else:
            assert (ours.double() - theirs.double()).norm() <= 0.01 * theirs.double().norm()


def test_a_write_of_what_was_computed_out_of_the_same_cache_is_refused() -> None:
    form = form_of(PAST_IN_8_BITS, "block_context")
    copy = type(form)()
    copy.CopyFrom(form)
    (write,) = (node for node in copy.graph.node if node.op_type == "nvfp4_write")
    (attend,) = (node for node in copy.graph.node if node.op_type == "attention_fp8")
    write.input[0] = attend.output[0]
    with pytest.raises(LoweringError, match="writes what it computed out of cached frames to the same cache"):
        plan_form(copy)


def options(**more: Any) -> BuildOptions:
    return BuildOptions(
        preset="self-forcing-1.3b",
        random_weights=0,
        backend="tensorrt-rtx",
        no_goldens=True,
        **{"target": "sm_89,sm_120", "fp4_kv": True, **more},
    )


def test_attention_in_8_bits_is_taken_where_it_is_asked_for_alone() -> None:
    asked = resolve_build(options(attention="fp8")).config
    assert (asked.target.fused, asked.target.attention, asked.target.resident_window) == (True, "fp8", False)
    plain = resolve_build(options()).config
    assert (plain.target.fused, plain.target.attention) == (False, "torch")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"target": "sm_86,sm_89"}, "--attention fp8: this GPU has no fp8 numbers"),
        ({"fp4_kv": False}, "it reads an FP4 cache"),
        ({"fp8": True}, "no fp8 matmuls yet: leave --fp8 out"),
        ({"resident_window": True}, "no resident windows yet: leave --resident-window out"),
    ],
)
def test_what_such_plans_cannot_be_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve_build(options(attention="fp8", **more))


def test_the_kernel_of_another_gpu_is_refused() -> None:
    config = PAST_IN_8_BITS.changed(kv_scheme="bf16", attention="bf16")
    with pytest.raises(UsageError, match="no attention bf16: give --attention torch or --attention fp8"):
        export_backend("tensorrt-rtx").check_build(config)
