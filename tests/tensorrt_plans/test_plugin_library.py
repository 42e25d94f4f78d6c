"""The C++ plugin called as TensorRT calls it, over a driver that prints: what it launches, with which arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import triton

from seko_export.backends.tensorrt_plans.plugin_library import compile_plugin_library, tensorrt_headers
from seko_export.errors import MachineError
from seko_export.host.environment import compiler_command
from seko_export.host.tensorrt_library import RTX

SOURCE = Path(__file__).with_name("plugin_calls.cpp")
CUDA_HEADERS = Path(triton.__file__).parent / "backends" / "nvidia" / "include"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin library, what calls it, and the driver."""
    try:
        headers = tensorrt_headers(RTX)
    except MachineError as reason:
        pytest.skip(str(reason))
    path = tmp_path_factory.mktemp("plugin")
    compile_plugin_library(RTX, path / "plugin.so")
    compiler = (compiler_command(), "-std=c++17", SOURCE)
    driver = (*compiler, "-DDRIVER", "-shared", "-fPIC", "-o", path / "libcuda.so.1")
    calls = (*compiler, "-isystem", headers, "-isystem", CUDA_HEADERS, "-o", path / "calls", "-ldl")
    for command in (driver, calls):
        subprocess.run(command, check=True, capture_output=True)
    return path


def lines(folder: Path, arch: int) -> list[str]:
    environ = {**os.environ, "LD_LIBRARY_PATH": str(folder), "SEKO_ARCH": str(arch)}
    done = subprocess.run(
        [folder / "calls", folder / "plugin.so"], env=environ, capture_output=True, text=True, check=True
    )
    first, *others = done.stdout.splitlines()
    assert first == "1 seko PtxKernel 2"
    assert others[0] == f"workspace {2 * 3 * 5 * 768} alias 1"
    return others[1:]


@pytest.mark.parametrize(
    ("arch", "ptx", "asked", "shared", "arguments"),
    [
        (89, "older", [], 1000, "1000 2000 7 9 3000 "),
        (
            120,
            "newer",
            ["attribute 8 50000"],
            50000,
            "1000 2000 7 9 3000 4000 ",
        ),  # its scratch memory is last
    ],
)
def test_it_launches_the_kernel_of_the_gpu_with_the_arguments_that_it_was_handed(
    folder: Path, arch: int, ptx: str, asked: list[str], shared: int, arguments: str
) -> None:
    assert lines(folder, arch) == [
        f"load {ptx}",
        "function kernel",
        *asked,
        f"grid 2 3 5 block 64 1 1 shared {shared} stream 5000",
        arguments,
        "failed 0",
    ]


def test_ptx_for_one_gpu_alone_is_not_launched_on_a_newer_one(folder: Path) -> None:
    """PTX of sm_120a is no PTX for sm_121; that of sm_89 is."""
    assert lines(folder, 121)[0] == "load older"


def test_a_gpu_older_than_all_is_told_and_nothing_is_launched(folder: Path) -> None:
    message = "says seko's kernel kernel is for other GPUs than sm_86"
    assert lines(folder, 86) == [message, message, "failed 1"]
