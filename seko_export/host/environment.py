"""Examination of what this machine can build and run. The examination installs and changes nothing. Torch is imported
by what asks it, so that `doctor` begins without it."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from itertools import permutations
from pathlib import Path

import seko_runtime
from seko_export.errors import MachineError, UsageError
from seko_export.host.tensorrt_library import DATA_CENTRE, RTX, TensorRt
from seko_export.host.workshop import workshop
from seko_runtime.backends import host
from seko_runtime.format.manifest import GPU_SEPARATOR

# C++ source of the compiler check, which is compiled and loaded before any engine. AOTInductor's wrapper runs
# std::regex in its constructor; if the compiler links libstdc++ statically, a package crashes the process there.
_PROBE_SOURCE = """
#include <regex>
#include <string>
extern "C" int seko_probe() {
  std::regex pattern("s(e)ko");
  return std::regex_match(std::string("seko"), pattern) ? 42 : 1;
}
"""
_PROBE_ANSWER = 42
_PROBE = """
import ctypes, subprocess, sys
library, *command = sys.argv[1:]
try:
    built = subprocess.run(command, capture_output=True, text=True)
except OSError as fault:
    sys.exit(print(f"cannot be run ({fault.strerror})", end=""))
if built.returncode:
    detail = (built.stderr.strip().splitlines() or ["no message"])[-1]
    sys.exit(print(f"cannot build a shared library ({detail})", end=""))
import torch
import seko_runtime
sys.exit(ctypes.CDLL(library).seko_probe())
"""
_COMPILER_ADVICE = (
    "install g++, or set CXX to a compiler that links the system's libstdc++ (CXX=/usr/bin/g++)"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report of `doctor`.

    Parameters
    ----------
    subject : str
        Name of the examined part of the machine.
    ok : bool
        Whether the examined part is usable.
    found : str
        Description of the state of the examined part.
    advice : str
        Advice for the user; empty if nothing is needed.
    """

    subject: str
    ok: bool
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Target:
    """The device for which engines are built.

    Parameters
    ----------
    device : str
        Kind of the device: ``cpu`` or ``cuda``.
    arch : str
        Architecture of the device: ``x86_64`` or similar, or ``sm_90``; several GPUs are joined by hyphens.
    """

    device: str
    arch: str

    @property
    def archs(self) -> tuple[str, ...]:
        """The architecture of each GPU."""
        return tuple(self.arch.split(GPU_SEPARATOR))


def user_cache() -> Path:
    """Return the folder in which this user's builds keep data for later builds."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seko"


def resolve_target(wanted: str, cross: Collection[str] = ()) -> Target:
    """Return the target for the option ``auto``, ``cpu`` or ``sm_NN``; refuse a target for which this machine cannot
    compile.

    Parameters
    ----------
    wanted : str
        The value of ``--target``; several GPUs are separated by commas.
    cross : collection of str
        GPUs for which the backend can build although they are not in this machine.

    Raises
    ------
    UsageError
        If ``wanted`` names GPUs for which the backend cannot build, or names several GPUs and the backend builds for
        one GPU only.
    MachineError
        If this machine has another GPU than the target, or no GPU.
    """
    local = local_gpu_arch()
    if wanted == "cpu" or (wanted == "auto" and local is None):
        return Target("cpu", platform.machine())
    if wanted == "auto" and not cross:
        return Target("cuda", str(local))
    names = tuple(dict.fromkeys((str(local) if wanted == "auto" else wanted).split(",")))
    if cross:
        if not {*names} <= {*cross}:
            here = f", this machine's {local}," if wanted == "auto" else ""
            raise UsageError(
                f"--target {wanted}{here} is none of the GPUs that this backend builds for: {', '.join(cross)}; with "
                "commas several of them"
            )
        return Target(
            "cuda", GPU_SEPARATOR.join(sorted(names, key=lambda name: int(name.removeprefix("sm_"))))
        )
    if len(names) > 1:
        raise UsageError(
            f"--target {wanted}: this backend builds for one GPU, which is here; give --target auto"
        )
    if local != wanted:
        present = "no CUDA device" if local is None else f"a GPU of {local}"
        raise MachineError(
            f"--target {wanted} cannot be built here: this machine has {present}, and engines are tuned and checked "
            f"on the device they are for; build on a machine with {wanted}, or with --target auto"
        )
    return Target("cuda", wanted)


def local_gpu_arch() -> str | None:
    """Return ``sm_NN`` of the current CUDA device, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def local_target(device: str) -> Target:
    """Return the target that is in this machine, of a kind: ``cpu`` or ``cuda``."""
    return resolve_target("cpu" if device == "cpu" else "auto")


