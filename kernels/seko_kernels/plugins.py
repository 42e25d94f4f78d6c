"""Descriptions of kernels as TensorRT plugins: tensors, aliases, and launch sizes as functions of shapes. The
descriptions of plugins import no TensorRT.

`plugin_ptx` compiles a plugin; `seko_export.backends.tensorrt_plans.kernels` writes plugins into plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from seko_kernels.attention_parts import softmax_scale
from seko_kernels.formats import KEY_TILE, NVFP4_BLOCK
from seko_kernels.scratch import past_of, scratch_shapes
from seko_kernels.triton import plugin_entries as entries
from seko_kernels.triton.cache_write import CACHE_WRITE_TILE, CACHE_WRITE_WARPS
from seko_kernels.triton.fp8_expand import EXPAND_TILE as PAST_TILE
from seko_kernels.triton.fp8_expand import EXPAND_WARPS as PAST_WARPS
from seko_kernels.triton.fp8_expand import expand_group
from seko_kernels.triton.gaussian import GAUSSIAN_TILE, GAUSSIAN_WARPS
from seko_kernels.triton.kv_expand import KV_EXPAND_HEADS, KV_EXPAND_NUMBERS, KV_EXPAND_WARPS
from seko_kernels.triton.kv_write import KV_WRITE_NUMBERS, KV_WRITE_WARPS
from seko_kernels.triton.nvfp4_expand import EXPAND_TILE, EXPAND_WARPS
from seko_kernels.tuned import SAFE

# NVFP4 blocks per program, for writing a cache and for expanding keys.
WRITE_TILE, EXPAND_KEYS_TILE = KV_WRITE_NUMBERS // NVFP4_BLOCK, KV_EXPAND_NUMBERS // NVFP4_BLOCK
NAMESPACE = "seko"  # namespace of the plugins, equal to that of the ONNX functions that they replace

# an int, or a TensorRT expression of a dimension, which supports +, * and // with a number on the right
Size = Any
Shapes = Mapping[str, Sequence[Size]]
CeilDiv = Callable[[Size, int], Size]


@dataclass(frozen=True)
class Launch:
    """Sizes of a kernel's launch. The PTX of a kernel fixes the block size of its launch.

    Parameters
    ----------
    grid : tuple of Size
        Number of programs along x, y and z.
    scalars : tuple of Size
        int32 arguments of the kernel, in the order of arguments between the pointers of the inputs and the pointers of
        the outputs.
    """

    grid: tuple[Size, Size, Size]
    scalars: tuple[Size, ...]


@dataclass(frozen=True)
class PluginOutput:
    """One output of a plugin.

    Parameters
    ----------
    name : str
        Name of the output among the function's results.
    dtype : str
        The manifest's name of the output's dtype.
    shape : callable
        Function that computes the output's shape from the inputs' shapes.
    alias : str or None
        Name of the input into which the output is written in place, if any.
    """

    name: str
    dtype: str
    shape: Callable[[Shapes], tuple[Size, ...]]
    alias: str | None = None


@dataclass(frozen=True)
class Plugin:
    """A TensorRT plugin: an ONNX function that is implemented by one kernel.

    A plan declares all one-byte dtypes as int8, because TensorRT passes no unsigned bytes to plugins and does not
    convert e4m3 for plugins.

    Parameters
    ----------
    name : str
        Name of the ONNX function.
    inputs : mapping of str to str
        Dtypes of the inputs by name, in order. ``float`` stands for the dtype in which the engine computes.
    outputs : tuple of PluginOutput
        The plugin's outputs, in order.
    entry : triton kernel
        The kernel's entry point, one of `plugin_entries`.
    warps : int
        Number of warps per program.
    launch : callable
        Function that computes the launch from the inputs' shapes and a ceiling division.
    constants : callable
        Function that computes the kernel's constants from the inputs' shapes as plain ints.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: tuple[PluginOutput, ...]
    entry: Any = field(repr=False)
    warps: int
    launch: Callable[[Shapes, CeilDiv], Launch]
    constants: Callable[[Mapping[str, Sequence[int]]], dict[str, int | float]]

    def pointers(self, compute: str) -> dict[str, str]:
        """Return the dtype of each input and then of each output, by name; ``float`` stands for `compute`."""
        dtypes = {name: compute if dtype == "float" else dtype for name, dtype in self.inputs.items()}
        return dtypes | {
            output.name: compute if output.dtype == "float" else output.dtype for output in self.outputs
        }

    @property
    def identifier(self) -> str:
        """TensorRT's name of the plugin, ``seko::NAME``."""
        return f"{NAMESPACE}::{self.name}"


def nvfp4_write() -> Plugin:
    """Return the TensorRT plugin that quantises tokens to NVFP4 and writes them into the cache, in place."""
    return _write("nvfp4_write", entries.nvfp4_write_entry, {})


