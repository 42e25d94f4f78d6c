"""GPUs that `seko-export plan` knows, each with the vendor's peak figures. What kernels reach
of them stands in `kinds`.

Figures are dense (without structured sparsity), with float32 accumulation. A GB of memory counts as 10^9 bytes, even if
the vendor means GiB. The difference of seven percent leaves memory for the CUDA context and for other use.
"""

from __future__ import annotations

from dataclasses import dataclass

from seko_export.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """One GPU model, with its rates and memory.

    Parameters
    ----------
    name : str
        Name of the GPU for ``--gpu``.
    title : str
        Name of the GPU by its vendor.
    arch : str
        The compute capability for which kernels are compiled, ``sm_NN``.
    bf16, fp8, fp32 : float
        Peak speed in FLOP/s: tensor cores in bfloat16 and in fp8 (0: the GPU has no fp8), plain float32.
    bandwidth : float
        Memory bandwidth in bytes/s.
    host_link : float
        Bandwidth to and from the host in bytes/s.
    peer_link : float
        Bandwidth to another GPU of the machine in one direction, bytes/s: NVLink, or the host link without NVLink.
    memory_bytes : int
        Size of the GPU's memory in bytes.
    measured : bool
        Whether the reached fractions of the peak figures were measured on this GPU.
    """

    name: str
    title: str
    arch: str
    bf16: float
    fp8: float
    fp32: float
    bandwidth: float
    host_link: float
    peer_link: float
    memory_bytes: int
    measured: bool = False


_T, _GB = 1e12, 10**9
# PCI Express Base Specification, 4.0 and 5.0: 16 lanes of 16 and of 32 GT/s, of which 128 bits of 130 are data. The
# sheets below say which of them a GPU has.
_PCIE_4, _PCIE_5 = 16 * 16e9 / 8 * 128 / 130, 16 * 32e9 / 8 * 128 / 130
_TABLE = (
    # NVIDIA H200 data sheet, SXM; its tensor figures are with sparsity, so half of 1,979 and 3,958 TFLOPS,
    # and its NVLink counts both directions, so half of 900 GB/s; likewise that of H100 and A100.
    Gpu(
        "h200",
        "NVIDIA H200",
        "sm_90",
        989.5 * _T,
        1979 * _T,
        67 * _T,
        4.8 * _T,
        _PCIE_5,
        0.45 * _T,
        141 * _GB,
        measured=True,
    ),
    # NVIDIA H100 data sheet, SXM; likewise.
    Gpu(
        "h100",
        "NVIDIA H100 SXM",
        "sm_90",
        989.5 * _T,
        1979 * _T,
        67 * _T,
        3.35 * _T,
        _PCIE_5,
        0.45 * _T,
        80 * _GB,
    ),
    # NVIDIA A100 data sheet, 80 GB SXM; no fp8.
    Gpu(
        "a100",
        "NVIDIA A100 80GB SXM",
        "sm_80",
        312 * _T,
        0,
        19.5 * _T,
        2.039 * _T,
        _PCIE_4,
        0.3 * _T,
        80 * _GB,
    ),
    # NVIDIA L40S data sheet.
    Gpu(
        "l40s",
        "NVIDIA L40S",
        "sm_89",
        362.05 * _T,
        733 * _T,
        91.6 * _T,
        0.864 * _T,
        _PCIE_4,
        _PCIE_4,
        48 * _GB,
    ),
    # NVIDIA Ada GPU architecture white paper, appendix A: tensor figures with FP32 accumulation.
    Gpu(
        "rtx4090",
        "NVIDIA GeForce RTX 4090",
        "sm_89",
        165.2 * _T,
        330.3 * _T,
        82.6 * _T,
        1.008 * _T,
        _PCIE_4,
        _PCIE_4,
        24 * _GB,
    ),
    # NVIDIA RTX Blackwell GPU architecture white paper, appendix A: likewise.
    Gpu(
        "rtx5090",
        "NVIDIA GeForce RTX 5090",
        "sm_120",
        209.5 * _T,
        419 * _T,
        104.8 * _T,
        1.792 * _T,
        _PCIE_5,
        _PCIE_5,
        32 * _GB,
    ),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}

# Of the host link; measured on one H200: 55.3 GB/s by plain copies, an offloaded cache reached 98 % (rows
# layer_streaming).
HOST_LINK_SHARE = 0.86
# Scratch of a piece with convolutions, in units of what lies between its launches: engine_peak_bytes of row
# vae_vs_eager of docs/benchmarks/h200.jsonl from before Seko's own convolution; today's row agrees. What is more than 1
# has not been taken apart: cuDNN's workspaces, or copies into another order.
CONVOLUTION_SCRATCH = 1.36
CUBLAS_WORKSPACE = 32 << 20  # bytes a stream that runs matmuls, on Hopper; less elsewhere
# What a process holds on a GPU beside its tensors, CUDA's context and the kernels' code: 0.75 GiB on an H200.
CONTEXT_BYTES = 800_000_000


def room_of(memory_bytes: int, device: str) -> int:
    """Return the bytes for tensors of this memory, on a GPU in GB of 10^9 bytes as above. Below 11 GB the seven percent
    are less than `CONTEXT_BYTES`."""
    if device == "cpu":
        return memory_bytes
    return max(0, min(memory_bytes, memory_bytes * 2**30 // 10**9 - CONTEXT_BYTES))


def find_gpu(name: str) -> Gpu:
    """Return the GPU that ``--gpu`` names; UsageError if the table of GPUs lacks the name."""
    if name not in GPUS:
        raise UsageError(f"--gpu {name!r} is not known: expected one of {', '.join(GPUS)}")
    return GPUS[name]
