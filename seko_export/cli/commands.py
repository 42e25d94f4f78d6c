"""The `seko-export` command: options in, one sentence or one JSON line out. No work is done here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from seko_export.cli.delivery import DELIVERY
from seko_export.cli.questions import QUESTIONS
from seko_export.cli.shared import json_option, print_json
from seko_export.host import progress
from seko_export.options.declaration import BuildOptions, Option, declared, flag, numbers
from seko_export.roofline.gpus import GPUS
from seko_runtime.end_signals import until_ended


class SekoGroup(click.Group):
    """A group that ends with our exit codes: 2 usage, 3 checkpoint, 4 artifact, 5 environment, 6 numeric."""

    def invoke(self, ctx: click.Context) -> None:
        """Run the command; every error that we know becomes one sentence."""
        from seko_export.errors import ExportError
        from seko_runtime.errors import SekoRuntimeError

        def command() -> int:
            try:
                super(SekoGroup, self).invoke(ctx)
            except (ExportError, SekoRuntimeError) as error:
                click.echo(f"seko-export: {error}", err=True)
                return error.exit_code
            return 0

        code = until_ended(command, lambda said: click.echo(f"seko-export: {said}", err=True))
        if code:
            ctx.exit(code)


_OLD_SPELLINGS = {"stream-cache": "offload-cache"}  # still taken, and not in the help


def _today(option: str) -> str:
    return _OLD_SPELLINGS.get(option, option)


@click.group(
    cls=SekoGroup, context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _today}
)
@click.version_option(package_name="seko-export")
def main() -> None:
    """Turn checkpoints of causal video diffusion transformers into artifacts that replay chunk by chunk."""


def build_options(*, of_plan: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options that `BuildOptions` declares: all of them, or those that `plan` takes, too."""

    def give(command: Callable[..., Any]) -> Callable[..., Any]:
        for one, option in reversed([*declared()]):  # the last one added stands first in the help
            if of_plan and not option.plan:
                continue
            command = _click_option(one, option)(command)
        return command

    return give


def _click_option(one: Field[Any], option: Option) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    spelled, kind = flag(one.name), str(one.type)
    if option.off is not None:
        return click.option(f"{spelled}/{option.off}", one.name, default=None, help=option.help)
    if kind == "bool":
        return click.option(spelled, one.name, is_flag=True, help=option.help)
    if option.numbers:
        return click.option(spelled, one.name, callback=_numbers, help=option.help)
    types: dict[str, Any] = {"int | None": int, "Path | None": click.Path(path_type=Path)}
    return click.option(
        spelled,
        one.name,
        type=types.get(kind),
        default=one.default,
        show_default=one.default is not None,
        help=option.help,
    )


def _numbers(_: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    return None if value is None else numbers(param.opts[0], value)


@main.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@build_options()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The artifact's folder.")
@click.option("--force", is_flag=True, help="Replace an artifact that is already there.")
@click.option("--no-room-check", is_flag=True, help="Begin even if memory or disk seem too small.")
@json_option
def build(
    checkpoint: Path | None, output: Path, force: bool, no_room_check: bool, as_json: bool, **asked: Any
) -> None:
    """Build an artifact from CHECKPOINT (Self-Forcing .pt, Wan or diffusers safetensors).

    Its dimensions are read from it; `seko-export inspect CHECKPOINT` shows them, and what it leaves open.

    Without a CHECKPOINT: the sample model, which makes video of sentences; with --preset tiny a small one with seeded
    random weights, made on the spot. A large preset wants a CHECKPOINT, or --random-weights for a test of speed.
    """
    import seko_export

    with _progress(quiet=as_json) as tell:
        result = seko_export.build(
            BuildOptions(checkpoint, **asked),
            output,
            replace=force,
            room_check=not no_room_check,
            progress=tell,
            note=lambda sentence: click.echo(sentence, err=True),
        )
    if as_json:
        print_json(result.report())
        return
    kv = result.kv
    click.echo(f"artifact  {result.artifact}  ({result.digest[:16]}, built in {result.build_s:.1f} s)")
    click.echo(f"engines   {result.engine_bytes / 1e6:.2f} MB, weights {result.weight_bytes / 1e6:.1f} MB")
    click.echo(
        f"KV pool   {kv['pool_bytes']} bytes as {kv['scheme']}, {kv['pool_bytes'] / kv['bf16_pool_bytes']:.4f} of bf16"
    )
    if result.kernels == "fused" or result.device == "cuda":
        click.echo(f"kernels   {result.kernels}, attention {result.attention}")
    for error in kv.get("error_vs_exact", ()):
        click.echo(f"          relative error against the exact track: {error:.4f}")
    video = result.golden_video_error
    pictures = "" if video is None else f", video frames {video:.2f} levels of 255"
    click.echo(
        f"verified  engines against the eager model: relative error {result.golden_error:.2e}{pictures}"
    )


for command in (*QUESTIONS, *DELIVERY):
    main.add_command(command)


@main.command()
@click.option("--gpu", required=True, help=f"One of {', '.join(GPUS)}; it need not be here.")
@click.option("--steps", type=int, help="Denoise passes of a chunk.")
@click.option("--fps", type=int, help="Video frames per second that are to be kept up with.")
@build_options(of_plan=True)
@json_option
def plan(gpu: str, steps: int | None, fps: int | None, as_json: bool, **asked: Any) -> None:
    """Predict memory and time of a build on a GPU: does it fit, is it real-time, for how many sessions."""
    import seko_export
    from seko_export.roofline.table import show

    report = seko_export.plan(BuildOptions(**asked), gpu, steps=steps, fps=fps)
    if as_json:
        print_json(report)
    else:
        click.echo(show(report))


@contextmanager
def _progress(*, quiet: bool) -> Iterator[progress.Progress]:
    """Give a callable that shows the build's steps on stderr: bars on a terminal, a line each in a log."""
    if quiet:
        yield progress.silent
        return
    if not Console(stderr=True).is_terminal:
        seen: set[str] = set()

        def tell(step: str, *_: int) -> None:
            if step not in seen:
                seen.add(step)
                click.echo(step, err=True)

        yield tell
        return
    columns = (TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def show(step: str, done: int, total: int) -> None:
            if step not in tasks:
                for task in tasks.values():
                    bars.update(task, completed=bars.tasks[task].total)
                tasks[step] = bars.add_task(step, total=total)
            bars.update(tasks[step], completed=done)

        yield show