def nvfp4_write_keys() -> Plugin:
    """Return the TensorRT plugin that subtracts the mean key, quantises to NVFP4 and writes into the cache, in
    place."""
    return _write("nvfp4_write_keys", entries.nvfp4_write_keys_entry, {"mean": "float32"})


def nvfp4_expand(dtype: str) -> Plugin:
    """Return the TensorRT plugin that expands an NVFP4 cache to `dtype`, bfloat16 or float32."""

    def launch(shapes: Shapes, ceil_div: CeilDiv) -> Launch:
        tokens, heads, blocks = shapes["scales"]
        total = tokens * heads * blocks
        return Launch((ceil_div(total, EXPAND_TILE), 1, 1), (total,))

    return Plugin(
        "nvfp4_expand",
        {"codes": "uint8", "scales": "uint8", "global_scale": "float32"},
        (PluginOutput("expanded", dtype, _expanded_shape),),
        entries.nvfp4_expand_entry,
        EXPAND_WARPS,
        launch,
        lambda sizes: {**_cache_constants(sizes), "TILE": EXPAND_TILE},
    )


def nvfp4_expand_keys(dtype: str) -> Plugin:
    """Return the TensorRT plugin that expands NVFP4 keys to `dtype`, adds their mean and applies RoPE."""

    def launch(shapes: Shapes, ceil_div: CeilDiv) -> Launch:
        tokens, heads, blocks = shapes["scales"]
        parts = tokens * blocks
        grid = (ceil_div(parts, EXPAND_KEYS_TILE), ceil_div(heads, KV_EXPAND_HEADS), 1)
        return Launch(grid, (parts, shapes["patch_rotary"][0]))

    def constants(sizes: Mapping[str, Sequence[int]]) -> dict[str, int | float]:
        tiles = {"GROUP": KV_EXPAND_HEADS, "TILE": EXPAND_KEYS_TILE}
        return {**_cache_constants(sizes), "SLOT_PAIRS": sizes["slot_rotary"][1], **tiles}

    inputs = {"codes": "uint8", "scales": "uint8", "global_scale": "float32", "mean": "float32"}
    return Plugin(
        "nvfp4_expand_keys",
        {**inputs, "slot_rotary": "float32", "patch_rotary": "float32"},
        (PluginOutput("expanded", dtype, _expanded_shape),),
        entries.nvfp4_expand_keys_entry,
        KV_EXPAND_WARPS,
        launch,
        constants,
    )


def cache_write() -> Plugin:
    """Return the TensorRT plugin that writes rows into an exact cache, in place."""

    def launch(shapes: Shapes, ceil_div: CeilDiv) -> Launch:
        tokens, heads, dim = shapes["x"]
        numbers = tokens * heads * dim
        return Launch((ceil_div(numbers, CACHE_WRITE_TILE), 1, 1), (numbers, heads * dim))

    return Plugin(
        "cache_write",
        {"x": "float", "token_index": "int64", "cache": "float"},
        (PluginOutput("new_cache", "float", lambda shapes: tuple(shapes["cache"]), "cache"),),
        entries.cache_write_entry,
        CACHE_WRITE_WARPS,
        launch,
        lambda _: {"TILE": CACHE_WRITE_TILE},
    )


