"""The command line of `seko-export`: parses options and prints results. The modules of the command line only parse and
print; other modules do the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field
from functools import partial
from pathlib import Path
from typing import Any

import click

import seko_runtime
from seko_export.cli.delivery import keygen, pack, sign, unpack
from seko_export.cli.grouped_help import GroupedCommand, GroupedOption, help_all_option
from seko_export.cli.questions import bench, doctor, inspect, presets, profile, report, verify
from seko_export.cli.shared import SekoGroup, answer, completing, json_option
from seko_export.errors import UsageError
from seko_export.options.asked import all_options, options_of, workload_asked
from seko_export.options.declaration import Group, Option, decimals, flag, numbers
from seko_export.roofline.gpus import GPUS
from seko_runtime.cli.output import note


@click.group(cls=SekoGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(seko_runtime.__version__, prog_name="seko-export")
def main() -> None:
    """Turn checkpoints of models that make video or sound chunk by chunk into artifacts that replay step by step."""


def build_options(*, of_plan: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator that adds the options of `BuildOptions` to a command: all, or only those of `plan`."""

    def give(command: Callable[..., Any]) -> Callable[..., Any]:
        for option_field, option in reversed(all_options().values()):  # the last one stands first in the help
            if option.plan or not of_plan:
                command = _click_option(option_field, option)(command)
        return command

    return give


