"""attention_hopper: what compiles for sm_90a, what torch's compiler is told, a triton without Gluon. No GPU."""

from __future__ import annotations

import math
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

from seko_kernels import hopper_attention as hopper
from seko_kernels.triton.attention_fp8 import attention_combine_kernel

POINTERS = {
    "Q": "*bf16",
    "K": "*i8",
    "K_SCALE": "*fp32",
    "V_T": "*fp8e4nv",
    "K_OWN": "*bf16",
    "V_OWN": "*bf16",
    "V_SCALE": "*fp32",
    "VALID_TOKENS": "*i64",
    "OUT": "*bf16",
    "PART_OUT": "*bf16",
    "PART_LSE": "*fp32",
}
CONSTANTS = {
    "HEADS": 12,
    "SOFTMAX_SCALE": 128**-0.5 * math.log2(math.e),
    "OWN_N": hopper.OWN_KEYS,
    "STAGES": hopper.STAGES,
}
ONES = {"splits": 1, "tiles": 1}  # torch's compiler makes constants of ints that are 1
ALL_WARPS = 16  # three warpgroups and the one that fetches
HOPPER_SHARED = 227 * 1024  # bytes of a multiprocessor
DESCRIPTORS = 5 * 128  # bytes of global memory a program
FEW_CONVERSIONS = 32  # a tile has 64 scores a thread; there are divisions by run-time numbers, too
MOST_SPILT = 10  # instructions, all before and behind the loops


def outline(**ones: int) -> ASTSource:
    """The outline as torch's compiler would have it compiled."""
    constants = {**CONSTANTS, **ones}
    names = hopper.attention_hopper_outline.arg_names
    signature = {name: POINTERS.get(name, "constexpr" if name in constants else "i32") for name in names}
    divisible = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if name in POINTERS}
    return ASTSource(hopper.attention_hopper_outline, signature, constants, divisible)


def compiled(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A source as an sm_90 binary, afresh."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": hopper.WARPS})


@pytest.mark.parametrize("ones", [{}, ONES], ids=["as given", "ones are constants"])
def test_the_twin_compiles_for_hopper(
    ones: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sass_of: Callable[[Any], list[str]],
) -> None:
    made = compiled(hopper.gluon_twin(outline(**ones)), tmp_path, monkeypatch)
    assert ".target sm_90a" in made.asm["ptx"]
    assert made.metadata.num_warps == ALL_WARPS
    assert (
        f".reqntid {ALL_WARPS * 32}" in made.asm["ptx"]
    )  # what a launch must have is what the metadata says
    assert made.metadata.shared <= HOPPER_SHARED
    assert made.metadata.global_scratch_size == DESCRIPTORS
    opcodes = sass_of(made)
    assert {"HGMMA", "IGMMA", "QGMMA", "UTMALDG", "USETMAXREG"} <= set(opcodes)
    assert opcodes.count("I2FP") < FEW_CONVERSIONS  # scores are floats as they lie
    assert opcodes.count("STL") + opcodes.count("LDL") <= MOST_SPILT


def test_the_outline_has_the_kernels_parameters() -> None:
    kernel, shown = hopper.kernel(), hopper.attention_hopper_outline
    assert kernel.arg_names == shown.arg_names
    constexprs = [
        [place for place, one in enumerate(each.params) if one.is_constexpr] for each in (kernel, shown)
    ]
    assert constexprs[0] == constexprs[1]
    assert [kernel.arg_names[place] for place in constexprs[0]] == list(CONSTANTS)
    fixed = [[one.name for one in each.params if one.do_not_specialize] for each in (kernel, shown)]
    assert fixed == [list(hopper.RUNTIME_INTS)] * 2


class Hopper:
    """As much of a GPU's driver as reading a kernel needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def test_torch_learns_from_the_outline_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table

    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    dtypes = {"*bf16": torch.bfloat16, "*i8": torch.int8, "*fp32": torch.float32, "*i64": torch.int64}
    dtypes["*fp8e4nv"] = torch.float8_e4m3fn
    tensors = {name: torch.zeros(16, dtype=dtypes[kind]) for name, kind in POINTERS.items()}
    numbers = kernel_side_table.add_constant_args({**dict.fromkeys(hopper.RUNTIME_INTS, 192), **CONSTANTS})
    kernel = kernel_side_table.add_kernel(hopper.attention_hopper_outline)
    written = get_mutated_tensors(kernel, numbers, tensors, {})
    assert sorted(written) == ["OUT", "PART_LSE", "PART_OUT"]


def test_only_the_outline_has_a_twin() -> None:
    source = outline()
    twin = hopper.gluon_twin(source)
    assert twin.fn is hopper.kernel()
    assert (twin.signature, twin.constants, twin.attrs) == (source.signature, source.constants, source.attrs)
    signature = dict.fromkeys(attention_combine_kernel.arg_names, "i32")
    assert hopper.gluon_twin(ASTSource(attention_combine_kernel, signature)) is None
    assert hopper.gluon_twin(twin) is None


def test_a_triton_without_gluon_is_named_when_the_kernel_is_asked_for() -> None:
    script = """
import sys
import seko_kernels
assert "seko_kernels.hopper_attention" not in sys.modules
for name in [name for name in sys.modules if name.startswith("triton.experimental")]:
    del sys.modules[name]
sys.modules["triton.experimental"] = None  # importing from it fails
from seko_kernels import hopper_attention as hopper
from seko_kernels.errors import ArchError
from triton.compiler import ASTSource
source = ASTSource(hopper.attention_hopper_outline, dict.fromkeys(hopper.attention_hopper_outline.arg_names, "i32"))
try:
    hopper.gluon_twin(source)
except ArchError as reason:
    assert "has no Gluon" in str(reason), reason
else:
    raise SystemExit("it was not refused")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
