"""`seko-export plan`: estimates memory and time of a build on a GPU that need not be present.

Bytes are computed by the module `memory` from the build's table of buffers and the shapes of its weights. The module
`op_count` counts the work of the engines, and the module `seconds` turns the counts into seconds with the rates in
`gpus`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
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
from seko_export.video.plan.fit import fit, memory_of
from seko_export.video.plan.memory import memory_report
from seko_export.video.plan.seconds import time_report
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
    ``gpu_title``, ``measured_gpu``, ``kv``, ``fp8``, ``kernels``, ``attention``, ``resident_window``, ``ranks``,
    ``passes`` (denoise passes), ``stream`` and ``pool`` (``sessions`` and ``buckets``, or null).

    The entries for memory are in bytes, for the GPU of each rank. ``weight_bytes`` are shared by all sessions,
    ``call_bytes`` are allocated once in a pool, and ``session_bytes`` once for each session. ``peak_bytes`` is the sum
    for one session or for the whole pool, and ``memory_bytes`` the size of the GPU's memory. ``fits`` states whether
    ``peak_bytes`` fit in ``memory_bytes``, and ``sessions_fit`` is the number of sessions that fit. ``would_fit`` is
    the result of `what_fits` for a build that does not fit.

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
    fitted = None
    if request.build.fit is not None:

        def asked_config(build: BuildOptions) -> VideoBuild:
            return config_of(replace(request, build=build))[0]

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
            "ranks": config.target.ranks,
            "passes": len(config.workload.schedule.timesteps),
            "stream": asdict(config.workload.stream),
            "pool": None if config.workload.pool is None else asdict(config.workload.pool),
        }
        | memory
        | {"would_fit": [] if memory["fits"] else what_fits(request, memory)}
        | time_report(config, gpu, work, memory["sessions_fit"])
        | {"notes": [*notes, *_notes(request, gpu, config, work)]}
    )


def what_fits(request: PlanRequest, memory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the smallest set of option changes with which a build fits on its GPU.

    Each of ``--kv fp4``, ``--fp8``, ``--offload-text``, ``--no-text``, fewer ring frames, ``--decode-frames 1`` and
    ``--no-vae`` is tried alone, then pairs of
    these changes, and so on. Combinations whose savings cannot suffice are skipped.

    Parameters
    ----------
    request : PlanRequest
        The request for a build that needs more memory than the GPU has.
    memory : mapping
        The `memory_report` of the request's build.

    Returns
    -------
    list of dict
        ``options`` to add, as the command line spells options, and the build's ``peak_bytes`` with these options. Empty
        if no combination fits.
    """
    changes = _changes(request, memory)
    excess = memory["peak_bytes"] - memory["memory_bytes"]
    for count in range(1, len({change.of for change in changes}) + 1):
        fitting_changes: list[dict[str, Any]] = []
        fitting: set[frozenset[str]] = set()
        for chosen in combinations(changes, count):
            kinds = frozenset(change.of for change in chosen)
            if len(kinds) < count or kinds in fitting or sum(change.saved for change in chosen) < excess:
                continue
            peak = _peak_with(request, chosen)
            if peak is not None and peak <= memory["memory_bytes"]:
                fitting.add(kinds)
                fitting_changes.append(
                    {"options": " ".join(change.option for change in chosen), "peak_bytes": peak}
                )
        if fitting_changes:
            return fitting_changes
    return []


@dataclass(frozen=True)
class _Change:
    """An option that saves memory: its group of alternatives, its spelling, its fields, and the most bytes that it
    saves."""

    of: str
    option: str
    fields: Mapping[str, Any]
    saved: float


def _changes(request: PlanRequest, memory: Mapping[str, Any]) -> list[_Change]:
    build, weights, session = request.build, memory["weight_bytes"], memory["session_bytes"]
    rows = 1 if build.sessions is None else build.sessions
    kv = rows * (session["kv"] + session["window"] + session["scratch_step"])
    kv += sum(memory["call_bytes"].get(name, 0) for name in ("kv", "window", "scratch_step"))
    changes = []
    if not build.fp4_kv and build.kv != "fp4":
        changes.append(_Change("kv", "--kv fp4", {"kv": "fp4", "fp4_kv": False}, 0.75 * kv))
    if not build.fp8 and find_gpu(request.gpu).fp8:
        changes.append(_Change("fp8", "--fp8", {"fp8": True}, 0.5 * weights["transformer"]))
    if weights["text"]:
        changes.append(_Change("text", "--offload-text", {"offload_text": True}, weights["text"]))
        prompts = rows * (session["prompt_cache"] + session["scratch_prompt"])
        prompts += sum(memory["call_bytes"].values())
        changes.append(_Change("text", "--no-text", {"no_text": True}, weights["text"] + prompts))
    stream = config_of(request)[0].workload.stream
    least = max(stream.chunk_frames, stream.sink_frames)
    if not stream.layer_rings:
        rings = {stream.ring_frames * part // 4 for part in (3, 2, 1)}
        for ring in sorted(
            (frames for frames in rings if least <= frames < stream.ring_frames), reverse=True
        ):
            saved = kv * (stream.ring_frames - ring) / stream.cache_frames
            changes.append(_Change("ring", f"--ring-frames {ring}", {"ring_frames": ring}, saved))
    if weights["vae"]:
        parts = rows * session["scratch_decode"] + memory["call_bytes"].get("scratch_decode", 0)
        if build.decode_frames is None and stream.chunk_frames > 1:
            changes.append(_Change("vae", "--decode-frames 1", {"decode_frames": 1}, parts))
        video = rows * (session["decode"] + session["scratch_decode"] + session["scratch_prompt"])
        video += sum(memory["call_bytes"].values())
        changes.append(_Change("vae", "--no-vae", {"no_vae": True}, weights["vae"] + video))
    return changes


def _peak_with(request: PlanRequest, changes: Sequence[_Change]) -> int | None:
    """Return the number of bytes that a request needs with these changes; None if the options contradict each other."""
    fields = {name: value for change in changes for name, value in change.fields.items()}
    try:
        config, _ = config_of(replace(request, build=replace(request.build, **fields)))
    except UsageError:
        return None
    peak: int = memory_report(config, find_gpu(request.gpu).memory_bytes, Work.of(config))["peak_bytes"]
    return peak


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
        # only the number of passes matters here, not their timesteps
        shift = built.workload.schedule.shift or 1.0
        schedule = Schedule(
            warped_timesteps(request.steps, shift), built.workload.schedule.context_timestep, shift
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
