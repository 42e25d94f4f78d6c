"""Hopper's kernels in Gluon: what compiles for sm_90a, what torch's compiler is told, a triton without Gluon."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from seko_kernels.outlines import gluon_twin, kernel_of
from seko_kernels.triton.attention_fp8 import attention_combine_kernel
from tests.kernels.outlined import CONVOLUTION, EIGHT_BITS, SIXTEEN_BITS, SPARSE, Shown
from tests.support.hopper import on_hopper

HOPPER_SHARED = 227 * 1024  # bytes of a multiprocessor
FEW_CONVERSIONS = 32  # a tile has 64 scores a thread; there are divisions by run-time numbers, too
PRODUCTS = {"HGMMA", "IGMMA", "QGMMA"}


each_kernel = pytest.mark.parametrize(
    "shown",
    [EIGHT_BITS, SPARSE, SIXTEEN_BITS, CONVOLUTION],
    ids=["8 bits", "sparse", "16 bits", "convolution"],
)


def compiled(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A source as an sm_90 binary, afresh."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


# As given, and with ones that torch's compiler makes constants of: the attention in 8 bits over all keys and over
# chosen ones, and that in 16 bits, which is compiled as given below.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shown", "ones"),
    [
        pytest.param(EIGHT_BITS, False, id="8 bits"),
        pytest.param(SPARSE, True, id="sparse, ones are constants"),
        pytest.param(SIXTEEN_BITS, True, id="16 bits, ones are constants"),
        pytest.param(CONVOLUTION, False, id="convolution"),
    ],
)
def test_the_twin_compiles_for_hopper(
    shown: Shown,
    ones: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sass_of: Callable[[Any], list[str]],
    loops_of: Callable[[Any], list[list[str]]],
) -> None:
    assert shown.module.WARPS == 4
    kernel = compiled(
        gluon_twin(shown.source(**dict.fromkeys(shown.ones, 1) if ones else {})), tmp_path, monkeypatch
    )
    assert ".target sm_90a" in kernel.asm["ptx"]
    assert kernel.metadata.num_warps == shown.warps
    # what a launch must have is what the metadata says
    assert f".reqntid {shown.warps * 32}" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= HOPPER_SHARED
    assert kernel.metadata.global_scratch_size == shown.descriptors * 128  # bytes of global memory a program
    opcodes, multiplying = sass_of(kernel), shown.warps // 4 - 1
    assert {*shown.opcodes, "UTMALDG", "USETMAXREG"} <= set(opcodes)
    assert opcodes.count("I2FP") < FEW_CONVERSIONS  # scores are floats as they lie
    assert opcodes.count("STL") + opcodes.count("LDL") <= shown.most_spilt
    loops = [loop for loop in loops_of(kernel) if PRODUCTS & set(loop)]
    assert len(loops) >= multiplying  # one a warpgroup and kind of tile
    assert not any({"STL", "LDL"} & set(loop) for loop in loops)


def test_the_16_bit_softmax_runs_beside_the_product_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sass_of: Callable[[Any], list[str]]
) -> None:
    """Between the waits for the scores and for that product stand a tile's exponentials: the assembler likes to have
    both waits first."""
    opcodes = sass_of(compiled(gluon_twin(SIXTEEN_BITS.source()), tmp_path, monkeypatch))
    marks = {"WARPGROUP": "w", "HGMMA": "h", "MUFU": "m"}  # the first: a fence before products, and the waits
    order = "".join(marks.get(opcode, "") for opcode in opcodes)
    assert re.search("wh{8}wh{8}wm{64,}w", order)


@each_kernel
def test_the_outline_has_the_kernels_parameters(shown: Shown) -> None:
    kernel = kernel_of(shown.outline.__name__)
    assert kernel.arg_names == shown.outline.arg_names
    constexprs = [
        [place for place, param in enumerate(each.params) if param.is_constexpr]
        for each in (kernel, shown.outline)
    ]
    assert constexprs[0] == constexprs[1]
    assert [kernel.arg_names[place] for place in constexprs[0]] == list(shown.constants)
    fixed = [
        [param.name for param in each.params if param.do_not_specialize] for each in (kernel, shown.outline)
    ]
    assert fixed == [list(shown.module.RUNTIME_INTS)] * 2


@each_kernel
def test_torch_learns_from_the_outline_what_is_written(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table

    on_hopper(monkeypatch)
    dtypes = {"*bf16": torch.bfloat16, "*i8": torch.int8, "*fp32": torch.float32, "*i64": torch.int64}
    dtypes["*i32"] = torch.int32
    dtypes["*fp8e4nv"] = torch.float8_e4m3fn
    tensors = {name: torch.zeros(16, dtype=dtypes[kind]) for name, kind in shown.pointers.items()}
    ints = dict.fromkeys(shown.module.RUNTIME_INTS, 192)
    numbers = kernel_side_table.add_constant_args({**ints, **shown.constants})
    kernel = kernel_side_table.add_kernel(shown.outline)
    written = get_mutated_tensors(kernel, numbers, tensors, {})
    assert sorted(written) == sorted(shown.written)


@each_kernel
def test_only_outlines_have_a_twin(shown: Shown) -> None:
    source = shown.source()
    twin = gluon_twin(source)
    assert twin.fn is kernel_of(shown.outline.__name__)
    assert (twin.signature, twin.constants, twin.attrs) == (source.signature, source.constants, source.attrs)
    signature = dict.fromkeys(attention_combine_kernel.arg_names, "i32")
    assert gluon_twin(ASTSource(attention_combine_kernel, signature)) is None
    assert gluon_twin(twin) is None


def test_a_triton_without_gluon_is_named_when_the_kernel_is_asked_for() -> None:
    script = """
import importlib, sys
import seko_kernels
modules = ["seko_kernels." + name for name in ("hopper_attention", "hopper_attention_bf16", "hopper_conv")]
assert not {*modules} & {*sys.modules}
for name in [name for name in sys.modules if name.startswith("triton.experimental")]:
    del sys.modules[name]
sys.modules["triton.experimental"] = None  # importing from it fails
from seko_kernels.errors import KernelsError
from seko_kernels.outlines import Outline, gluon_twin
from triton.compiler import ASTSource
for module in modules:
    hopper = importlib.import_module(module)
    outline = next(value for value in vars(hopper).values() if isinstance(value, Outline))
    source = ASTSource(outline, dict.fromkeys(outline.arg_names, "i32"))
    try:
        gluon_twin(source)
    except KernelsError as reason:
        assert "has no Gluon" in str(reason), reason
    else:
        raise SystemExit(f"{module} was not refused")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
