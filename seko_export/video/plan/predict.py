"""`seko-export plan`: estimates memory and time of a build on a GPU that need not be present.

Bytes are computed by the module `memory` from the build's table of buffers and the shapes of its weights. The module
`op_count` counts the work of the engines, and the module `seconds` turns the counts into seconds with the rates in
`gpus`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from seko_export.backends import export_backend
from seko_export.config.media import ClipConfig, HubertConfig
from seko_export.config.schedule import Schedule
from seko_export.config.video import VideoBuild
from seko_export.errors import UsageError
from seko_export.host.environment import Target
from seko_export.media.pieces import decode_parts
from seko_export.media.umt5.encoder import UMT5_XXL
from seko_export.media.vaes import vae_for
from seko_export.options.declaration import BuildOptions
from seko_export.options.resolve import resolve_build
from seko_export.roofline.gpus import Gpu, find_gpu
from seko_export.roofline.work import Work
from seko_export.video.plan.fit import fit, memory_of, what_fits
from seko_export.video.plan.memory import memory_report
from seko_export.video.plan.seconds import time_report
from seko_runtime.errors import UsageError as SessionUsageError
from seko_runtime.format.program_key import ProgramKey
from seko_runtime.video.schedule import warped_timesteps


@dataclass(frozen=True)
class PlanRequest:
    """The question that `seko-export plan` answers.

    Parameters
    ----------
    build : BuildOptions
        The build's options. Options that `plan` does not have keep their defaults.
    gpu : str
        Name of a GPU in `gpus.GPUS`.
    steps : int or None
        Number of denoise passes; default: the number of passes in the preset.
    fps : int or None
        Video frames per second that playback needs; default: the frame rate of the preset.
    """

    build: BuildOptions
    gpu: str
    steps: int | None = None
    fps: int | None = None


def predict(request: PlanRequest) -> dict[str, Any]:
    """Estimate memory and time of a build on a GPU.

    The first entries of the result repeat the request. The entries of the request are ``preset``, ``gpu``,
    ``gpu_title``, ``measured_gpu``, ``kv``, ``fp8``, ``kernels``, ``attention``, ``resident_window``, ``past_share``,
    ``ranks``, ``passes`` (denoise passes), ``stream`` and ``pool`` (``sessions`` and ``buckets``, or null).

    The entries for memory are in bytes, for the GPU of each rank. ``weight_bytes`` are shared by all sessions,
    ``call_bytes`` are allocated once in a pool, and ``session_bytes`` once for each session. ``peak_bytes`` is the sum
    for one session or for the whole pool, ``memory_bytes`` the size of the GPU's memory, and ``room_bytes`` what of it
    is left for them. ``fits`` states whether ``peak_bytes`` fit in ``room_bytes``, and ``sessions_fit`` is the number
    of sessions that fit. ``would_fit`` is the result of `what_fits` for a build that does not fit.

    For an offloaded cache ``host_bytes`` is the size of the cache in host memory, for all ranks together.
    ``stream_bytes`` are the bytes of the cache that a chunk moves over one GPU's link.

    The entries for time are in seconds, for the largest call of a pool. ``step`` is the mean of a chunk's passes, by
    kind of launch. ``stream_s`` is the time of ``stream_bytes`` over the host link, which runs in parallel with the
    steps, so that a step takes the longer of both times. Further times are ``step_s``, ``fill_step_s`` (a step while
    the cache fills), ``decode_s`` (decoding a chunk of all rows), ``encode_s`` (encoding the input video of a chunk of
    all rows, 0 without one) and ``chunk_s``. ``calls`` has these five times for each size of a pool's calls.
    ``video_s`` is the time for which a chunk plays.

    ``real_time_factor`` and ``real_time`` are for one session or for the whole pool. ``sessions_real_time`` is the
    number of sessions that run in real time. ``notes`` are sentences on what these figures do not include.

    Returns
    -------
    dict
        The report as plain data, with the entries for request, memory, time and real time.

    Raises
    ------
    UsageError
        If a GPU, preset or option value is unknown, or options contradict each other or the model; with the message of
        `seko-export build`.
    """
    gpu = find_gpu(request.gpu)
    if request.build.fp8 and not gpu.fp8:
        raise UsageError(f"--fp8 needs fp8 tensor cores, which --gpu {gpu.name} ({gpu.title}) lacks")

    def asked_config(build: BuildOptions) -> VideoBuild:
        return config_of(replace(request, build=build))[0]

    fitted = None
    if request.build.fit is not None:
        fitted = fit(request.build, memory_of(request.build.fit, gpu.arch), asked_config)
        request = replace(request, build=fitted.options)
    config, notes = config_of(request)
    notes = [*(() if fitted is None else fitted.notes), *notes]
    work = Work.of(config)
    memory = memory_report(config, gpu.memory_bytes, work)
    return (
        {
            "preset": config.model.name,
            "gpu": gpu.name,
            "gpu_title": gpu.title,
            "measured_gpu": gpu.measured,
            "kv": config.workload.kv_scheme,
            "fp8": request.build.fp8,
            "kernels": "fused" if config.target.fused else "plain",
            "attention": config.target.attention,
            "resident_window": config.target.resident_window,
            "past_share": config.target.past_share,
            "ranks": config.target.ranks,
            "passes": len(config.workload.schedule.timesteps),
            "stream": asdict(config.workload.stream),
            "pool": None if config.workload.pool is None else asdict(config.workload.pool),
        }
        | memory
        | {"would_fit": [] if memory["fits"] else what_fits(request.build, gpu.memory_bytes, asked_config)}
        | time_report(config, gpu, work, memory["sessions_fit"])
        | {"notes": [*notes, *_notes(request, gpu, config, work)]}
    )


def config_of(request: PlanRequest) -> tuple[VideoBuild, list[str]]:
    """Return the build configuration of a request, and notes for the user on assumed sizes."""
    machine = Target("cuda", find_gpu(request.gpu).arch)
    # a text encoder that no file names is assumed below
    built = resolve_build(replace(request.build, offload_text=False), machine=machine).config
    if request.fps is not None:
        built = built.changed(stream=replace(built.workload.stream, fps=request.fps))
    notes = []
    if built.workload.vae is None and not request.build.no_vae:
        stream = built.workload.stream
        vae = vae_for(built.model.out_channels, stream.spatial_stride, stream.temporal_stride)
        if vae is not None:
            built = built.changed(vae=vae)
        else:
            notes.append(
                f"no VAE counted: none is known of {built.model.out_channels} latent channels and strides of "
                f"{stream.spatial_stride} pixels and {stream.temporal_stride} frames, as {built.model.name} gives them"
            )
    if built.workload.text is None and built.model.takes_text and not request.build.no_text:
        if built.model.text_dim == UMT5_XXL.dim:
            built = built.changed(text=UMT5_XXL)
        else:
            notes.append(
                f"no text encoder counted: none is known that is {built.model.text_dim} wide, as "
                f"{built.model.name} takes it"
            )
    heard = built.model.sound_width
    if built.workload.audio is None and heard is not None:
        if heard == HubertConfig().dim:
            built = built.changed(audio=HubertConfig())
        else:
            notes.append(
                f"no audio encoder counted: none is known that is {heard} wide, as {built.model.name} takes it"
            )
    if request.build.offload_text:
        built = built.changed(offload_text=True)
    picture_features = built.model.picture_features
    if (
        built.workload.image is None
        and picture_features is not None
        and picture_features[1] == ClipConfig().dim
    ):
        built = built.changed(image=ClipConfig())
    if request.steps is not None:
        asked = request.build
        for option, value in (
            ("--timesteps", asked.timesteps),
            ("--first-timesteps", asked.first_timesteps),
            ("--sigmas", asked.sigmas),
            ("--renoise-sigmas", asked.renoise_sigmas),
            ("--rolling", built.workload.stream.rolling or None),
        ):
            if value is not None:
                raise UsageError(
                    f"--steps {request.steps} contradicts {option}, which says the passes: leave --steps out"
                )
        # only the number of passes matters here, not their timesteps
        shift = built.workload.schedule.shift or 1.0
        try:
            timesteps = warped_timesteps(request.steps, shift)
        except SessionUsageError as fault:
            raise UsageError(str(fault)) from None
        schedule = Schedule(
            timesteps,
            built.workload.schedule.context_timestep,
            shift,
            sampler=built.workload.schedule.sampler,
        )
        built = built.changed(schedule=schedule)
    return built, notes


def _notes(request: PlanRequest, gpu: Gpu, config: VideoBuild, work: Work) -> list[str]:
    notes = []
    if export_backend(request.build.backend).capabilities.unmeasured:
        kernels = "AOTInductor's fused layers" if config.target.fused else "torch's plain kernels"
        notes.append(
            f"no engine of --backend {request.build.backend} has run: scratch and times are those of {kernels}"
        )
    if not gpu.measured:
        notes.append(f"not measured on this GPU: the H200's shares of the peak are taken for {gpu.title}")
    if config.target.ranks > 1:
        link = "NVLink" if gpu.peer_link > gpu.host_link else "PCIe, at best"
        notes.append(
            f"{config.target.ranks} GPUs of one box: memory is the first one's, the others hold no text or picture "
            f"encoder; collectives go over {link} at an assumed rate"
        )
    if config.no_shared_decoding is not None:
        notes.append(f"each GPU decodes whole pictures: {config.no_shared_decoding}")
    parts = decode_parts(config)
    if parts > 1:
        frames = config.workload.stream.chunk_frames // parts
        notes.append(
            f"a chunk is decoded in {parts} calls of {frames} latent frames, which bounds their scratch"
        )
    if config.workload.stream.offload_cache:
        link = "the host link" if config.target.ranks == 1 else "each GPU's host link"
        notes.append(f"offloaded cache: one session has all of {link}")
    if config.workload.pool is not None and any(ProgramKey.parse(name).full for name in work.programs):
        notes.append("a call of both full and filling rows is two launches, and takes the time of two")
    if config.target.fp8 and not config.target.attention_kind.past_in_8_bits:
        notes.append("fp8 matmuls: measured beside fp8 attention, not yet beside another")
    return notes
