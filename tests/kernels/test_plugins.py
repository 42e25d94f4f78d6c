"""The plugins' PTX: exactly TensorRT's arguments, assembled for every architecture; on a GPU the reference's bytes."""

from __future__ import annotations

import math
import re
import subprocess
from ctypes import c_int32
from pathlib import Path

import pytest
import torch
import triton
from torch import Tensor

from scripts.kernel_admission.attention_cases import expected as truth_and_rounded
from scripts.kernel_admission.judge import distance
from seko_kernels.errors import KernelsError
from seko_kernels.plugin_ptx import compile_plugin, without_hidden_parameters
from tests.support.kernel_driver import KernelDriver
from tests.support.tiers import first_is_fast

from .plugin_cases import PluginCase, cases

NAMES = [case.plugin.name for case in cases(torch.bfloat16)]
VERSIONS = {75: "8.4", 80: "8.4", 86: "8.4", 89: "8.4", 90: "8.6", 100: "8.7", 120: "8.7", 121: "8.8"}
EXACT = [name for name in NAMES if name != "attention_fp8"]  # those that give the reference's bytes
IN_8_BITS = ("fp8_expand", "attention_fp8")  # for GPUs with e4m3 numbers
TYPES = {"u64": 8, "u32": 4}


def case_of(name: str, compute: torch.dtype = torch.bfloat16) -> PluginCase:
    return next(case for case in cases(compute) if case.plugin.name == name)


@pytest.mark.parametrize("name", first_is_fast(NAMES, 2))
def test_the_entry_takes_what_tensorrt_hands_over_and_nothing_else(
    name: str, compile_archs: tuple[int, ...], tmp_path: Path
) -> None:
    case = case_of(name)
    scalars = case.plugin.launch(case.sizes, triton.cdiv).scalars
    wanted = ["u64"] * len(case.inputs) + ["u32"] * len(scalars) + ["u64"] * len(case.plugin.outputs)
    archs = (89, 90, 120, 121) if name in IN_8_BITS else VERSIONS  # RTX's, too
    for arch in (arch for arch in archs if (arch == 90) == (90 in compile_archs)):
        kernel = compile_plugin(case.plugin, case.sizes, "bfloat16", arch)
        head = re.search(rf"\.entry {kernel.name}\((.*?)\)", kernel.ptx, re.DOTALL)
        assert head is not None
        scratch = ["u64"] if kernel.scratch_bytes else []
        assert re.findall(r"\.param \.(\w+)", head[1]) == wanted + scratch
        assert bool(scratch) == (
            name == "attention_fp8" and arch >= 90
        )  # tensor descriptors, made on the GPU
        assert f".reqntid {kernel.threads}\n" in kernel.ptx
        assert f".target sm_{arch}" in kernel.ptx
        # a version that old drivers take
        assert re.findall(r"^\.version (\S+)$", kernel.ptx, re.MULTILINE) == [VERSIONS[arch]]
        # no path of this machine
        assert not re.search(r"^\s*\.(file|loc)\b", kernel.ptx, re.MULTILINE)
        assert str(Path(__file__).parents[2]) not in kernel.ptx
        assembled = tmp_path / "kernel.cubin"
        source = tmp_path / "kernel.ptx"
        source.write_text(kernel.ptx)
        assembler = "ptxas-blackwell" if arch >= 100 else "ptxas"
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / assembler
        target = re.findall(r"\.target (\w+)", kernel.ptx)[0]
        subprocess.run([tool, f"-arch={target}", source, "-o", assembled], check=True, capture_output=True)


def test_a_kernel_that_reads_tritons_own_parameters_is_refused() -> None:
    entry = ".visible .entry k(\n\t.param .u64 k_param_0,\n\t.param .u64 k_param_1,\n\t.param .u64 k_param_2\n)\n{%s}"
    assert "k_param_1" not in without_hidden_parameters(entry % "ld.param.b64 %rd1, [k_param_0];", "k", 1)
    with pytest.raises(KernelsError, match="reads Triton's own parameter k_param_2"):
        without_hidden_parameters(entry % "ld.param.b64 %rd1, [k_param_2];", "k", 1)
    with pytest.raises(KernelsError, match="3 parameters, expected 2 and 2"):
        without_hidden_parameters(entry % "", "k", 2)


@pytest.mark.parametrize("arch", first_is_fast([90, 120]))
def test_strides_of_tensor_maps_are_bytes(arch: int) -> None:
    case = case_of("attention_fp8")
    ptx = compile_plugin(case.plugin, case.sizes, "bfloat16", arch).ptx
    known = dict(re.findall(r"mov\.b64 \t(%rd\d+), (\d+);", ptx))
    strides = re.findall(r"global_stride\.\S+ \[ \S+ \+ 0 \], 0x0, (%rd\d+);", ptx)
    width = case.inputs["k"][0, 0].numel()  # of a token, all heads; its codes have a byte a number
    assert [int(known[stride]) for stride in strides if stride in known] == [
        2 * width,
        width,
        2 * width,
        2 * width,
        2 * width,
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_the_driver_launches_it_as_tensorrt_would_and_gets_the_references_bytes(
    name: str, compute: torch.dtype
) -> None:
    case = case_of(name, compute)
    inputs = {name: tensor.cuda() for name, tensor in case.inputs.items()}
    expected = case.expected(inputs)
    fill = 0 if name == "fp8_expand" else torch.nan  # it leaves what is behind the past as it was
    outputs = [
        inputs[plugin.alias]
        if plugin.alias
        else torch.full(tensor.shape, fill, device="cuda").to(tensor.dtype)
        for plugin, tensor in zip(case.plugin.outputs, expected, strict=True)
    ]
    launch_by_driver(case, compute, inputs, outputs)
    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.gpu
def test_attention_launched_as_tensorrt_would_is_as_near_as_the_same_roundings_in_torch() -> None:
    case = case_of("attention_fp8")
    inputs = {name: tensor.cuda() for name, tensor in case.inputs.items()}
    truth, rounded = truth_and_rounded(*inputs.values())
    y = torch.full(truth.shape, torch.nan, device="cuda", dtype=torch.bfloat16)
    launch_by_driver(case, torch.bfloat16, inputs, [y])
    assert distance(y, truth) <= 2 * distance(rounded, truth)


def launch_by_driver(
    case: PluginCase, compute: torch.dtype, inputs: dict[str, Tensor], outputs: list[Tensor]
) -> None:
    """Launch a plugin's kernel as the C++ plugin does: its arguments, grid, block, shared memory and scratch memory."""
    major, minor = torch.cuda.get_device_capability()
    kernel = compile_plugin(case.plugin, case.sizes, str(compute).removeprefix("torch."), major * 10 + minor)
    launch = case.plugin.launch(case.sizes, triton.cdiv)
    scratch = torch.empty(math.prod(launch.grid) * kernel.scratch_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    driver = KernelDriver(torch.cuda.current_device())
    module = driver.load_module(kernel.ptx.encode())
    stream = driver.create_stream()
    driver.launch(
        driver.function(module, kernel.name),
        grid=launch.grid,
        threads=kernel.threads,
        shared_bytes=kernel.shared_bytes,
        stream=stream,
        arguments=[
            *(tensor.data_ptr() for tensor in inputs.values()),
            *map(c_int32, launch.scalars),
            *(output.data_ptr() for output in outputs),
            *([scratch.data_ptr()] if kernel.scratch_bytes else []),
        ],
    )
    driver.synchronize(stream)
    driver.destroy_stream(stream)
    driver.unload_module(module)
