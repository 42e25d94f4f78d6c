"""A stream whose engines are two kernels: noise into the latents, and the latents quantised into a ring. No tests.

Each engine is there twice: as PTX that the driver launches, and as the torch reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int32
from typing import Any

import numpy as np
import torch

from seko_export.families.layers import sampler
from seko_kernels import plugins, reference
from seko_kernels.plugin_ptx import PluginKernel, compile_plugin
from seko_kernels.plugins import Plugin
from seko_runtime.backends.device_tensor import DeviceTensor
from seko_runtime.backends.driver_blocks import current_queue
from seko_runtime.backends.memory import Engine
from seko_runtime.format.manifest import Buffer, Call, EngineSpec, KvPool, Target, TensorSpec, Weight
from seko_runtime.video.manifest import KIND, Schedule, Stream, VideoManifest, VideoWorkload

CHUNK, SINK, RING, PASSES = 2, 1, 4, 2
LATENT = (4, 2, 8)  # channels, rows, columns
HEADS, DIM = 2, 32  # of the quantised latents: a frame's 64 numbers
SHAPE = (1, LATENT[0], CHUNK, *LATENT[1:])
SLOTS = SINK + RING
SIZES = {
    "gaussian": {"seeds": (1,), "frames": (1, CHUNK), "draw": (1,)},
    "nvfp4_write": {
        "x": (CHUNK, HEADS, DIM),
        "token_index": (CHUNK,),
        "codes": (SLOTS, HEADS, DIM // 2),
        "scales": (SLOTS, HEADS, DIM // 16),
        "global_scale": (HEADS,),
    },
}


def manifest() -> VideoManifest:
    """Every pass draws noise anew and writes it, so the cache holds the last one."""
    codes = TensorSpec("codes", (SLOTS, HEADS, DIM // 2), "uint8")
    scales = TensorSpec("scales", (SLOTS, HEADS, DIM // 16), "uint8")
    latents = TensorSpec("latents", SHAPE, "float32")
    places = (TensorSpec("seeds", (1,), "int64"), TensorSpec("frames", (1, CHUNK), "int64"))
    write = (
        latents,
        TensorSpec("slots", (1, CHUNK), "int64"),
        codes,
        scales,
        TensorSpec("g", (HEADS,), "float32"),
    )
    caches = ("buffer:kv.codes", "buffer:kv.scales")
    store = Call("nvfp4_write", ("buffer:latents", "buffer:write_slots", *caches, "weight:g"), caches)

    def draw(which: str, into: str = "latents") -> Call:
        return Call("gaussian", ("buffer:seeds", "buffer:frames", which), (f"buffer:{into}",))

    return VideoManifest(
        name="kernels",
        backend="tensorrt",
        target=Target("cuda", "sm_90", "2.11.0"),
        producer={},
        model={},
        workload=VideoWorkload(
            KIND,
            stream=Stream(CHUNK, SINK, RING, 1, LATENT, 8, 24, 4, 16),
            kv=KvPool("toy", codes.nbytes + scales.nbytes, 1, 4.5),
            schedule=Schedule(PASSES, (1000.0, 500.0), (1.0, 0.5), 0.0, "toy"),
            output="latents",
        ),
        state_rows=1,
        buffers=(
            Buffer("kv.codes", codes.shape, "uint8", "cache"),
            Buffer("kv.scales", scales.shape, "uint8", "cache"),
            Buffer("seeds", (1,), "int64", "host"),
            Buffer("frames", (1, CHUNK), "int64", "host"),
            Buffer("write_slots", (1, CHUNK), "int64", "host"),
            Buffer("latents", SHAPE, "float32", "state"),
            Buffer("of_prompt", SHAPE, "float32", "session"),
        ),
        weights=(
            Weight("g", (HEADS,), "float32", "w"),
            Weight("draw", (PASSES + 1, 1), "int64", "w"),
            Weight("first", (1,), "int64", "w"),
        ),
        engines=(
            EngineSpec("gaussian", "g", (*places, TensorSpec("draw", (1,), "int64")), (latents,)),
            EngineSpec("nvfp4_write", "w", write, (codes, scales)),
        ),
        programs={
            "prompt": (draw("weight:first", "of_prompt"),),  # of no effect on the chunks, as is the next one
            "begin": (draw("weight:first"),),
            "denoise": (draw("weight:draw[pass]"), store),
            "context": (draw("weight:draw[pass]"), store),
        },
    )


def weights() -> dict[str, torch.Tensor]:
    passes = torch.arange(PASSES + 1)[:, None] + 5
    return {"g": torch.tensor([0.25, 0.5]), "draw": passes, "first": torch.tensor([4])}


def plugin_table() -> dict[str, Plugin]:
    return {"gaussian": plugins.gaussian(LATENT), "nvfp4_write": plugins.nvfp4_write()}


def reference_engines() -> dict[str, Callable[[list[Any]], list[Any]]]:
    """The engines in torch, on any device."""

    def write(inputs: list[Any]) -> list[Any]:
        latents, slots, codes, scales, g = inputs
        new_codes, new_scales = reference.nvfp4_encode(latents.reshape(CHUNK, HEADS, DIM), g)
        return [codes.index_copy(0, slots[0], new_codes), scales.index_copy(0, slots[0], new_scales)]

    return {"gaussian": lambda inputs: [sampler.gaussian(*inputs, LATENT)], "nvfp4_write": write}


def kernel_engines(driver: Any, arch: int, specs: Mapping[str, EngineSpec]) -> dict[str, Engine]:
    """The engines as kernels of PTX, launched as TensorRT would."""

    def engine(plugin: Plugin) -> Engine:
        sizes = SIZES[plugin.name]
        kernel: PluginKernel = compile_plugin(plugin, sizes, "float32", arch)
        function = driver.function(driver.load_module(kernel.ptx.encode()), kernel.name)
        launch = plugin.launch(sizes, lambda a, b: -(-a // b))

        def run(inputs: list[DeviceTensor]) -> Sequence[DeviceTensor]:
            queue = current_queue()
            names = [*plugin.inputs]
            results = [
                inputs[names.index(output.alias)] if output.alias else queue.result(spec)
                for output, spec in zip(plugin.outputs, specs[plugin.name].outputs, strict=True)
            ]
            driver.launch(
                function,
                grid=launch.grid,
                threads=kernel.threads,
                shared_bytes=kernel.shared_bytes,
                stream=queue.stream,
                arguments=[
                    *(tensor.address for tensor in inputs),
                    *map(c_int32, launch.scalars),
                    *(result.address for result in results),
                ],
            )
            return results

        return run

    return {name: engine(plugin) for name, plugin in plugin_table().items()}


def expected(seed: int, chunks: int, device: str) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Latents of each chunk, codes and scales after the last one."""
    engines, tensors = reference_engines(), {name: weight.to(device) for name, weight in weights().items()}
    codes = torch.zeros(SLOTS, HEADS, DIM // 2, dtype=torch.uint8, device=device)
    scales = torch.zeros(SLOTS, HEADS, DIM // 16, dtype=torch.uint8, device=device)
    latents_of_chunks = []
    for chunk in range(chunks):
        frames = torch.arange(CHUNK)[None] + chunk * CHUNK
        slots = torch.where(frames < SINK, frames, SINK + (frames - SINK) % RING)
        seeds = torch.tensor([seed], device=device)
        (latents,) = engines["gaussian"]([seeds, frames.to(device), tensors["draw"][PASSES]])
        codes, scales = engines["nvfp4_write"]([latents, slots.to(device), codes, scales, tensors["g"]])
        latents_of_chunks.append(latents.cpu().numpy())
    return latents_of_chunks, codes.cpu().numpy(), scales.cpu().numpy()
