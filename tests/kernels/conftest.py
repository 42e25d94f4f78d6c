"""What the kernel tests share: cross-compilation and launches without a GPU, AOTInductor packages. No assertions."""

from __future__ import annotations

import re
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._higher_order_ops.triton_kernel_wrap as wrapped
import torch._inductor.config
import triton
from torch import Tensor
from torch._inductor import cpu_vec_isa
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from seko_export.lowering.patches import descriptor_scratch, outlined_kernels
from seko_export.lowering.patches.patch import applied
from tests.support.hopper import on_hopper

HOPPER, OTHERS = (90,), (80, 89, 100, 120)
WARP_THREADS = 32

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, list[str]]]]:
    """Name of each kernel that an op launches on fake tensors of a Hopper GPU, and what the kernel writes."""
    on_hopper(monkeypatch)
    calls: list[tuple[str, list[str]]] = []
    call = wrapped.TritonKernelWrapperMutation.__call__

    def noted(self: Any, **call_arguments: Any) -> Any:
        kernel = wrapped.kernel_side_table.get_kernel(call_arguments["kernel_idx"])
        names = ("kernel_idx", "constant_args_idx", "kwargs", "tma_descriptor_metadata")
        written = wrapped.get_mutated_tensors(*(call_arguments[name] for name in names))
        calls.append((kernel.fn.__name__, sorted(written)))
        return call(self, **call_arguments)

    monkeypatch.setattr(wrapped.TritonKernelWrapperMutation, "__call__", noted)
    with FakeTensorMode():
        yield calls


@pytest.fixture
def cross_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return ``compile(kernel, signature, constants, arch, warps)`` that builds for an arch without a GPU.

    Pointers and the ints named in ``aligned`` are declared divisible by 16, as at a real launch.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

    def build(
        kernel: Any,
        signature: dict[str, str],
        constants: dict[str, int],
        arch: int,
        warps: int,
        aligned: tuple[str, ...] = (),
    ) -> Any:
        types = {**signature, **dict.fromkeys(constants, "constexpr")}
        divisible = {
            (place,): [["tt.divisibility", 16]]
            for place, (name, kind) in enumerate(types.items())
            if kind.startswith("*") or name in aligned
        }
        kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
        source = kind(fn=kernel, signature=types, constexprs=constants, attrs=divisible)
        return triton.compile(
            source, target=GPUTarget("cuda", arch, WARP_THREADS), options={"num_warps": warps}
        )

    return build


@pytest.fixture
def disassembled(tmp_path: Path) -> Callable[[Any], str]:
    """Return ``text(compiled)``: a compiled kernel's instructions and labels, by the disassembler in Triton's wheel."""

    def disassemble(compiled: Any) -> str:
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
        return subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout

    return disassemble


@pytest.fixture
def sass_of(disassembled: Callable[[Any], str]) -> Callable[[Any], list[str]]:
    """Return ``sass(compiled)``: the opcodes of a compiled kernel."""
    return lambda compiled: INSTRUCTION.findall(disassembled(compiled))


@pytest.fixture
def loops_of(disassembled: Callable[[Any], str]) -> Callable[[Any], list[list[str]]]:
    """Return ``loops(compiled)``: the opcodes of each of its loops that has no other in it."""

    def innermost(compiled: Any) -> list[list[str]]:
        opcodes: list[str] = []
        labels: dict[str, int] = {}
        loops: list[tuple[int, int]] = []
        for line in disassembled(compiled).splitlines():
            if label := re.match(r"(\.L\w+):", line.strip()):
                labels[label[1]] = len(opcodes)
            elif opcode := INSTRUCTION.match(line):
                opcodes.append(opcode[1])
                back = re.search(r"\bBRA\b.*\((\.L\w+)\)", line)
                if back and back[1] in labels:
                    loops.append((labels[back[1]], len(opcodes)))
        return [
            opcodes[first:end]
            for first, end in loops
            if not any(first <= a and b <= end and (a, b) != (first, end) for a, b in loops)
        ]

    return innermost


@pytest.fixture
def package_runner(tmp_path: Path) -> Callable[..., Callable[[list[Tensor]], list[Tensor]]]:
    """Return ``build(module, args)``: export, compile and open by the raw loader; gives the engine as a callable."""

    def build(module: torch.nn.Module, args: tuple[Tensor, ...]) -> Callable[[list[Tensor]], list[Tensor]]:
        path = tmp_path / "engine.pt2"
        with warnings.catch_warnings():
            # torch's own deprecations, raised by imports inside its exporter; ours are still errors elsewhere.
            warnings.simplefilter("ignore")
            program = torch.export.export(module, args)
            with applied(descriptor_scratch.PATCH, outlined_kernels.PATCH):
                torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
        return loader.boxed_run  # type: ignore[no-any-return]

    return build


@pytest.fixture
def vector_code() -> Iterator[None]:
    """Have packages for a CPU use its vector instructions, as a user's do, whatever scripts/test.sh says."""
    forget_instruction_sets()
    with torch._inductor.config.patch({"cpp.vec_isa_ok": None}):
        yield
    forget_instruction_sets()


def forget_instruction_sets() -> None:
    """Have torch ask anew which instruction sets it may use: it keeps the answer, whatever the setting says later."""
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    for instruction_set in cpu_vec_isa.supported_vec_isa_list:
        for kind in type(instruction_set).__mro__:
            if cached := getattr(vars(kind).get("__bool__"), "cache_clear", None):
                cached()


@pytest.fixture(params=[HOPPER, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["hopper", "others"])
def compile_archs(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """Compute capabilities that a kernel must compile for: that whose instructions are looked at, then the others."""
    return request.param  # type: ignore[no-any-return]
