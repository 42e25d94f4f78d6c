"""Compilation of the C++ plugin for this machine's TensorRT builder, and the choice of matching headers."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import triton

from seko_export.errors import MachineError
from seko_export.host.environment import compiler_command
from seko_export.host.tensorrt_library import TensorRt
from seko_export.host.workshop import workshop
from seko_kernels.tensorrt import PLUGIN_SOURCE

HEADERS_VARIABLE = "TENSORRT_INCLUDE_DIR"
HEADERS_PACKAGE = "kernel_lens"  # a package with TensorRT's public headers, which are all that is used of it
PLUGIN_FILE = "engines/ptx_kernel.so"
_VERSION_FILE = "NvInferVersion.h"


def tensorrt_headers(library: TensorRt) -> Path:
    """Return the folder of TensorRT's C++ headers: the folder that `HEADERS_VARIABLE` names; if it is not set, the
    folder in the package.

    Raises
    ------
    MachineError
        If there are no headers, or the headers are of another major version than `library` needs. A plugin that was
        compiled with headers of another major version would end the process that loads it.
    """
    named = os.environ.get(HEADERS_VARIABLE)
    spec = importlib.util.find_spec(HEADERS_PACKAGE)
    if named:
        folder = Path(named)
    elif spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent / "include" / "tensorrt"
    else:
        raise MachineError(
            f"{library.title}'s plugins are compiled with TensorRT's C++ headers, and there are none: name their "
            f"folder in {HEADERS_VARIABLE}, or pip install --no-deps kernel-lens, which brings those of 10.14"
        )
    try:
        text = (folder / _VERSION_FILE).read_text(encoding="utf-8")
    except OSError as fault:
        raise MachineError(
            f"{folder / _VERSION_FILE} cannot be read ({fault.strerror}): expected the folder of TensorRT's C++ "
            f"headers; name it in {HEADERS_VARIABLE}"
        ) from None
    major = re.search(r"^#define\s+(?:NV_TENSORRT_MAJOR|TRT_MAJOR_\w+)\s+(\d+)", text, re.MULTILINE)
    if major is None or int(major[1]) not in library.header_majors:
        version = "an unknown version" if major is None else f"version {major[1]}"
        raise MachineError(
            f"the headers in {folder} are of {version}, plugins for {library.title} are compiled with "
            f"{' or '.join(map(str, library.header_majors))}; name others in {HEADERS_VARIABLE}"
        )
    return folder


def compile_plugin_library(library: TensorRt, output_path: Path) -> None:
    """Compile the C++ plugin of TensorRT plans. The plugin links neither TensorRT nor CUDA. Equal sources and compilers
    give equal bytes of the plugin.

    Raises
    ------
    MachineError
        In the cases of `tensorrt_headers`; if the C++ compiler is missing or fails.
    """
    headers = tensorrt_headers(library)
    cuda = Path(triton.__file__).parent / "backends" / "nvidia" / "include"  # cuda_runtime_api.h
    compiler = shutil.which(compiler_command())
    if compiler is None:
        raise MachineError(f"no C++ compiler: {compiler_command()!r} was not found; install g++, or set CXX")
    with workshop("seko-plugin-") as folder:
        shutil.copy(PLUGIN_SOURCE, folder)
        command = [
            compiler,
            *("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-s"),
            *("-isystem", str(headers), "-isystem", str(cuda)),
            *(PLUGIN_SOURCE.name, "-o", "plugin.so", "-ldl"),
        ]
        environ = os.environ | {"TMPDIR": str(folder)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environ)
        if done.returncode:
            error_line = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise MachineError(
                f"{compiler} cannot compile {PLUGIN_SOURCE.name} with the headers in {headers}: {error_line.strip()}"
            )
        shutil.copyfile(folder / "plugin.so", output_path)
