"""`seko-export plan`: estimates memory and time of a build on a GPU that need not be present.

Bytes come from the buffer table and the weights' shapes of the build (`memory.py`), seconds from its engines' work
(`op_count.py`) and the rates in `gpus.py` (`seconds.py`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from seko_export.config.build import BuildConfig
from seko_export.config.schedule import Schedule
from seko_export.errors import UsageError
from seko_export.host.environment import Target
from seko_export.media.umt5 import UMT5_XXL
from seko_export.media.wan_vae import VAE_PRESETS
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_export.roofline.gpus import Gpu, find_gpu
from seko_export.roofline.memory import memory_report
from seko_export.roofline.seconds import time_report
from seko_export.roofline.work import Work
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.video.schedule import warped_timesteps


@dataclass(frozen=True)
class Wish:
    """The question that `seko-export plan` answers.

    Parameters
    ----------
    build : BuildOptions
        Options that `plan` takes; the others keep their defaults.
    gpu : str
        A name of `gpus.GPUS`.
    steps : int or None
        Denoise passes; default: the preset's.
    fps : int or None
        Video frames per second that playback needs; default: the preset's.
    """

    build: BuildOptions
    gpu: str
    steps: int | None = None
    fps: int | None = None


def predict(wish: Wish) -> dict[str, Any]:
    """Estimate what a build takes of a GPU.

    Returns
    -------
    dict
        Plain data. What was asked: ``preset``, ``gpu``, ``gpu_title``, ``measured_gpu``, ``kv``, ``fp8``, ``kernels``,
        ``attention``, ``resident_window``, ``passes`` (denoise passes), ``stream``, ``pool`` (``sessions`` and
        ``buckets``, or null). Bytes: ``weight_bytes`` (shared by all sessions), ``call_bytes`` (what a pool has once),
        ``session_bytes``, ``peak_bytes`` of one session or of the whole pool, ``memory_bytes`` of the GPU, ``fits``,
        ``sessions_fit``; ``host_bytes`` of a session's streamed cache, ``stream_bytes`` that a chunk moves of it.
        Seconds, of a pool's largest call: ``step`` (the mean of a chunk's passes, by kind of launch), ``stream_s``
        (those bytes over the host link, beside the steps: a step takes the longer of both), ``step_s``,
        ``fill_step_s`` (while the cache fills), ``decode_s`` (a chunk's video, all rows), ``chunk_s``; ``calls`` (the
        last four of each size of a pool's calls); ``video_s`` (how long a chunk plays). ``real_time_factor`` and
        ``real_time`` of one session or of the whole pool; ``sessions_real_time``. ``notes``: sentences on what they do
        not say.

    Raises
    ------
    UsageError
        If a name is unknown, or the options contradict each other or do not fit, as `seko-export build` says it.
    """
    gpu = find_gpu(wish.gpu)
    if wish.build.fp8 and not gpu.fp8:
        raise UsageError(f"--fp8 needs fp8 tensor cores, which --gpu {gpu.name} ({gpu.title}) has not")
    config, notes = config_of(wish)
    work = Work.of(config)
    memory = memory_report(config, gpu, work)
    return (
        {
            "preset": config.model.name,
            "gpu": gpu.name,
            "gpu_title": gpu.title,
            "measured_gpu": gpu.measured,
            "kv": config.kv_scheme,
            "fp8": wish.build.fp8,
            "kernels": "fused" if config.fused else "plain",
            "attention": config.attention,
            "resident_window": config.resident_window,
            "passes": len(config.schedule.timesteps),
            "stream": asdict(config.stream),
            "pool": None if config.pool is None else asdict(config.pool),
        }
        | memory
        | time_report(config, gpu, work, memory["sessions_fit"])
        | {"notes": [*notes, *_notes(gpu, config, work)]}
    )


def config_of(wish: Wish) -> tuple[BuildConfig, list[str]]:
    """Return the configuration that a wish means on a GPU, and notes for the reader."""
    machine = Target("cuda", find_gpu(wish.gpu).arch)
    built = resolve_build(wish.build, machine=machine).config
    if wish.fps is not None:
        built = replace(built, stream=replace(built.stream, fps=wish.fps))
    notes = []
    if built.vae is None and not wish.build.no_vae:
        vae = VAE_PRESETS["wan-2.1"]
        if built.model.out_channels == vae.z_dim:
            built = replace(built, vae=vae)
        else:
            notes.append(
                f"no VAE counted: none is known of {built.model.out_channels} latent channels, as "
                f"{built.model.name} gives them"
            )
    if built.text is None and not wish.build.no_text:
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


def _notes(gpu: Gpu, config: BuildConfig, work: Work) -> list[str]:
    notes = []
    if not gpu.measured:
        notes.append(f"not measured on this GPU: the H200's shares of the peak are taken for {gpu.title}")
    if config.stream.offload_cache:
        notes.append("streamed cache: one session has all of the host link")
    if config.pool is not None and any(ProgramKey.parse(name).full for name in work.programs):
        notes.append("a call of both full and filling rows is two launches, and takes the time of two")
    if config.fp8 and config.attention != "fp8":
        notes.append("fp8 matmuls: measured beside fp8 attention, not yet beside another")
    return notes
