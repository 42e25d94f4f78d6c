"""Compilation of plugins to PTX, with exactly the arguments that TensorRT passes, and without paths of the build
machine. Compiling a plugin needs no GPU.

TensorRT plans contain the PTX of plugins. Tests launch the PTX through the CUDA driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from seko_kernels.errors import KernelsError
from seko_kernels.plugins import Plugin

WARP_THREADS = 32
HIDDEN_PARAMETERS = (
    # number of parameters that Triton 3.6 adds after a kernel's own: global scratch memory, and the profiler's
    # memory
    2
)
SCRATCH_ALIGNMENT = 256  # alignment in bytes of the workspace that TensorRT gives a plugin
# scalars that are multiples of this are compiled with that property, as in Triton's own launcher
ALIGNED = 16
SCALAR = "i32"  # dtype of all scalars that a plugin passes to its kernel
# PTX by the first compute capability, low so that old drivers take it: 8.4 came with CUDA 12.4 (driver 550); 8.7, the
# first that knows sm_120, with 12.8 (570); 8.8, the first that knows sm_121, with 12.9 (575). From sm_90 on, kernels
# make tensor maps. For PTX versions below 8.6 (CUDA 12.7, driver 565) Triton writes strides of tensor maps in units
# of 16 bytes; newer assemblers and drivers read the strides as bytes in any PTX version, so that such a kernel would
# access wrong addresses.
PTX_VERSIONS = {0: 84, 90: 86, 100: 87, 121: 88}

_POINTERS = {
    "uint8": "*u8",
    "int8": "*i8",
    "float8_e4m3fn": "*fp8e4nv",
    "int64": "*i64",
    "float32": "*fp32",
    "bfloat16": "*bf16",
}


@dataclass(frozen=True)
class PluginKernel:
    """A plugin compiled for given shapes, dtypes and architecture.

    Parameters
    ----------
    name : str
        Name of the kernel's entry point in the PTX.
    ptx : str
        The PTX text. The entry takes exactly the inputs' pointers, the scalars, the outputs' pointers and, with
        `scratch_bytes`, a pointer to scratch memory, in this order.
    threads : int
        Number of threads per block, along x.
    shared_bytes : int
        Dynamic shared memory per block, in bytes.
    scratch_bytes : int
        Global scratch memory per block, in bytes; blocks are contiguous.
    """

    name: str
    ptx: str
    threads: int
    shared_bytes: int
    scratch_bytes: int


def compile_plugin(
    plugin: Plugin, sizes: Mapping[str, Sequence[int]], compute: str, arch: int
) -> PluginKernel:
    """Compile a plugin's kernel ahead of time, which needs no GPU.

    Parameters
    ----------
    plugin : Plugin
        The plugin to compile.
    sizes : mapping of str to sequence of int
        Shape of each input, by name.
    compute : str
        The dtype for which ``float`` stands in `Plugin.inputs`: ``bfloat16`` or ``float32``.
    arch : int
        Compute capability, such as 90.

    Returns
    -------
    PluginKernel

    Raises
    ------
    KernelsError
        If the kernel needs an argument that TensorRT does not pass.
    """
    dtypes = [_POINTERS[dtype] for dtype in plugin.pointers(compute).values()]
    pointers, results = dtypes[: len(plugin.inputs)], dtypes[len(plugin.inputs) :]
    scalars = plugin.launch(sizes, lambda a, b: -(-a // b)).scalars
    constants = plugin.constants(sizes)
    names = plugin.entry.arg_names
    kinds = [*pointers, *[SCALAR] * len(scalars), *results, *["constexpr"] * len(constants)]
    signature = dict(zip(names, kinds, strict=True))
    # TensorRT's addresses are aligned to 256 bytes, and all integers are known at compile time.
    numbers = dict(enumerate(scalars, len(pointers)))
    aligned = {
        (place,): [["tt.divisibility", ALIGNED]]
        for place, kind in enumerate(kinds)
        if kind.startswith("*") or (place in numbers and numbers[place] % ALIGNED == 0)
    }
    source = ASTSource(fn=plugin.entry, signature=signature, constexprs=constants, attrs=aligned)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # debug lines contain paths of the build machine
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", arch, WARP_THREADS),
            options={
                "num_warps": plugin.warps,
                "ptx_version": PTX_VERSIONS[max(first for first in PTX_VERSIONS if first <= arch)],
            },
        )
    meta = compiled.metadata
    if meta.profile_scratch_size or meta.num_ctas != 1 or meta.global_scratch_align > SCRATCH_ALIGNMENT:
        raise KernelsError(
            f"plugin {plugin.identifier} needs a profiler's memory, a cluster of blocks, or scratch memory aligned to "
            f"more than {SCRATCH_ALIGNMENT} bytes, which the plugin does not give; take another kernel for it"
        )
    scratch: int = meta.global_scratch_size
    own_parameters = len(pointers) + len(scalars) + len(results) + (scratch > 0)
    ptx = without_hidden_parameters(
        compiled.asm["ptx"], meta.name, own_parameters, HIDDEN_PARAMETERS - (scratch > 0)
    )
    return PluginKernel(meta.name, ptx, meta.num_warps * WARP_THREADS, meta.shared, scratch)


def without_hidden_parameters(ptx: str, kernel: str, wanted: int, hidden: int = HIDDEN_PARAMETERS) -> str:
    """Return PTX whose entry takes only its first ``wanted`` parameters.

    Triton's launcher passes ``hidden`` further arguments, which the kernels of plugins never read. TensorRT does not
    pass these arguments. If the PTX kept their parameters, the driver would read past the end of TensorRT's argument
    list.

    Raises
    ------
    KernelsError
        If the PTX has another number of parameters than expected, or reads a parameter that is to be removed.
    """
    head = re.search(rf"\.entry {re.escape(kernel)}\((.*?)\)", ptx, re.DOTALL)
    parameters = [] if head is None else [line.strip().rstrip(",") for line in head[1].strip().splitlines()]
    if head is None or len(parameters) != wanted + hidden:
        raise KernelsError(
            f"kernel {kernel} has {len(parameters)} parameters, expected {wanted} and {hidden} of Triton's "
            "own: another version of Triton lays them out otherwise; take triton 3.6"
        )
    body = ptx[head.end() :]
    for parameter in parameters[wanted:]:
        name = parameter.split()[-1]
        if re.search(rf"\b{re.escape(name)}\b", body):
            raise KernelsError(
                f"kernel {kernel} reads Triton's own parameter {name}, which TensorRT does not give"
            )
    visible = ",\n\t".join(parameters[:wanted])
    return f"{ptx[: head.start(1)]}\n\t{visible}\n{ptx[head.end(1) :]}"
