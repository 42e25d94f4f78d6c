"""`seko-export plan`: memory and time of a build on a GPU that need not be there.

Bytes come from the buffer table and the weights' shapes that a build would write, work from its pieces (`op_count.py`),
rates from `gpus.py`. A launch takes the longer of its arithmetic and its traffic, and a launch's own time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch

from seko_export.config import VAE_TEMPORAL_STRIDE
from seko_export.errors import UsageError
from seko_export.gpus import (
    ATTENTION_SHARE,
    BF16_ATTENTION_SHARE,
    CONVOLUTION_SCRATCH,
    CONVOLUTION_SHARE,
    CUBLAS_WORKSPACE,
    EXPAND_SHARE,
    FP8_ATTENTION_SHARE,
    FP8_EXPAND_SHARE,
    FP8_MATMUL_SHARE,
    FP32_MATMUL_SHARE,
    HOST_LINK_SHARE,
    LAUNCH_S,
    MASKED_ATTENTION_SHARE,
    MATMUL_SHARE,
    ROW_KERNEL_SHARE,
    ROWS_SHARE,
    Gpu,
    find_gpu,
)
from seko_export.media_pieces import TEXT_WEIGHTS, VAE_WEIGHTS
from seko_export.models.sampler import Schedule
from seko_export.models.umt5 import UMT5_XXL
from seko_export.models.wan_vae import VAE_PRESETS
from seko_export.op_count import (
    ATTENTION,
    CACHE_WRITE,
    CONVOLUTION,
    MASKED_ATTENTION,
    MATMUL,
    ROWS,
    Launch,
    PieceCount,
    count_piece,
)
from seko_export.op_count_fused import BF16_ATTENTION, FP8_ATTENTION, FP8_EXPAND, FP8_MATMUL, ROW_KERNEL
from seko_export.options import MediaOptions, plan_build
from seko_export.piece import Argument, BuildConfig, Piece
from seko_export.pieces import make_buffers, make_pieces, make_programs
from seko_export.stream_count import chunk_stream_bytes, home_bytes
from seko_runtime.buffers_check import TEXT_BUFFER
from seko_runtime.clocks import RowClocks
from seko_runtime.manifest import Buffer, Call
from seko_runtime.prompts import PROMPT_CACHE
from seko_runtime.ring import Ring
from seko_runtime.schedule import warped_timesteps

SELF_ATTENTION, CROSS_ATTENTION, OTHER_MATMUL = "self-attention", "cross-attention", "matmul, float32"


@dataclass(frozen=True)
class Wish:
    """What is asked of `seko-export plan`.

    Parameters
    ----------
    preset : str or None
        As `seko-export build` takes it.
    gpu : str
        A name of `gpus.GPUS`.
    kv_scheme, fp4_kv
        ``--kv`` and ``--fp4-kv``, likewise.
    fp8 : bool
        ``--fp8``, likewise.
    steps : int or None
        Denoise passes; the preset's without it.
    layout : mapping of str to int or None
        Fields of `StreamConfig` that replace the preset's where not None.
    no_vae, no_text : bool
        Leave out the Wan VAE, the UMT5-XXL encoder.
    kernels, attention : str
        ``--kernels`` and ``--attention``, as `seko-export build` takes them.
    resident_window : bool
        ``--resident-window``, likewise.
    """

    preset: str | None
    gpu: str
    kv_scheme: str | None = None
    fp4_kv: bool = False
    fp8: bool = False
    steps: int | None = None
    layout: Mapping[str, int | None] | None = None
    no_vae: bool = False
    no_text: bool = False
    kernels: str = "auto"
    attention: str = "auto"
    resident_window: bool = False


def predict(wish: Wish) -> dict[str, Any]:
    """Return what a wish takes of a GPU.

    Returns
    -------
    dict
        Plain data. What was asked: ``preset``, ``gpu``, ``gpu_title``, ``measured_gpu``, ``kv``, ``fp8``, ``kernels``,
        ``attention``, ``resident_window``, ``passes`` (denoise passes), ``stream``. Bytes: ``weight_bytes`` (shared by
        all sessions), ``session_bytes``, ``peak_bytes`` of one session, ``memory_bytes`` of the GPU, ``fits``,
        ``sessions_fit``; ``host_bytes`` of a session's streamed cache, ``stream_bytes`` that a chunk moves of it.
        Seconds: ``step`` (the mean of a chunk's passes, by kind of launch), ``stream_s`` (those bytes over the host
        link, beside the steps: a step takes the longer of both), ``step_s``, ``fill_step_s`` (while the cache fills),
        ``decode_s`` (a chunk's video, all rows), ``chunk_s``, ``video_s`` (how long that chunk plays);
        ``real_time_factor``, ``real_time``, ``sessions_real_time``. ``notes``: sentences on what they do not say.

    Raises
    ------
    UsageError
        If a name is unknown, or the options contradict each other or do not fit, as `seko-export build` says it.
    """
    gpu = find_gpu(wish.gpu)
    if wish.fp8 and not gpu.fp8:
        raise UsageError(f"--fp8 needs fp8 tensor cores, which --gpu {gpu.name} ({gpu.title}) has not")
    config, notes = config_of(wish)
    work = Work.of(config)
    weights, session = weight_bytes(config, work.pieces), session_bytes(config, work)
    memory, time = _memory(gpu, weights, session), _time(config, gpu, work)
    memory["host_bytes"] = home_bytes(config)
    time["sessions_real_time"] = min(memory["sessions_fit"], int(time["real_time_factor"]))
    return (
        {
            "preset": config.model.name,
            "gpu": gpu.name,
            "gpu_title": gpu.title,
            "measured_gpu": gpu.measured,
            "kv": config.kv_scheme,
            "fp8": wish.fp8,
            "kernels": "fused" if config.fused else "plain",
            "attention": config.attention,
            "resident_window": config.resident_window,
            "passes": len(config.schedule.timesteps),
            "stream": asdict(config.stream),
        }
        | memory
        | time
        | {"notes": [*notes, *_notes(gpu, config)]}
    )


def config_of(wish: Wish) -> tuple[BuildConfig, list[str]]:
    """Return the build that a wish means, on a GPU, and what the reader should know of it."""
    media = MediaOptions(no_vae=wish.no_vae, no_text=wish.no_text)
    layout = wish.layout or {}
    built = plan_build(
        *(None, wish.preset, wish.kv_scheme, wish.fp4_kv, "auto", layout, media),
        device="cuda",
        kernels=wish.kernels,
        arch=find_gpu(wish.gpu).arch,
        fp8=wish.fp8,
        attention=wish.attention,
        resident_window=wish.resident_window,
    ).config
    notes = []
    if built.vae is None and not wish.no_vae:
        built = replace(built, vae=VAE_PRESETS["wan-2.1"])
    if built.text is None and not wish.no_text:
        if built.model.text_dim == UMT5_XXL.dim:
            built = replace(built, text=UMT5_XXL)
        else:
            notes.append(
                f"no text encoder counted: none is known that is {built.model.text_dim} wide, as "
                f"{built.model.name} takes it"
            )
    if wish.steps is not None:
        shift = built.schedule.shift or 1.0  # passes are counted here; their times do not matter
        schedule = Schedule(warped_timesteps(wish.steps, shift), built.schedule.context_timestep, shift)
        built = replace(built, schedule=schedule)
    return built, notes


@dataclass(frozen=True)
class Work:
    """The pieces of a build, counted."""

    pieces: Mapping[str, Piece]
    programs: Mapping[str, tuple[Call, ...]]
    counts: Mapping[str, PieceCount]

    @classmethod
    def of(cls, config: BuildConfig) -> Work:
        """Count every piece of a build for a GPU."""
        pieces = make_pieces(config)
        return cls(pieces, make_programs(pieces), {name: count_piece(one) for name, one in pieces.items()})

    def scratch_bytes(self, *programs: str) -> int:
        """Most that lies between the launches of these programs, of which one runs at a time."""
        return max(
            (self._scratch(self.programs[name]) for name in programs if name in self.programs), default=0
        )

    def _scratch(self, calls: tuple[Call, ...]) -> int:
        most, values = 0, dict[str, int]()
        for call in calls:
            count = self.counts[call.engine]
            convolves = any(launch.kind == CONVOLUTION for launch in count.launches)
            scratch = round(count.scratch_bytes * (CONVOLUTION_SCRATCH if convolves else 1))
            most = max(most, sum(values.values()) + scratch)
            outputs = self.pieces[call.engine].outputs
            values |= {a.ref: _nbytes(a) for a in outputs if a.ref.startswith("value:")}
        return most


def weight_bytes(config: BuildConfig, pieces: Mapping[str, Piece]) -> dict[str, int]:
    """Return the bytes of the artifact's weights: ``transformer`` (tables and scales with it), ``text``, ``vae``."""
    tables = config.schedule.tables(config.stream)
    sizes = {f"weight:{name}": table.nbytes for name, table in tables.items()}
    for piece in pieces.values():
        for argument in piece.signature:
            pattern = argument.ref.partition("[")[0]
            for layer in piece.served or (0,):
                name = pattern.replace("{layer}", str(layer))
                if name.startswith("weight:") and name not in sizes:
                    sizes[name] = _nbytes(argument)
    shares = {"text": TEXT_WEIGHTS, "vae": VAE_WEIGHTS}
    total = {
        share: sum(size for name, size in sizes.items() if name.startswith(f"weight:{prefix}"))
        for share, prefix in shares.items()
    }
    return {"transformer": sum(sizes.values()) - sum(total.values()), **total}


def session_bytes(config: BuildConfig, work: Work) -> dict[str, int]:
    """Return what one session allocates, by what it is for."""
    buffers = make_buffers(config)

    def of(*roles: str) -> int:
        return sum(buffer.on_device.nbytes for buffer in buffers if buffer.role in roles)

    s = config.stream
    window = sum(buffer.nbytes for buffer in buffers if buffer.made_by_begin)
    latents = next(buffer for buffer in buffers if buffer.name == "latents")
    kept = RowClocks(Ring(s.sink_frames, s.ring_frames, s.chunk_frames), s.batch).places * latents.nbytes
    steps = ("begin", "denoise", "denoise_full", "context", "context_full")
    return {
        "kv": of("cache"),
        "prompt": of("prompt"),
        "prompt_cache": PROMPT_CACHE * _prompt_entry(config, buffers, work),
        "latents": of("chunk", "state") - window + kept,
        "window": window,
        "decode": of("decode"),
        "scratch_step": work.scratch_bytes(*steps),
        "scratch_decode": work.scratch_bytes("decode_first", "decode"),
        "scratch_prompt": work.scratch_bytes("prompt", "text", "encode"),
        "workspace": CUBLAS_WORKSPACE * (1 + (config.vae is not None)),
    }


def launch_seconds(launch: Launch, gpu: Gpu) -> float:
    """Return the time of one launch inside a graph."""
    moved = launch.bytes_read + launch.bytes_written
    share = {
        ROWS: ROWS_SHARE,
        CACHE_WRITE: ROWS_SHARE,
        ROW_KERNEL: ROW_KERNEL_SHARE,
        FP8_EXPAND: FP8_EXPAND_SHARE,
    }.get(launch.kind)
    if share is not None:
        return LAUNCH_S + moved / (gpu.bandwidth * share)
    rate = {
        ATTENTION: gpu.bf16 * ATTENTION_SHARE,
        MASKED_ATTENTION: gpu.bf16 * MASKED_ATTENTION_SHARE,
        BF16_ATTENTION: gpu.bf16 * BF16_ATTENTION_SHARE,
        FP8_ATTENTION: gpu.bf16 * FP8_ATTENTION_SHARE,
        CONVOLUTION: gpu.bf16 * CONVOLUTION_SHARE,
        MATMUL: gpu.bf16 * MATMUL_SHARE,
        FP8_MATMUL: gpu.fp8 * FP8_MATMUL_SHARE,
    }.get(launch.kind, gpu.fp32)  # an expansion has no FLOPs
    if launch.kind == MATMUL and launch.dtype != torch.bfloat16:
        rate = gpu.fp32 * FP32_MATMUL_SHARE
    return LAUNCH_S + max(launch.flops / rate, moved / (gpu.bandwidth * EXPAND_SHARE))


def _memory(gpu: Gpu, weights: Mapping[str, int], session: Mapping[str, int]) -> dict[str, Any]:
    shared, each = sum(weights.values()), sum(session.values())
    return {
        "weight_bytes": dict(weights),
        "session_bytes": dict(session),
        "peak_bytes": shared + each,
        "memory_bytes": gpu.memory_bytes,
        "fits": shared + each <= gpu.memory_bytes,
        "sessions_fit": max(0, (gpu.memory_bytes - shared) // each),
    }


def _time(config: BuildConfig, gpu: Gpu, work: Work) -> dict[str, Any]:
    s, passes = config.stream, len(config.schedule.timesteps)
    runs = passes + (not s.pass_caches)
    full = (
        "_full" if "denoise_full" in work.programs else ""
    )  # engines of full rows alone, where there are any
    steady, fill = (
        _parts(
            work,
            gpu,
            {"begin": 1, f"denoise{kind}": passes} | ({} if s.pass_caches else {f"context{kind}": 1}),
        )
        for kind in (full, "")
    )
    decode = _parts(work, gpu, {"decode": config.stream.batch}) if config.vae else {}
    steps_s, fill_s, decode_s = (sum(part["seconds"] for part in p.values()) for p in (steady, fill, decode))
    stream_bytes = chunk_stream_bytes(config)
    stream_s = stream_bytes / (gpu.host_link * HOST_LINK_SHARE)
    steps_s, fill_s = max(steps_s, stream_s), max(fill_s, stream_s)
    video_s = s.chunk_frames * VAE_TEMPORAL_STRIDE / s.fps
    factor = video_s / (steps_s + decode_s)
    return {
        "step": {
            name: {field: value / runs for field, value in part.items()} for name, part in steady.items()
        },
        "stream_bytes": stream_bytes,
        "stream_s": stream_s,
        "step_s": steps_s / runs,
        "fill_step_s": fill_s / runs,
        "decode_s": decode_s,
        "chunk_s": steps_s + decode_s,
        "video_s": video_s,
        "real_time_factor": factor,
        "real_time": factor >= 1,
    }


def _parts(work: Work, gpu: Gpu, runs: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Return launches, FLOPs, bytes and seconds of so many runs of each program, by kind of launch."""
    parts: dict[str, dict[str, float]] = {}
    for program, times in runs.items():
        for call in work.programs[program]:
            calls = times * max(1, call.layers)
            for launch in work.counts[call.engine].launches:
                part = parts.setdefault(
                    _part_name(launch), dict.fromkeys(("launches", "flops", "bytes", "seconds"), 0.0)
                )
                part["launches"] += calls
                part["flops"] += calls * launch.flops
                part["bytes"] += calls * (launch.bytes_read + launch.bytes_written)
                part["seconds"] += calls * launch_seconds(launch, gpu)
    return dict(sorted(parts.items(), key=lambda pair: -pair[1]["seconds"]))


def _part_name(launch: Launch) -> str:
    if launch.kind in (ATTENTION, MASKED_ATTENTION, BF16_ATTENTION, FP8_ATTENTION):
        return CROSS_ATTENTION if "text_k" in launch.inputs else SELF_ATTENTION
    return OTHER_MATMUL if launch.kind == MATMUL and launch.dtype != torch.bfloat16 else launch.kind


def _prompt_entry(config: BuildConfig, buffers: tuple[Buffer, ...], work: Work) -> int:
    """Return the bytes that a session keeps of one prompt: a row's embeddings and what is made of them."""
    if config.text is None:
        return 0
    made = {
        ref.removeprefix("buffer:").partition("[")[0] for c in work.programs["prompt"] for ref in c.outputs
    }
    return sum(b.nbytes for b in buffers if b.name in made | {TEXT_BUFFER}) // config.stream.batch


def _notes(gpu: Gpu, config: BuildConfig) -> list[str]:
    notes = []
    if not gpu.measured:
        notes.append(f"not measured on this GPU: the H200's shares of the peak are taken for {gpu.title}")
    if config.stream.stream_cache:
        notes.append("streamed cache: one session has all of the host link")
    if config.fp8 and config.attention != "fp8":
        notes.append("fp8 matmuls: measured beside fp8 attention, not yet beside another")
    return notes


def _nbytes(argument: Argument) -> int:
    return prod(argument.shape) * argument.dtype.itemsize