def gaussian(latent_shape: tuple[int, int, int]) -> Plugin:
    """Return the TensorRT plugin that draws a chunk's noise; `latent_shape` is [channels, rows, columns]."""
    channels, rows, columns = latent_shape
    groups = -(-channels * rows * columns // 4)

    def launch(shapes: Shapes, ceil_div: CeilDiv) -> Launch:  # noqa: ARG001 - its tiles do not depend on a shape
        batch, frames = shapes["frames"]
        return Launch((-(-groups // GAUSSIAN_TILE), batch * frames, 1), (frames,))

    def shape(shapes: Shapes) -> tuple[Size, ...]:
        batch, frames = shapes["frames"]
        return (batch, channels, frames, rows, columns)

    return Plugin(
        "gaussian",
        {"seeds": "int64", "frames": "int64", "draw": "int64"},
        (PluginOutput("noise", "float32", shape),),
        entries.gaussian_entry,
        GAUSSIAN_WARPS,
        launch,
        lambda _: {"CHANNELS": channels, "PIXELS": rows * columns, "TILE": GAUSSIAN_TILE},
    )


def fp8_expand() -> Plugin:
    """Return the TensorRT plugin that expands an FP4 cache to 8 bits, without the slots that the chunk writes.

    The kernel reads no byte that a write of the same chunk changes, so expanding and writing may run in either order.
    """

    def shapes_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
        tokens, heads, half_dim = shapes["k_codes"]
        batch, frames = shapes["write_slots"]
        return scratch_shapes(
            batch, heads, half_dim * 2, past_of(tokens // batch, frames, shapes["patch_rotary"][0])
        )

    def launch(shapes: Shapes, ceil_div: CeilDiv) -> Launch:
        batch, places, heads, _ = shapes_of(shapes)["k"]
        grid = (ceil_div(places, PAST_TILE), 2 * heads // expand_group(heads), batch)
        return Launch(grid, (shapes["k_codes"][0] // batch, places))

    def constants(sizes: Mapping[str, Sequence[int]]) -> dict[str, int | float]:
        _, heads, head_dim, columns = shapes_of(sizes)["v"]
        return {
            "V_COLUMNS": columns,
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "FRAME_TOKENS": sizes["patch_rotary"][0],
            "CHUNK_FRAMES": sizes["write_slots"][1],
            "SLOT_PAIRS": sizes["slot_rotary"][1],
            "GROUP": expand_group(heads),
            "TILE": PAST_TILE,
            "KEY_TILE": KEY_TILE,
            "INTEGER": False,
        }

    def output(name: str, dtype: str) -> PluginOutput:
        return PluginOutput(name, dtype, lambda shapes: shapes_of(shapes)[name])

    caches = {"k_codes": "uint8", "k_scales": "uint8", "k_global_scale": "float32"}
    caches |= {"v_codes": "uint8", "v_scales": "uint8", "v_global_scale": "float32", "v_fp8_scale": "float32"}
    places = {"write_slots": "int64", "valid_tokens": "int64"}
    tables = {"mean": "float32", "slot_rotary": "float32", "patch_rotary": "float32"}
    return Plugin(
        "fp8_expand",
        {**caches, **places, **tables},
        (output("k", "int8"), output("k_scale", "float32"), output("v", "float8_e4m3fn")),
        entries.fp8_expand_entry,
        PAST_WARPS,
        launch,
        constants,
    )


def attention_fp8() -> Plugin:
    """Return the TensorRT plugin that attends to cached tokens in 8 bits (`fp8_expand`) and to the chunk's own tokens
    unquantised.

    The tile sizes are safe: they compile without register spills on every GPU with fp8. No tile sizes were measured on
    the GPUs for which TensorRT plans are built.
    """

    def launch(shapes: Shapes, ceil_div: CeilDiv) -> Launch:
        batch, tokens, heads, _ = shapes["q"]
        return Launch(
            (ceil_div(tokens, SAFE.block_m), heads, batch), (tokens, shapes["k"][1], shapes["v"][3])
        )

    def constants(sizes: Mapping[str, Sequence[int]]) -> dict[str, int | float]:
        _, _, heads, head_dim = sizes["q"]
        return {
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "SOFTMAX_SCALE": softmax_scale(head_dim),
            "KEY_TILE": KEY_TILE,
            "BLOCK_M": SAFE.block_m,
            "BLOCK_N": SAFE.block_n,
            "OWN_N": SAFE.own_n,
            "STAGES": SAFE.stages,
            "INTEGER": False,
        }

    def shape(shapes: Shapes) -> tuple[Size, ...]:
        batch, tokens, heads, head_dim = shapes["q"]
        return (batch, tokens, heads * head_dim)

    cached = {"k": "int8", "k_scale": "float32", "v": "float8_e4m3fn", "v_scale": "float32"}
    return Plugin(
        "attention_fp8",
        {"q": "bfloat16", **cached, "valid_tokens": "int64", "k_own": "bfloat16", "v_own": "bfloat16"},
        (PluginOutput("y", "bfloat16", shape),),
        entries.attention_fp8_entry,
        SAFE.warps,
        launch,
        constants,
    )


def _write(name: str, entry: Any, further: Mapping[str, str]) -> Plugin:
    def launch(shapes: Shapes, ceil_div: CeilDiv) -> Launch:
        tokens, heads, dim = shapes["x"]
        blocks = tokens * heads * (dim // NVFP4_BLOCK)
        grid = (ceil_div(blocks, WRITE_TILE), 1, 1)
        return Launch(grid, (blocks, shapes["codes"][0], heads * dim, dim))

    inputs = {
        "x": "float",
        "token_index": "int64",
        "codes": "uint8",
        "scales": "uint8",
        "global_scale": "float32",
    }
    return Plugin(
        name,
        {**inputs, **further},
        (
            PluginOutput("new_codes", "uint8", lambda shapes: tuple(shapes["codes"]), "codes"),
            PluginOutput("new_scales", "uint8", lambda shapes: tuple(shapes["scales"]), "scales"),
        ),
        entry,
        KV_WRITE_WARPS,
        launch,
        lambda sizes: {**_cache_constants(sizes), "TILE": WRITE_TILE},
    )


def _cache_constants(sizes: Mapping[str, Sequence[int]]) -> dict[str, int | float]:
    return {"HEADS": sizes["scales"][1], "HEAD_BLOCKS": sizes["scales"][2]}


def _expanded_shape(shapes: Shapes) -> tuple[Size, ...]:
    tokens, heads, half_dim = shapes["codes"]
    return (tokens, heads, half_dim * 2)
