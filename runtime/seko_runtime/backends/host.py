"""Checks of this machine's processor, device and torch against the target for which an artifact was built."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from seko_runtime.arguments import shown
from seko_runtime.errors import (
    ArtifactError,
    EnvironmentLacksError,
    ForkedProcessError,
    UsageError,
)
from seko_runtime.format.manifest import Target

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # cgroup version 2: files of a container's own limits, as seen from inside


def free_host_bytes() -> int:
    """Return the bytes of host memory that can still be allocated, within the container's limit. Memory of the system's
    file cache counts as free.
    """
    machine = _numbers(MEMINFO, ":").get("MemAvailable")
    available = (
        os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if machine is None else machine * 1024
    )
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or a container whose limit is the word max
        return available
    return max(
        0, min(available, limit - used + _numbers(CGROUP / "memory.stat", " ").get("inactive_file", 0))
    )


def _numbers(file: Path, mark: str) -> dict[str, int]:
    """Return the first number after each name in a file such as /proc/meminfo; empty if the file cannot be read."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(mark) for line in lines)
    return {
        name: int(rest.split()[0])
        for name, _, rest in pairs
        if rest.split()[:1] and rest.split()[0].isdecimal()
    }


def cpu_flags() -> frozenset[str]:
    """Return the processor's feature flags as the kernel names them, such as ``avx2``; empty if unknown."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def check_device_name(device: str) -> str:
    """Return the kind of a device: ``auto``, ``cpu`` or ``cuda``.

    Raises
    ------
    UsageError
        If ``device`` is not ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    """
    if not isinstance(device, str):
        raise UsageError(f"device is {shown(device)}, expected auto, cpu, cuda or cuda:N")
    kind, colon, number = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (colon and not (kind == "cuda" and number.isdecimal())):
        raise UsageError(f"device is {device!r}, expected auto, cpu, cuda or cuda:N")
    return kind


def check_device(target: Target, device: str) -> str:
    """Return the device on which an artifact is opened, which is ``cpu``, ``cuda`` or ``cuda:N``.

    Parameters
    ----------
    target : Target
        The machine for which the artifact was built.
    device : str
        The caller's choice of device; ``auto`` takes the kind of device for which the artifact was built.

    Raises
    ------
    UsageError
        If ``device`` is not a device name.
    ArtifactError
        If the artifact was built for the other kind of device (CPU or GPU).
    """
    kind = check_device_name(device)
    if kind == "auto":
        return target.device
    if kind != target.device:
        advice = "rebuild it with --target cpu" if kind == "cpu" else "rebuild it on a machine with a GPU"
        raise ArtifactError(f"artifact is built for {target.device}, opened on {device}; {advice}")
    return device


def check_cpu(target: Target) -> None:
    """Compare the processor's architecture and flags with those of the target. Host code is also checked for GPU
    artifacts, because engines for GPUs contain compiled host code.

    Raises
    ------
    ArtifactError
        If the engines would use instructions that this processor lacks.
    """
    arch = platform.machine()
    wanted = target.arch if target.device == "cpu" else target.host_arch
    if wanted not in (None, arch):
        raise ArtifactError(
            f"engines are built for {wanted}, this machine is {arch}; rebuild them on such a machine"
        )
    missing = sorted(set(target.cpu_flags) - cpu_flags())
    if missing:
        raise ArtifactError(
            f"engines use the CPU instructions {', '.join(missing)}, which this processor lacks; rebuild them here"
        )


def check_torch(target: Target, device: str) -> None:
    """Import torch and compare its version with the target's torch version. On CUDA, also compare the device and the
    CUDA version.

    Raises
    ------
    ArtifactError
        If the engines were built for another version of torch or CUDA, or for another device.
    EnvironmentLacksError
        If the machine lacks the device.
    ForkedProcessError
        If this process was forked from a process that uses CUDA.
    """
    import torch

    version = torch.__version__.split("+")[0]
    if version != target.torch.split("+")[0]:
        raise ArtifactError(
            f"engines are built with torch {target.torch}, this one is {torch.__version__}; "
            f"install torch=={target.torch.split('+')[0]} or rebuild the artifact"
        )
    if target.device != "cuda":
        return
    if torch.cuda._is_in_bad_fork():
        raise ForkedProcessError(
            "this process was forked from one that uses CUDA, which cannot be used here; spawn the process instead "
            "(multiprocessing.get_context('spawn'))"
        )
    if not torch.cuda.is_available():
        raise EnvironmentLacksError(
            f"artifact is built for {target.arch}, no CUDA device is usable here; see nvidia-smi"
        )
    if torch.version.cuda != target.cuda:
        raise ArtifactError(
            f"engines are built with CUDA {target.cuda}, this torch has {torch.version.cuda}; install the same"
        )
    number = int(device.partition(":")[2] or torch.cuda.current_device())
    if number >= torch.cuda.device_count():
        raise EnvironmentLacksError(
            f"{device} does not exist, this machine has {torch.cuda.device_count()} CUDA devices"
        )
    _check_arch(target, device, "sm_{}{}".format(*torch.cuda.get_device_capability(number)))


def check_driver(target: Target, device: str) -> None:
    """Compare the GPU's compute capability with the target's, through the CUDA driver, because TensorRT backends have
    no torch.

    Raises
    ------
    EnvironmentLacksError
        If there is no CUDA driver, or no GPU with this index.
    ArtifactError
        If the engines were built for another version or another kind of GPU.
    """
    from seko_runtime.backends.cuda_driver import device_arch, device_count

    number, count = int(device.partition(":")[2] or 0), device_count()
    if number >= count:
        raise EnvironmentLacksError(f"{device} does not exist, this machine has {count} CUDA devices")
    _check_arch(target, device, device_arch(number))


def _check_arch(target: Target, device: str, arch: str) -> None:
    if arch not in target.archs:
        raise ArtifactError(
            f"engines are built for {' and '.join(target.archs)}, {device} is {arch}; rebuild with --target {arch}"
        )
