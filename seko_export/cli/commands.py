"""The `seko-export` command: options in, one sentence or one JSON line out. No work is done here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from seko_export.cli.delivery import DELIVERY
from seko_export.cli.questions import QUESTIONS
from seko_export.cli.shared import json_option, print_json
from seko_export.host import progress
from seko_export.roofline.gpus import GPUS
from seko_runtime.end_signals import until_ended

KV_HELP = (
    "KV cache: bf16 (exact; fp32 on a CPU), fp8, int8, int4, int4-hadamard or fp4; KEYS-VALUES, as int8-fp4; with "
    "-sink behind it, as fp4-sink, sink frames stay exact."
)


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


@click.group(cls=SekoGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="seko-export")
def main() -> None:
    """Turn checkpoints of causal video diffusion transformers into artifacts that replay chunk by chunk."""


def _numbers(_: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read whole numbers with commas between them."""
    from seko_export.errors import UsageError

    if value is None:
        return None
    if not all(part.isdecimal() for part in value.split(",")):
        raise UsageError(f"{param.opts[0]} {value!r}: expected whole numbers with commas, as 2,2,21")
    return tuple(map(int, value.split(",")))


def layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that replace fields of a preset's `StreamConfig`."""
    command = click.option(
        "--stream-cache/--resident-cache",
        default=None,
        help="Keep the cache on the host and bring it to the device layer by layer, or all of it there.",
    )(command)
    command = click.option(
        "--window-positions/--stream-positions",
        default=None,
        help="RoPE counts frames within the window, sink first, or from the stream's beginning.",
    )(command)
    command = click.option(
        "--layer-rings",
        callback=_numbers,
        help="Rings of the layers, over and over: 2,2,2,2,21. The largest is --ring-frames.",
    )(command)
    command = click.option(
        "--pass-caches/--context-pass",
        default=None,
        help="One cache a denoise pass, written by itself, or one that a context pass writes.",
    )(command)
    for name, text in (  # the last one added stands first in the help
        ("--ring-frames", "Reusable slots behind the sink."),
        ("--reference-frames", "Latent frames of the cache that a session is given beside its video."),
        ("--sink-frames", "Latent frames at the start that are never evicted."),
        ("--chunk-frames", "Latent frames denoised together."),
        ("--width", "Video width in pixels, a multiple of 16."),
        ("--height", "Video height in pixels, a multiple of 16."),
    ):
        command = click.option(name, type=int, help=text)(command)
    return command


