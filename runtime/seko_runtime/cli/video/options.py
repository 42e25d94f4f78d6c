"""The options of `seko-run run` for a video artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from seko_runtime.cli.options import (
    Option,
    format_option,
    option,
    output_option,
    positive,
    seed_option,
    text_option,
)
from seko_runtime.cli.video.controls import control_options
from seko_runtime.controls.base import INPUTS, ControlOption

VIDEO = "Video (length, prompt)"


def _of_control(taken: ControlOption) -> Option:
    settings: dict[str, Any] = {"metavar": taken.metavar, "help": taken.help}
    if taken.file:
        settings["type"] = Path
    if taken.repeatable:
        settings["action"] = "append"
    return option(taken.name, group=taken.heading, **settings)


OPTIONS = (
    text_option("video: FILE.npy, text embeddings [B, tokens, dim]"),
    seed_option("seed of the noise; row r of a video gets S + r"),
    option(
        "--chunks",
        group=VIDEO,
        type=positive,
        metavar="N",
        help="how many chunks; default: as many as --audio, --video, --keys or --poses last, else 4",
    ),
    option("--prompt", group=VIDEO, metavar="TEXT", help="a sentence; default: that of the recorded chunks"),
    option(
        "--prompts",
        group=VIDEO,
        type=Path,
        metavar="FILE.json",
        help='prompts over time: [{"at_s": 0, "prompt": "..."}, {"at_s": 6.5, "prompt": ..., "recache": true}]; '
        "at_frame in place of at_s: a video frame",
    ),
    option("--steps", group=VIDEO, type=positive, metavar="N", help="denoise passes per chunk"),
    option("--shift", group=VIDEO, type=float, metavar="X", help="shift of their times towards noise"),
    *sorted(map(_of_control, control_options()), key=lambda entry: entry.group == INPUTS),
    option(
        "--events",
        group=INPUTS,
        type=Path,
        metavar="FILE",
        help="replay the recording of a session: its seed, prompt, and all events of its controls",
    ),
    option(
        "--control",
        group=INPUTS,
        action="append",
        metavar="NAME=FILE.json",
        help="events that a control of the artifact takes before the first chunk: an object, or an array of them; "
        "repeatable",
    ),
    option(
        "--input",
        group=INPUTS,
        action="append",
        metavar="NAME=FILE.npy",
        help="an input of the model, such as a camera: one chunk's array, or [chunks, ...]; repeatable",
    ),
    output_option(".npy .y4m .mp4"),
    format_option("npy, y4m, mp4, or raw: rgb24 pictures alone; y4m for - and pipes"),
)
