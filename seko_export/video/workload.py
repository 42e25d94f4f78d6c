"""The video workload (the code for video models) on the build machine; see `workloads.base.ExportWorkload`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from seko_export.config.model import ModelConfig
from seko_export.families.registry import family_of, graph_of, video_family_of
from seko_export.options.checks import check_video_options
from seko_export.options.declaration import BuildOptions
from seko_export.workloads.base import UNVERIFIED, BuildResult, ExportWorkload, Need, Recording
from seko_runtime.video.manifest import Golden, VideoManifest, VideoWorkload

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.config.video import VideoBuild
    from seko_export.engines.piece import Piece
    from seko_export.engines.weight_source import WeightSource
    from seko_export.families.base import MediaTensors
    from seko_export.host.environment import Target
    from seko_export.host.progress import Progress
    from seko_export.media.sources import MediaSources
    from seko_export.options.resolved import ResolvedBuild
    from seko_export.video.recording import Record
    from seko_runtime.executor.resolved import Programs
    from seko_runtime.format.manifest import ControlSpec, Manifest


@dataclass(frozen=True)
class VideoBuildResult(BuildResult):
    """The result of a video build.

    Parameters
    ----------
    kv : dict
        Figures of the KV cache: ``scheme``, ``pool_bytes``, ``bf16_pool_bytes``, ``bits_per_number``; for a quantised
        scheme also ``error_vs_exact``, the relative error of each recorded chunk.
    golden_error : float or None
        Largest relative error of the engines against the eager model over the recorded chunks. None if the engines
        could not run, because the build is for GPUs that are not in this machine, or for more ranks than the machine
        has GPUs.
    golden_cache_error : float or None
        Largest error of a cached token after the chunks; see `seko_runtime.video.golden.cache_error`.
    golden_video_error : float or None
        Root mean square difference of the video frames in the worst chunk, in levels of 255; None without a VAE.
    golden_rounding : float or None
        Relative error between two runs of the eager model, the second with changed last bits; a reference for
        ``golden_error``. The error is the largest over the recorded chunks; with an exact cache it is that of the first
        chunk. None without recorded chunks.
    """

    kv: dict[str, Any]
    golden_error: float | None = None
    golden_cache_error: float | None = None
    golden_video_error: float | None = None
    golden_rounding: float | None = None

    def lines(self) -> Iterator[str]:
        """Yield lines of text that describe the result of the build for a person."""
        yield from super().lines()
        kv = self.kv
        share = kv["pool_bytes"] / kv["bf16_pool_bytes"]
        lossy = kv.get("error_vs_exact", ())
        cost = f"; chunks at most {max(lossy):.4f} off those over an exact cache" if lossy else ""
        yield f"KV pool   {kv['pool_bytes']} bytes as {kv['scheme']}, {share:.4f} of bf16{cost}"
        if self.kernels == "fused" or self.device == "cuda":
            yield f"kernels   {self.kernels}, attention {self.attention}"
        if self.golden_error is None:
            yield UNVERIFIED
            return
        video = self.golden_video_error
        pictures = "" if video is None else f", video frames {video:.2f} levels of 255"
        yield f"verified  engines against the eager model: relative error {self.golden_error:.2e}{pictures}"
        if self.golden_rounding is not None:
            where = "" if lossy else " in the first chunk"
            yield f"          other last bits alone move the eager model by {self.golden_rounding:.2e}{where}"


class VideoExport(ExportWorkload["VideoBuild"]):
    """The workload of causal video transformers, which denoise frames chunk by chunk over a KV cache of earlier
    frames."""

    name = ModelConfig.workload
    manifest = VideoManifest
    whole_programs = ("denoise", "context")
    options = BuildOptions

    def presets(self) -> dict[str, dict[str, Any]]:
        """Return the sample and the presets of all families, with facts and open questions about each."""
        from seko_export.video.preset_report import preset_report

        return preset_report()

    def preset_lines(self, name: str, preset: Mapping[str, Any]) -> Iterator[str]:
        """Yield a preset's sizes and stream, and the facts and open questions about it."""
        from seko_export.video.preset_report import preset_lines

        return preset_lines(name, preset)

    def check_options(self, options: BuildOptions) -> None:
        """Refuse unknown names and impossible layouts."""
        check_video_options(options)

    def resolve_options(
        self, options: BuildOptions, *, machine: Target | None = None
    ) -> ResolvedBuild[VideoBuild]:
        """Return the configuration and input files of a build; see `resolve_build`. Options that ``--fit`` adds have a
        note each."""
        from seko_export.options.resolve import resolve_build

        if options.fit is None:
            return resolve_build(options, machine=machine)
        from seko_export.backends import export_backend
        from seko_export.host.environment import resolve_target
        from seko_export.video.plan.fit import fit, memory_of

        def config_of(asked: BuildOptions) -> VideoBuild:
            return resolve_build(asked, machine=machine).config

        cross = export_backend(options.backend).capabilities.cross_targets
        built = machine or resolve_target(options.target, cross)
        memory = memory_of(options.fit, built.arch if built.device == "cuda" else None)
        fitted = fit(options, memory, config_of)
        resolved = resolve_build(fitted.options, machine=machine)
        return replace(resolved, notes=(*fitted.notes, *resolved.notes))

    def inspect(self, path: Path, gpu: str | None) -> dict[str, Any]:
        """Return the report on a checkpoint, a LoRA or a VAE."""
        from seko_export.video.inspection import inspect_checkpoint

        return inspect_checkpoint(path, gpu)

    def plan(self, options: BuildOptions, gpu: str, *, steps: int | None, fps: int | None) -> dict[str, Any]:
        """Return memory in bytes and times in seconds; see `video.plan.predict.predict`."""
        from seko_export.video.plan.predict import PlanRequest, predict

        return predict(PlanRequest(options, gpu, steps, fps))

    def plan_lines(self, report: Mapping[str, Any]) -> Iterator[str]:
        """Yield the report of `plan` as tables."""
        from seko_export.video.plan.table import show

        yield show(report)

    def least_bytes(self, config: VideoBuild) -> int:
        """Return what `plan` counts for the build, less what it cannot know for certain."""
        from seko_export.video.plan.memory import least_bytes

        return least_bytes(config)

    def describe(self, config: VideoBuild, golden: Golden | None) -> VideoWorkload:
        """Return the manifest's description of layout, schedule, cache format and recorded chunks."""
        from seko_export.video.description import video_workload

        return video_workload(config, golden)

    def describe_model(self, config: VideoBuild) -> Mapping[str, object]:
        """Return the dimensions of the transformer and of the models around it."""
        around = {
            "text_encoder": config.workload.text,
            "vae": config.workload.vae,
            "vae_encoder": config.workload.vae_encoder,
            "audio_encoder": config.workload.audio,
            "image_encoder": config.workload.image,
        }
        return {
            **asdict(config.model),
            "head_dim": config.model.head_dim,
            "dtype": str(config.target.dtype).split(".")[1],
            **{name: asdict(model) for name, model in around.items() if model is not None},
        }

    def controls(self, config: VideoBuild, manifest: Manifest) -> tuple[ControlSpec, ...]:
        """Return the controls that the family declares."""
        return video_family_of(config).controls(config, cast(VideoManifest, manifest))

    def artifact_name(self, config: VideoBuild, arch: str) -> str:
        """Return the artifact's default name, from model, cache format and target machine."""
        return f"{config.model.name}-{config.workload.kv_scheme}-{arch}"

    def resolve(self, manifest: Manifest) -> Programs:
        """Return the programs of a video manifest, checked against the workload's contract."""
        from seko_runtime.video.contract import resolve_video

        return resolve_video(cast(VideoManifest, manifest))

    def needs(self, config: VideoBuild) -> Iterator[Need]:
        """Yield the features, such as cache layouts, for which the build needs support from the backend."""
        stream, vae = config.workload.stream, config.workload.vae
        for asked, option, what in (
            (stream.offload_cache, "--offload-cache", "offloaded caches"),
            (config.target.offload_text, "--offload-text", "weights on the host"),
            (config.target.offload_layers, "--offload-layers", "weights on the host"),
            (stream.pass_caches, "--pass-caches", "caches of each pass"),
            (bool(stream.layer_rings), "--layer-rings", "layers of different rings"),
            (stream.window_positions, "--window-positions", "positions within the window"),
            (stream.rolling, "--rolling", "passes over several chunks"),
            (bool(stream.sink_average), "--sink-average", "averaged sinks"),
            (bool(stream.reference_frames), "--reference-frames", "reference frames"),
            (vae is not None and vae.computes_fp8, "--vae-fp8", "fp8 convolutions"),
            (stream.strength is not None, "--strength", "input video"),
        ):
            if asked:
                yield Need(option, what)

    def cache_format(self, config: VideoBuild) -> str:
        """Return the name of the KV scheme; an unquantised cache is called ``bf16`` on every device."""
        scheme = config.workload.kv_scheme
        return "bf16" if scheme == config.exact_scheme else scheme

    def notes(self, config: VideoBuild) -> Iterator[str]:
        """Yield notes for the user. If each rank (GPU) decodes whole pictures, a note gives the reason."""
        if config.no_shared_decoding is not None:
            yield f"each rank decodes whole pictures: {config.no_shared_decoding}"

    def open_media(self, config: VideoBuild, media: MediaSources) -> MediaTensors:
        """Open the weights of VAE and encoders; refuse a tokenizer with other ids than the text encoder."""
        from seko_export.video.media import open_media, prompt_ids
        from seko_export.video.recording import GOLDEN_PROMPT

        if media.tokenizer is not None:
            prompt_ids(media.tokenizer, config, GOLDEN_PROMPT)
        return open_media(media, config)

    def tables(self, config: VideoBuild) -> Mapping[str, Tensor]:
        """Return the tables of timesteps and noise levels of a chunk's passes."""
        return config.workload.schedule.tables(config.as_batch.workload.stream)

    def record(
        self,
        config: VideoBuild,
        weights: Mapping[str, Tensor],
        checkpoint: WeightSource,
        media: MediaSources,
        progress: Progress,
        wait_for_kernels: Callable[[], None],
    ) -> Record:
        """Record two chunks; for a quantised cache first calibrate the scales, on the model with an exact cache."""
        from seko_export.video.media import prompt_ids
        from seko_export.video.recording import GOLDEN_PROMPT, record

        ids = None if media.tokenizer is None else prompt_ids(media.tokenizer, config, GOLDEN_PROMPT)
        if config.target.fp8:  # of a large model as long as reading it the first time
            progress("reading the weights of the exact model", 0, 1)
        eager = {**weights, **_exact_weights(config, weights, checkpoint)}
        return record(config.as_batch, eager, progress, ids, wait_for_kernels)

    def kernel_compiler(self, config: VideoBuild) -> Callable[[], None] | None:
        """Return what compiles the layers' kernels of a build for this machine's GPU: the exact model calls none."""
        if not config.target.fused or config.target.eager_device != "cuda":
            return None
        return partial(_compile_kernels, config.as_batch)

    def uncalibrated(self, config: VideoBuild) -> Mapping[str, Tensor]:
        """Return a quantised cache's scales for channels whose values lie in [-1, 1]."""
        from seko_export.video.calibration import uncalibrated_scales

        return {} if config.lossless else uncalibrated_scales(config)

    def recording_bytes(self, config: VideoBuild) -> int:
        """Return the further bytes that recording needs: unquantised copies of weights that the artifact holds in
        fp8, and on a CPU the exact cache."""
        from seko_export.goldens.placement import device_bytes
        from seko_export.roofline.work import weight_sizes

        cache = 0
        if config.target.eager_device == "cpu":
            cache = device_bytes(graph_of(config.as_exact.as_batch).buffers)
        if not config.target.fp8:
            return cache
        own = weight_sizes(graph_of(config).pieces)
        exact = weight_sizes(_exact_pieces(config, own))
        return cache + sum(size for name, size in exact.items() if name not in own)

    def write_files(self, folder: Path, config: VideoBuild, media: MediaSources, *, measured: bool) -> None:
        """Write the tokenizer, the viewer's pictures, and the table of kernels if the build has fused layers."""
        from seko_export.engines.kernel_table import write_kernel_table
        from seko_export.media.viewer import read_viewer, write_viewer
        from seko_export.video.media import write_tokenizer

        write_tokenizer(folder, media.tokenizer)
        if media.viewer is not None:
            write_viewer(folder, read_viewer(media.viewer))
        if measured:
            write_kernel_table(folder, config)

    def warm_up(self, folder: Path) -> None:
        """Make chunks until the ring has wrapped around, with a prompt and a picture if the artifact takes them."""
        import numpy as np

        from seko_runtime import open_artifact
        from seko_runtime.video.artifact import video_artifact
        from seko_runtime.video.contract import PICTURE_CHANNELS, start_pictures

        with open_artifact(folder) as opened:
            artifact = video_artifact(opened)
            manifest = artifact.manifest
            stream, golden, video = (
                manifest.workload.stream,
                manifest.workload.golden,
                manifest.workload.video,
            )
            options: dict[str, Any] = {}  # so that the engines for text and pictures run, too
            if manifest.workload.text is not None and golden is not None:
                options["prompt"] = golden.prompt
            if video is not None and {"encode", "condition"} & manifest.programs.keys():
                count = start_pictures(manifest)
                pictures = np.zeros((count, video.height, video.width, PICTURE_CHANNELS), np.uint8)
                options["image"] = pictures if count > 1 else pictures[0]
            with artifact.open_together(**options) as session:
                fill = -(-stream.cache_frames // stream.chunk_frames) + 1
                for number in range(fill):
                    session.run_chunk(artifact.golden_inputs(number, None))
                session.run_chunk(artifact.golden_inputs(fill, None)).to_host()

    def result(
        self,
        result: BuildResult,
        config: VideoBuild,
        manifest: Manifest,
        recording: Recording | None,
        report: Mapping[str, Any] | None,
    ) -> VideoBuildResult:
        """Return the build's result with the cache's size and the engines' errors against the recorded chunks."""
        del config
        recorded = cast("Record | None", recording)
        errors = [] if report is None else report["errors"]
        videos = [row["video"] for row in errors if row.get("video") is not None]
        kv = asdict(cast(VideoManifest, manifest).workload.kv)
        if recorded is not None and recorded.exact:
            kv["error_vs_exact"] = recorded.error_vs_exact
        return VideoBuildResult(
            **vars(result),
            kv=kv,
            golden_error=None if report is None else report["worst"]["golden"],
            golden_cache_error=max((row["cache"] for row in errors), default=None),
            golden_video_error=max(videos, default=None),
            golden_rounding=None if recorded is None else recorded.rounding,
        )


def _exact_weights(
    config: VideoBuild, known: Mapping[str, Tensor], checkpoint: WeightSource
) -> dict[str, Tensor]:
    """Return the weights of layers that only the exact model needs, because the artifact holds them in fp8."""
    if not config.target.fp8:
        return {}
    exact = family_of(config).weights(_exact_pieces(config, known), checkpoint)
    return {name: tensor for name, tensor in exact if name not in known}


def _compile_kernels(config: VideoBuild) -> None:
    from seko_export.goldens.eager import compile_kernels

    role = video_family_of(config).cache_probe(config).role
    layers = (piece for piece in graph_of(config).pieces.values() if piece.key.role == role)
    compile_kernels(layers, config.target.eager_device)


def _exact_pieces(config: VideoBuild, known: Container[str]) -> dict[str, Piece]:
    """Return the exact model's engines that need weights whose names are not in ``known``. These are engines of layers:
    the weights of a VAE are the same in both models."""
    from seko_export.roofline.work import weight_sizes

    pieces = graph_of(config.as_exact).pieces
    return {
        name: piece
        for name, piece in pieces.items()
        if any(weight not in known for weight in weight_sizes({name: piece}))
    }


WORKLOAD = VideoExport()