def archs_elsewhere(target: Target, cross_targets: Sequence[str]) -> tuple[str, ...]:
    """Return the GPUs of a target that are not in this machine. The result is empty if the target is this machine's
    device, or if the backend builds only for this machine (empty ``cross_targets``)."""
    here = target.device == "cpu" or target.arch == local_gpu_arch()
    return () if here or not cross_targets else target.archs


def has_fp8(target: Target) -> bool:
    """Return whether a target is a GPU whose matrix units support e4m3."""
    from seko_kernels.checks import FP8_ARCH

    number = target.archs[0].removeprefix("sm_")  # the oldest of the GPUs
    return target.device == "cuda" and divmod(int(number), 10) >= FP8_ARCH


def cpu_flags() -> tuple[str, ...]:
    """Return this CPU's vector features that compiled code may rely on, sorted."""
    relevant = re.compile(r"^(avx|avx2|avx512\w*|amx\w*|fma|f16c|bmi1|bmi2|sse4_2)$")
    return tuple(sorted(flag for flag in host.cpu_flags() if relevant.match(flag)))


def compiler_command() -> str:
    """Return the C++ compiler that AOTInductor will call, which is ``$CXX``, or ``g++``."""
    return os.environ.get("CXX", "g++")


def compiler_version() -> str:
    """Return the first line of the compiler's version output, or a note that the compiler was not found."""
    path = shutil.which(compiler_command())
    if path is None:
        return f"{compiler_command()}: not found"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError as fault:
        return f"{path}: {fault.strerror}"
    return done.stdout.splitlines()[0] if done.stdout else f"{path}: no version"


@contextmanager
def probing_compiler() -> Iterator[Callable[[], None]]:
    """Compile a few lines of C++ with an engine's compiler options, load the compiled library beside torch, and call
    it, in a child process that is ended with the context.

    Yields
    ------
    callable
        Function that waits for the result. It raises a MachineError if the compiler fails, or a library that it builds
        crashes the process that loads the library.

    Raises
    ------
    MachineError
        If there is no compiler.
    """
    compiler = shutil.which(compiler_command())
    if compiler is None:
        raise MachineError(f"no C++ compiler: {compiler_command()!r} was not found; {_COMPILER_ADVICE}")
    with workshop("seko-probe-") as folder:
        source, library = folder / "probe.cpp", folder / "probe.so"
        source.write_text(_PROBE_SOURCE)
        command = [compiler, "-shared", "-fPIC", "-O1", "-std=c++20", str(source), "-o", str(library)]
        # a compiler that is ended leaves its own temporary files
        environ = os.environ | {"TMPDIR": str(folder)}
        with subprocess.Popen(
            [sys.executable, "-P", "-c", _PROBE, str(library), *command],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ, process_group=0,
        ) as child:  # fmt: skip
            try:
                yield partial(_raise_for_probe, child, compiler)
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)  # the compiler, too


def _raise_for_probe(child: subprocess.Popen[str], compiler: str) -> None:
    said = child.communicate()[0]
    if said:
        raise MachineError(f"{compiler} {said}; {_COMPILER_ADVICE}")
    if child.returncode != _PROBE_ANSWER:
        raise MachineError(
            f"what {compiler} builds cannot run inside a torch process (exit code {child.returncode}, "
            f"expected {_PROBE_ANSWER}): it probably links libstdc++ statically; {_COMPILER_ADVICE}"
        )


def producer() -> dict[str, str]:
    """Return the versions of the packages used for a build, without host names, paths or times."""
    import torch

    versions = {
        "python": platform.python_version(),
        "compiler": compiler_version().replace(compiler_command(), "c++"),
    }
    versions["seko-export"] = seko_runtime.__version__
    for package in ("torch", "triton", "numpy"):
        versions[package] = _version(package)
    if torch.cuda.is_available():
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return versions