@main.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option(
    "--preset",
    default=None,
    help="Model: sample, tiny, self-forcing-1.3b, wan-14b. Without a checkpoint: sample.",
)
@click.option("--kv", "kv_scheme", default=None, help=KV_HELP)
@click.option("--fp4-kv", is_flag=True, help="Short for --kv fp4: 3.56 times less cache than bf16.")
@click.option(
    "--fp8", is_flag=True, help="Matmuls of the layers in fp8, weights and activations: fused kernels."
)
@click.option(
    "--attention",
    default="auto",
    show_default=True,
    help="torch; bf16: a kernel of ours for Hopper; fp8: the past in 8 bits, from an FP4 cache; auto: the fastest that "
    "was measured.",
)
@click.option(
    "--resident-window",
    is_flag=True,
    help="Bring the past to 8 bits once a chunk, for all layers at once: faster passes, more memory.",
)
@click.option("--fp8-except", help="Layers that --fp8 leaves out: numbers from 0, with commas.")
@click.option("--backend", default="aoti", show_default=True, help="aoti, compile, onnx or tensorrt.")
@click.option(
    "--kernels",
    default="auto",
    show_default=True,
    help="auto, plain (torch's) or fused (ours, around the matmuls).",
)
@click.option(
    "--target", default="auto", show_default=True, help="auto, cpu, or sm_NN of this machine's GPU."
)
@layout_options
@click.option("--batch", help="Rows that one engine call carries; with --sessions sizes of calls: 1,2,4.")
@click.option("--sessions", type=int, help="Make a pool: streams that come and go, so many at a time.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The artifact's folder.")
@click.option(
    "--vae",
    type=click.Path(path_type=Path),
    help="A Wan VAE (.pth, safetensors, diffusers folder): video out, start images in.",
)
@click.option(
    "--text-encoder",
    type=click.Path(path_type=Path),
    help="A UMT5 encoder (.pth, safetensors, transformers folder): prompts as sentences.",
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    help="Its tokenizer.json, where it does not lie beside the encoder.",
)
@click.option("--no-vae", is_flag=True, help="Leave out the sample's VAE: latents come out.")
@click.option("--no-text", is_flag=True, help="Leave out the sample's text encoder: embeddings go in.")
@click.option("--no-ema", is_flag=True, help="Take a .pt's plain weights (generator), not their average.")
@click.option("--force", is_flag=True, help="Replace an artifact that is already there.")
@json_option
def build(
    checkpoint: Path | None,
    preset: str | None,
    kv_scheme: str | None,
    fp4_kv: bool,
    fp8: bool,
    fp8_except: str | None,
    attention: str,
    resident_window: bool,
    backend: str,
    kernels: str,
    target: str,
    output: Path,
    vae: Path | None,
    text_encoder: Path | None,
    tokenizer: Path | None,
    no_vae: bool,
    no_text: bool,
    no_ema: bool,
    force: bool,
    as_json: bool,
    batch: str | None,
    sessions: int | None,
    **layout: int | None,
) -> None:
    """Build an artifact from CHECKPOINT (Self-Forcing .pt, Wan or diffusers safetensors).

    Without a CHECKPOINT: the sample model, which makes video of sentences; with --preset tiny a small one with seeded
    random weights, made on the spot.
    """
    from seko_export.build import build_artifact
    from seko_export.options.resolve import MediaOptions, RowOptions, plan_build
    from seko_runtime.format.whole_files import check_goal

    media = MediaOptions(vae, text_encoder, tokenizer, no_vae, no_text)
    rows = RowOptions(batch, sessions)
    plan = plan_build(
        *(checkpoint, preset, kv_scheme, fp4_kv, target, layout, media),
        rows=rows,
        kernels=kernels,
        backend=backend,
        fp8=fp8,
        fp8_except=fp8_except,
        attention=attention,
        resident_window=resident_window,
    )
    check_goal(output, replace=force)  # before random weights are written, which may be large
    with _checkpoint(plan.checkpoint, plan.config.model) as source, _progress(quiet=as_json) as tell:
        result = build_artifact(
            plan.config,
            source,
            output,
            media=plan.media,
            backend=backend,
            use_ema=not no_ema,
            replace=force,
            progress=tell,
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
    if plan.config.fused or plan.config.device == "cuda":
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
@click.option("--preset", default=None, help="Model, as in build.")
@click.option("--gpu", required=True, help=f"One of {', '.join(GPUS)}; it need not be here.")
@click.option("--kv", "kv_scheme", default=None, help="KV cache, as in build.")
@click.option("--fp4-kv", is_flag=True, help="Short for --kv fp4.")
@click.option("--fp8", is_flag=True, help="As in build.")
@click.option("--kernels", default="auto", show_default=True, help="As in build.")
@click.option("--attention", default="auto", show_default=True, help="As in build.")
@click.option("--resident-window", is_flag=True, help="As in build.")
@click.option("--steps", type=int, help="Denoise passes of a chunk.")
@click.option("--fps", type=int, help="Video frames per second that are to be kept up with.")
@layout_options
@click.option("--batch", help="Rows of a call, as in build.")
@click.option("--sessions", type=int, help="A pool, as in build.")
@click.option("--no-vae", is_flag=True, help="Leave out the Wan VAE: latents come out.")
@click.option("--no-text", is_flag=True, help="Leave out the UMT5-XXL encoder: embeddings go in.")
@json_option
def plan(
    preset: str | None,
    gpu: str,
    kv_scheme: str | None,
    fp4_kv: bool,
    fp8: bool,
    kernels: str,
    attention: str,
    resident_window: bool,
    steps: int | None,
    batch: str | None,
    sessions: int | None,
    no_vae: bool,
    no_text: bool,
    as_json: bool,
    **layout: int | None,
) -> None:
    """Predict memory and time of a build on a GPU: does it fit, is it real-time, for how many sessions."""
    from seko_export.options.resolve import RowOptions
    from seko_export.roofline.predict import Wish, predict
    from seko_export.roofline.table import show

    report = predict(
        Wish(
            preset,
            gpu,
            kv_scheme,
            fp4_kv,
            fp8,
            steps,
            layout,
            no_vae,
            no_text,
            kernels,
            attention,
            resident_window,
            RowOptions(batch, sessions),
        )
    )
    if as_json:
        print_json(report)
    else:
        click.echo(show(report))


@contextmanager
def _checkpoint(named: Path | None, model: Any) -> Iterator[Path]:
    """Give the checkpoint that was named, or a small random one in Self-Forcing's own format."""
    if named is not None:
        yield named
        return
    from seko_export.checkpoints.random import write_random_checkpoint
    from seko_export.host.workshop import workshop
    from seko_runtime.format.whole_files import disk_faults

    with workshop("seko-sample-") as folder:
        path = folder / "sample.pt"
        with disk_faults(path):
            write_random_checkpoint(path, model, format="self-forcing", seed=0)
        click.echo("no checkpoint named: using seeded random weights (noise, not video)", err=True)
        yield path


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
