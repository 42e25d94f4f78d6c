"""The speech workload (the code for models that speak) on the build machine; see `workloads.base.ExportWorkload`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from seko_export.errors import UsageError
from seko_export.families.registry import family_of, graph_of
from seko_export.families.speech.config import SpeechBuild, SpeechModel
from seko_export.families.speech.family import speech_presets
from seko_export.options.checks import check_names
from seko_export.roofline.gpus import find_gpu
from seko_export.speech.options import SpeechOptions
from seko_export.workloads.base import UNVERIFIED, BuildResult, ExportWorkload, Recording
from seko_runtime import open_artifact
from seko_runtime.speech.manifest import Golden, SpeechManifest, SpeechWorkload

if TYPE_CHECKING:
    from torch import Tensor

    from seko_export.engines.weight_source import WeightSource
    from seko_export.host.environment import Target
    from seko_export.host.progress import Progress
    from seko_export.media.sources import MediaSources
    from seko_export.options.declaration import BuildOptions
    from seko_export.options.resolved import ResolvedBuild
    from seko_export.speech.recording import SpeechRecord
    from seko_runtime.executor.resolved import Programs
    from seko_runtime.format.manifest import Manifest

# What config.json has for models of any version of VoxCPM, of which the family builds some.
_SECTIONS = {"lm_config", "encoder_config", "dit_config"}


@dataclass(frozen=True)
class SpeechBuildResult(BuildResult):
    """The result of a speech build.

    Parameters
    ----------
    kv : dict
        Figures of the KV caches: ``scheme``, ``pool_bytes``, ``bf16_pool_bytes``, ``bits_per_number``; for quantised
        caches or weights also ``error_vs_exact``, the relative error of each recorded result.
    golden_error : float or None
        Largest relative error of the engines against the eager model over recorded tensors; None for a build for GPUs
        that are not in this machine, whose engines have not run.
    golden_errors : dict or None
        Largest relative error of each recorded result; None where ``golden_error`` is None.
    golden_rounding : dict or None
        Error of each result of the eager model if the last bits of each layer's output are changed; None without
        recorded steps.
    """

    kv: dict[str, Any]
    golden_error: float | None = None
    golden_errors: dict[str, float] | None = None
    golden_rounding: dict[str, float] | None = None

    def lines(self) -> Iterator[str]:
        """Yield lines of text that describe the result of the build for a person."""
        yield from super().lines()
        kv = self.kv
        share = kv["pool_bytes"] / kv["bf16_pool_bytes"]
        yield f"caches    {kv['pool_bytes']} bytes as {kv['scheme']}, {share:.4f} of bf16"
        lossy = kv.get("error_vs_exact", {})
        if lossy:
            errors = ", ".join(f"{name} {error:.2e}" for name, error in lossy.items())
            yield f"          against exact caches and weights, each step from the same states: {errors}"
        if self.golden_error is None:
            yield UNVERIFIED
            return
        yield f"verified  engines against the eager model: relative error {self.golden_error:.2e}"
        rounding = self.golden_rounding or {}
        for name, error in (self.golden_errors or {}).items():
            beside = (
                f"; other last bits in each eager layer: {rounding[name]:.2e}" if name in rounding else ""
            )
            yield f"          {name} {error:.2e}{beside}"


class SpeechExport(ExportWorkload[SpeechBuild]):
    """The workload of speech models, which make sound patch by patch over the KV caches of two language models."""

    name = SpeechModel.workload
    manifest = SpeechManifest
    options = SpeechOptions

    def recognises(self, config_json: Mapping[str, Any]) -> bool:
        """Return whether a config.json describes a model that speaks, of a known family or of one with its sections."""
        named = {model.family for model in speech_presets().values()}
        return config_json.get("architecture") in named or config_json.keys() >= _SECTIONS

    def check_options(self, options: BuildOptions) -> None:
        """Refuse unknown names, and a model's folder that is named twice."""
        check_names(options)
        if options.checkpoint is not None and options.model_folder is not None:
            raise UsageError(
                "a speech model is one folder: give it as CHECKPOINT or with --model-folder, not both"
            )

    def resolve_options(
        self, options: BuildOptions, *, machine: Target | None = None
    ) -> ResolvedBuild[SpeechBuild]:
        """Return the configuration and input files of a build; see `resolve_speech`."""
        from seko_export.speech.resolve import resolve_speech

        return resolve_speech(options, machine=machine)

    def inspect(self, path: Path, gpu: str | None) -> dict[str, Any]:
        """Return the report on the folder of a model, with the name of a GPU also the bytes of a build for one session
        on this GPU."""
        from seko_export.speech.inspection import inspect_speech

        report = inspect_speech(path)
        if gpu is not None:
            plan, card = self.plan(SpeechOptions(path), gpu, steps=None, fps=None), find_gpu(gpu)
            used = plan["bytes"]
            report["gpu"] = {
                "name": card.title,
                "weight_bytes": used["weights"],
                "cache_bytes": used["caches"],
                "peak_bytes": used["weights"] + used["caches"] + used["other buffers"],
                "memory_bytes": card.memory_bytes,
                "fits": plan["fits"],
            }
        return report

    def plan(self, options: BuildOptions, gpu: str, *, steps: int | None, fps: int | None) -> dict[str, Any]:
        """Return memory and step times of a build; ``steps`` are solver steps of a patch, by default the options'."""
        from seko_export.host.environment import Target
        from seko_export.speech.plan import report

        if fps is not None:
            raise UsageError(
                f"--fps {fps} belongs to models of video, and this is one of speech: leave it out"
            )
        card, asked = find_gpu(gpu), SpeechOptions.of(options)
        if steps is not None:
            asked = replace(asked, steps=steps)
        return report(self.resolve_options(asked, machine=Target("cuda", card.arch)).config, card)

    def plan_lines(self, report: Mapping[str, Any]) -> Iterator[str]:
        """Yield the report of `plan` as tables."""
        from seko_export.speech.plan import lines

        yield from lines(report)

    def describe(self, config: SpeechBuild, golden: Golden | None) -> SpeechWorkload:
        """Return the object ``workload`` of the manifest: sizes, defaults, limits and recorded steps."""
        from seko_export.speech.description import speech_workload

        return speech_workload(config, golden)

    def describe_model(self, config: SpeechBuild) -> Mapping[str, object]:
        """Return the dimensions of the model."""
        return {**asdict(config.model), "dtype": str(config.target.dtype).split(".")[1]}

    def artifact_name(self, config: SpeechBuild, arch: str) -> str:
        """Return the artifact's default name, from model, cache format and target machine."""
        return f"{config.model.name}-{config.workload.kv_scheme}-{arch}"

    def resolve(self, manifest: Manifest) -> Programs:
        """Return the programs of a speech manifest, checked against the workload's contract."""
        from seko_runtime.speech import contract

        return contract.resolve_speech(cast(SpeechManifest, manifest))

    def cache_format(self, config: SpeechBuild) -> str:
        """Return the name of the KV scheme; an exact cache is called ``bf16`` on every device."""
        scheme = config.workload.kv_scheme
        return "bf16" if scheme == config.exact_scheme else scheme

    def record(
        self,
        config: SpeechBuild,
        weights: Mapping[str, Tensor],
        checkpoint: WeightSource,
        media: MediaSources,
        progress: Progress,
        wait_for_kernels: Callable[[], None],
    ) -> SpeechRecord:
        """Record the results of a prompt and its first steps."""
        del wait_for_kernels  # no other process compiles them
        import torch

        from seko_export.speech.recording import record

        exact: dict[str, Tensor] = {}
        if config.target.fp8:
            pieces = graph_of(config.as_exact).pieces
            needed = family_of(config).weights(pieces, checkpoint)
            exact = {name: tensor for name, tensor in needed if name not in weights}
        recorded = record(config, weights, exact, media.tokenizer, progress)
        if config.target.eager_device == "cuda":
            torch.cuda.empty_cache()  # what compiles engines and verifies the artifact are other processes
        return recorded

    def write_files(self, folder: Path, config: SpeechBuild, media: MediaSources, *, measured: bool) -> None:
        """Write the tokenizer into the artifact's folder."""
        from seko_export.config.media import TOKENIZER_FILE

        del config, measured
        if media.tokenizer is not None:
            copy = folder / TOKENIZER_FILE
            copy.parent.mkdir()
            shutil.copyfile(media.tokenizer, copy)

    def warm_up(self, folder: Path) -> None:
        """Open the rows of an artifact as a pool does, which runs every program."""
        with open_artifact(folder) as artifact, artifact.open_pool():
            pass

    def result(
        self,
        result: BuildResult,
        config: SpeechBuild,
        manifest: Manifest,
        recording: Recording | None,
        report: Mapping[str, Any] | None,
    ) -> SpeechBuildResult:
        """Return the build's result with the size of the caches and the engines' errors against the recorded steps."""
        del config
        recorded = cast("SpeechRecord | None", recording)
        kv = asdict(cast(SpeechManifest, manifest).workload.kv)
        if recorded is not None and recorded.error_vs_exact:
            kv["error_vs_exact"] = dict(recorded.error_vs_exact)
        errors = None if report is None else _largest_errors(report)
        return SpeechBuildResult(
            **vars(result),
            kv=kv,
            golden_error=None if errors is None else max(errors.values()),
            golden_errors=errors,
            golden_rounding=None if recorded is None else dict(recorded.rounding),
        )


def _largest_errors(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest error of each result in a JSON line of `verify`."""
    largest: dict[str, float] = {}
    for row in report["errors"]:
        for name, error in row["errors"].items():
            largest[name] = max(float(error), largest.get(name, 0.0))
    return largest


WORKLOAD = SpeechExport()
