"""The commands that report on an artifact, a checkpoint or this machine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from seko_export.cli.shared import (
    answer,
    artifact_argument,
    completing,
    drawn,
    json_option,
    print_json,
    say,
)
from seko_export.options.asked import options_of
from seko_export.roofline.gpus import GPUS
from seko_runtime.cli.output import note

if TYPE_CHECKING:
    from seko_export.host.environment import Finding


@click.command(short_help="Show what an artifact, a checkpoint or a LoRA holds.")
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.option(
    "--gpu",
    help=f"Of a checkpoint: also the bytes that its build takes on one of {', '.join(GPUS)}.",
    shell_complete=completing(lambda: [*GPUS]),
)
@json_option
def inspect(path: Path, gpu: str | None, as_json: bool) -> None:
    """Show what PATH holds: an artifact, a checkpoint, or a LoRA and its base model. Every hash of an artifact is
    checked. For a checkpoint the command shows which other files the model needs, such as a VAE, and
    how to build it.

    `inspect` loads no engine and reads no weight of a checkpoint.
    """
    import seko_export

    answer(seko_export.inspect(path, gpu=gpu), as_json)


@click.command(short_help="List the named models that are known.")
@json_option
def presets(as_json: bool) -> None:
    """List the presets of `build --preset`: sizes, streams, their sources, and the facts that nobody has checked.

    Presets that cannot be built yet are listed with the features that they lack. A build of such a preset is refused.
    """
    from seko_export.workloads.registry import WORKLOADS

    found = [(workload, workload.presets()) for _, workload in WORKLOADS.every()]
    if as_json:
        print_json({name: preset for _, named in found for name, preset in named.items()})
        return
    for workload, named in found:
        for name, preset in named.items():
            say(*workload.preset_lines(name, preset))


@click.command(short_help="Replay the goldens of an artifact and compare.")
@artifact_argument
@json_option
def verify(artifact: Path, as_json: bool) -> None:
    """Replay the goldens (recorded results) of ARTIFACT. If a result differs, the command prints the worst error and
    ends with exit code 6."""
    from seko_export.errors import NumericError
    from seko_export.tools.inspection import replayed_artifact

    report, worst = replayed_artifact(artifact)
    compared = f"worst {worst}"
    if not report["ok"]:
        missed = NumericError(
            f"{artifact} does not reproduce its goldens: {compared}; rebuild it on this kind of machine"
        )
        missed.report = report
        raise missed
    answer(report, as_json, f"{artifact}: {compared}", "verified")


@click.command(short_help="Time an artifact: opening, first chunk, steady chunks.")
@artifact_argument
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Chunks to time, once the cache is full.",
)
@json_option
def bench(artifact: Path, chunks: int, as_json: bool) -> None:
    """Measure the times of ARTIFACT: opening, first chunk, and steady chunks."""
    from seko_export.tools.inspection import bench_artifact

    answer(bench_artifact(artifact, chunks), as_json)


@click.command(short_help="Write all about an artifact on this machine into one file.")
@click.argument("artifact", required=False, type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("seko-report.zip"),
    show_default=True,
    help="The archive; a file that is there is replaced.",
)
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Chunks to time, once the cache is full.",
)
@json_option
def report(artifact: Path | None, output: Path, chunks: int, as_json: bool) -> None:
    """Write what `doctor`, `inspect`, `verify` and `bench` say of ARTIFACT on this machine, and a short clip, into one
    archive, to attach to an issue. Paths, and names of machine and user, are left out.

    Without an ARTIFACT the sample model is built first, as `seko-export try` does."""
    import seko_export
    from seko_export.cli.progress import shown_progress
    from seko_export.tools.field_report import write_report
    from seko_export.tools.trial import try_artifact

    with shown_progress() as tell:
        build_it = partial(seko_export.build, progress=tell, note=note)
        of_sample = partial(try_artifact, options_of(None), build_it)
        found = write_report(artifact or (lambda: of_sample()[0]), output, chunks)
    answer(found, as_json, f"{output}: attach it to an issue", "written")


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say what this machine can build and run, and why not the rest."""
    from rich.markup import escape

    from seko_export.host import environment

    found: list[Finding] = []
    for finding in _findings():
        found.append(finding)
        if as_json:
            continue
        mark = "[green]ok[/]" if finding.ok else "[yellow]no[/]"
        advice = f"  ->  {finding.advice}" if finding.advice else ""
        line = escape(f"{finding.subject}: {finding.found}{advice}")  # extras of packages stand in brackets
        with drawn() as console:
            console.print(f"{mark}  {line}", soft_wrap=True, highlight=False)
    if as_json:
        print_json(environment.report(found))


def _findings() -> Iterator[Finding]:
    from seko_export.host.environment import examine

    yield from examine()
    from seko_export.engines.kernel_table import examine_kernels  # imports torch

    yield examine_kernels()


@click.command(short_help="Show where the time of a steady chunk goes.")
@artifact_argument
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Chunks to run without, then with the profiler; the median one is shown.",
)
@click.option("--top", type=click.IntRange(min=1), default=12, show_default=True, help="Names to list.")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="Write the profiled chunks here, for Chrome or Perfetto."
)
@json_option
def profile(artifact: Path, chunks: int, top: int, trace: Path | None, as_json: bool) -> None:
    """Show where the time of one steady chunk of ARTIFACT goes."""
    from seko_export.tools.profile_ranks import profile_artifact
    from seko_export.tools.profiling import show

    report = profile_artifact(artifact, chunks, top=top, trace=trace)
    if as_json:
        print_json(report)
    else:
        with drawn() as console:
            show(report, console)