def examine() -> Iterator[Finding]:
    """Yield the findings of `doctor`, the most basic findings first, each when it is made."""
    yield _python()
    yield _torch()
    yield _gpu()
    yield from several_gpus()
    yield _compiler()
    yield _tool("strip", "install binutils")
    yield _triton()
    yield _tensorrt_builder(DATA_CENTRE)
    yield _tensorrt_builder(RTX)
    opens_plans = "it opens plans: in Seko's folder, pip install './runtime[tensorrt]'"
    yield _module("tensorrt_lean", "TensorRT lean", opens_plans)
    yield _module("onnx", "onnx", "--backend onnx needs it: in Seko's folder, pip install -e '.[onnx]'")
    yield _module("tokenizers", "tokenizers (prompts)", "pip install tokenizers, or build with --no-text")
    yield _module("av", "PyAV (mp4 files)", "pip install av, or write .y4m")
    yield _free_disk()


def report(findings: list[Finding]) -> dict[str, object]:
    """Return the report of `doctor` as plain data: the kinds of builds that are possible on this machine, and each line
    of the report."""
    state = {f.subject: f.ok for f in findings}
    basics = state["python"] and state["torch"] and state["C++ compiler"] and state["strip"]
    return {
        "build_cpu": basics,
        "build_cuda": basics and state["GPU"] and state["triton"],
        "gpu": local_gpu_arch(),
        "findings": [asdict(f) for f in findings],
    }


def _python() -> Finding:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding("python", ok, platform.python_version(), "" if ok else "use Python 3.11 or 3.12")


def _torch() -> Finding:
    import torch

    release = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    ok = (2, 11) <= release <= (2, 13)
    return Finding("torch", ok, str(torch.__version__), "" if ok else "install torch 2.11 to 2.13")


def _gpu() -> Finding:
    import torch

    arch = local_gpu_arch()
    if arch is None:
        reason = "torch is a CPU build" if torch.version.cuda is None else "no CUDA device is visible"
        return Finding("GPU", False, reason, "CPU artifacts only; for a GPU one, build where the GPU is")
    name, free = torch.cuda.get_device_name(), torch.cuda.mem_get_info()
    return Finding("GPU", True, f"{name} ({arch}), {free[0] / 2**30:.0f} of {free[1] / 2**30:.0f} GiB free")


def several_gpus() -> list[Finding]:
    """Return a finding on whether an artifact of several ranks can use this machine's GPUs together; no finding for
    fewer than two GPUs."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return []
    subject = "GPUs for --ranks"
    kinds = {torch.cuda.get_device_name(number) for number in range(count)}
    if len(kinds) > 1:
        advice = "all ranks run the same engines: leave one kind in CUDA_VISIBLE_DEVICES"
        return [Finding(subject, False, f"{count}, of {len(kinds)} kinds", advice)]
    for device, other in permutations(range(count), 2):
        if not torch.cuda.can_device_access_peer(device, other):
            status = f"{count}, but cuda:{device} does not reach the memory of cuda:{other}"
            return [
                Finding(subject, True, status, "collectives go through the host's memory, which takes longer")
            ]
    return [Finding(subject, True, f"{count}, each reaches the memory of the others")]


def _compiler() -> Finding:
    try:
        with probing_compiler() as probed:
            probed()
    except MachineError as fault:
        return Finding("C++ compiler", False, compiler_version(), str(fault))
    return Finding("C++ compiler", True, compiler_version())


def _tool(name: str, advice: str) -> Finding:
    path = shutil.which(name)
    return Finding(name, path is not None, path or "not found", "" if path else advice)


def _triton() -> Finding:
    version = _version("triton")
    ok = version != "not installed"
    advice = "" if ok else "GPU builds and --backend compile need it: pip install triton"
    if ok and local_gpu_arch() is not None and ctypes.util.find_library("cuda") is None:
        return Finding(
            "triton", False, f"{version}, without the driver library libcuda", "install the NVIDIA driver"
        )
    return Finding("triton", ok, version, advice)


def _tensorrt_builder(library: TensorRt) -> Finding:
    """Return a finding on whether TensorRT plans can be built; with the bindings alone, the import fails."""
    subject = f"{library.title} builder"
    try:
        return Finding(subject, True, str(library.load().__version__))
    except MachineError as fault:
        status = "installed, cannot build" if importlib.util.find_spec(library.module) else "not installed"
        return Finding(subject, False, status, str(fault))


def _module(module: str, subject: str, advice: str) -> Finding:
    ok = importlib.util.find_spec(module) is not None
    return Finding(subject, ok, "installed" if ok else "not installed", "" if ok else advice)


def _free_disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    ok = free > 1
    return Finding(
        "disk", ok, f"{free:.0f} GiB free here", "" if ok else "free some space, or build elsewhere with -o"
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