def _click_option(
    option_field: Field[Any], option: Option
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    spelled, kind = flag(option_field.name), str(option_field.type)
    add = partial(click.option, cls=GroupedOption, group=option.group, common=option.common, help=option.help)
    if option.off is not None:
        return add(f"{spelled}/{option.off}", option_field.name, default=None)
    if kind == "bool":
        return add(spelled, option_field.name, is_flag=True)
    if kind == "tuple[str, ...]":
        return add(spelled, option_field.name, multiple=True)
    if kind in _LISTS:
        return add(spelled, option_field.name, callback=_LISTS[kind])
    return add(
        spelled,
        option_field.name,
        type=_TYPES.get(kind),
        default=option_field.default,
        show_default=option_field.default is not None,
        shell_complete=None if option.values is None else completing(option.values),
    )


def _list_of(parse: Callable[[str, str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    return lambda _, param, value: None if value is None else parse(param.opts[0], value)


_LISTS = {"tuple[int, ...] | None": _list_of(numbers), "tuple[float, ...] | None": _list_of(decimals)}
_TYPES: dict[str, Any] = {
    "int | None": int,
    "float | None": float,
    "Path | None": click.Path(path_type=Path),
}
output_option = partial(click.option, cls=GroupedOption, group=Group.OUTPUT)
room_option = output_option(
    "--no-room-check", is_flag=True, help="Begin even if memory or disk seem too small."
)


@click.command(cls=GroupedCommand, short_help="Build an artifact from a checkpoint, or of the sample model.")
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@build_options()
@output_option(
    "-o",
    "--output",
    common=True,
    type=click.Path(path_type=Path),
    required=True,
    help="The artifact's folder.",
)
@output_option("--force", is_flag=True, help="Replace an artifact that is already there.")
@room_option
@json_option
@help_all_option
def build(
    checkpoint: Path | None, output: Path, force: bool, no_room_check: bool, as_json: bool, **asked: Any
) -> None:
    """Build an artifact from CHECKPOINT (Self-Forcing .pt, Wan or diffusers safetensors).

    The model's dimensions are read from CHECKPOINT; `seko-export inspect CHECKPOINT` shows the dimensions, and what the
    checkpoint leaves open.

    Without a CHECKPOINT the sample model is built, which turns sentences into video. With --preset tiny a small model
    with random weights is built. Presets other than sample and tiny need a CHECKPOINT, or --random-weights for a test
    of speed.
    """
    import seko_export
    from seko_export.cli.progress import shown_progress

    with shown_progress() as tell:
        result = seko_export.build(
            options_of(checkpoint, **asked),
            output,
            replace=force,
            room_check=not no_room_check,
            progress=tell,
            note=note,
        )
    answer(result.report(), as_json, *result.lines())


@click.command("try", cls=GroupedCommand, short_help="Build into a cache and write a video, or run the page.")
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@build_options()
@output_option(
    "-o",
    "--output",
    common=True,
    type=click.Path(path_type=Path),
    default=Path("try.mp4"),
    show_default=True,
    help="The video's file: .mp4, .y4m or .npy.",
)
@output_option("--prompt", common=True, help="A sentence, of a build with a text encoder.")
@output_option("--chunks", common=True, type=click.IntRange(min=1), help="Chunks to make.")
@output_option("--seed", type=int, help="Seed of the noise.")
@output_option(
    "--image",
    common=True,
    type=click.Path(path_type=Path),
    help="The start picture, of a model that takes one.",
)
@output_option(
    "--last-image", type=click.Path(path_type=Path), help="The last picture, of a model that takes two."
)
@output_option(
    "--video", type=click.Path(path_type=Path), help="With --strength: the video to turn into another one."
)
@output_option("--serve", common=True, is_flag=True, help="Run the page of seko-serve instead.")
@room_option
@json_option
@help_all_option
def try_command(
    checkpoint: Path | None,
    output: Path,
    prompt: str | None,
    chunks: int | None,
    seed: int | None,
    image: Path | None,
    last_image: Path | None,
    video: Path | None,
    serve: bool,
    no_room_check: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Build an artifact of CHECKPOINT into a cache folder, and write a video of it, or run its page.

    The artifact is built again only if the files of CHECKPOINT, options or the toolchain changed.
    """
    import seko_export
    from seko_export.cli.progress import shown_progress
    from seko_export.tools.trial import check_shown, serve_page, try_artifact, write_video

    pictures = {"--image": image, "--last-image": last_image}
    of_video = {"--prompt": prompt, "--chunks": chunks, "--seed": seed, **pictures, "--video": video}
    options_of_video = {option: value for option, value in of_video.items() if value is not None}
    if serve and options_of_video:
        raise UsageError(f"--serve: the page asks for these itself: leave out {', '.join(options_of_video)}")
    check_shown(None if serve else output, pictures, video)
    with shown_progress() as tell:
        build_it = partial(seko_export.build, room_check=not no_room_check, progress=tell, note=note)
        artifact, built = try_artifact(
            options_of(checkpoint, **asked), build_it, options_of_video, serves=serve
        )
    report: dict[str, Any] = {"artifact": str(artifact), "built": built}
    line = f"artifact  {artifact}  ({'built' if built else 'nothing changed since it was built'})"
    if serve:
        answer(report, as_json, line)
        click.get_current_context().exit(serve_page(artifact))
    words = [f"{option}={value}" for option, value in options_of_video.items()]
    report = write_video(artifact, output, words) | report
    answer(report, as_json, line, f"video     {output}")


@click.command(cls=GroupedCommand, short_help="Predict memory and time of a build on any GPU.")
@output_option(
    "--gpu",
    required=True,
    help=f"One of {', '.join(GPUS)}; it need not be in this machine.",
    shell_complete=completing(lambda: [*GPUS]),
)
@output_option(
    "--steps",
    group=Group.LAYOUT,
    type=click.IntRange(min=1),
    help="Denoise passes of a chunk; solver steps of a patch of sound.",
)
@output_option(
    "--fps",
    group=Group.LAYOUT,
    type=click.IntRange(min=1),
    help="Video frames per second that a stream must reach.",
)
@build_options(of_plan=True)
@json_option
def plan(gpu: str, steps: int | None, fps: int | None, as_json: bool, **asked: Any) -> None:
    """Predict memory and time of a build on a GPU: whether it fits, whether it is real-time, and for how many
    sessions."""
    import seko_export

    options = options_of(**asked)
    report = seko_export.plan(options, gpu, steps=steps, fps=fps)
    answer(report, as_json, *workload_asked(options).plan_lines(report))


main.add_section("Build", build, try_command, inspect, presets, plan, doctor)
main.add_section("Check and measure", verify, bench, profile, report)
main.add_section("Deliver", pack, unpack, keygen, sign)
