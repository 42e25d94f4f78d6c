"""Puts the transformer that `train_switch.py` made in the place of the shipped one, if it reaches the bars."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from scripts.train_sample.judge_switch import SHEET
from scripts.train_sample.progress import read_ema
from scripts.train_sample.shipped import CHECKPOINT, REPORT, SAMPLE

LEAST_SWITCHED, LARGEST_FALL = 0.8, 0.02
CARD = "MODEL.md"
_MEASURED = re.compile(r"- \d+ held-out prompts,.*?(?=\n\n)", re.DOTALL)
_TAUGHT = re.compile(r"\n\nThen prompts that change:.*?(?=\n\n## Measured)", re.DOTALL)


def ship(run: Path, sample: Path, images: Path | None) -> None:
    """Exchange the sample's transformer and what its card says of it.

    Parameters
    ----------
    run : Path
        The folder that `train_switch.py` and `judge_switch.py` wrote.
    sample : Path
        The sample's folder; its VAE, text encoder and configuration stay.
    images : Path or None
        Where the picture of switches goes.

    Raises
    ------
    ValueError
        If too few switches with a rebuilt cache are followed, single prompts are followed less often than before, or
        names, shapes or dtypes are not those of the transformer that it replaces.
    """
    judged = json.loads((run / REPORT).read_text(encoding="utf-8"))
    require_good(judged)
    fresh, shipped = load_file(run / CHECKPOINT), load_file(sample / CHECKPOINT)
    kinds = [{name: (tuple(t.shape), t.dtype) for name, t in state.items()} for state in (fresh, shipped)]
    if kinds[0] != kinds[1]:
        odd = sorted(name for name in {*fresh, *shipped} if kinds[0].get(name) != kinds[1].get(name))
        raise ValueError(
            f"{run / CHECKPOINT} is no transformer of {sample}, first difference {odd[:2]}; train it from there"
        )
    shutil.copyfile(run / CHECKPOINT, sample / CHECKPOINT)
    card = (sample / CARD).read_text(encoding="utf-8")
    digest = hashlib.sha256((sample / CHECKPOINT).read_bytes()).hexdigest()
    (sample / CARD).write_text(told_card(card, judged, parts_of(read_ema(run)[1]), digest), encoding="utf-8")
    if images is not None:
        shutil.copyfile(run / SHEET, images / "sample-switches.png")


def require_good(judged: dict[str, Any]) -> None:
    """Refuse weights that do not reach the bars.

    Raises
    ------
    ValueError
        See `ship`.
    """
    before, after = judged["before"], judged["after"]
    share = after["rebuilt"]["followed"]
    if share < LEAST_SWITCHED:
        raise ValueError(
            f"{share:.0%} of the switches are followed, expected {LEAST_SWITCHED:.0%}; train longer"
        )
    for name in ("start", "end"):
        fall = before[name]["followed"] - after[name]["followed"]
        if fall > LARGEST_FALL + 1e-9:
            raise ValueError(
                f"at the {name}, {100 * fall:.1f} points fewer prompts are followed than before, at most "
                f"{100 * LARGEST_FALL:.0f} may be lost; train with more rows that do not switch"
            )


def parts_of(facts: dict[str, Any]) -> list[dict[str, float]]:
    """Return steps and minutes of a run, behind those of the runs that it began from, the earliest first."""
    before = parts_of(facts["began_from"]) if "began_from" in facts else []
    return [*before, {name: facts[name] for name in ("steps", "minutes")}]


def told_card(card: str, judged: dict[str, Any], parts: list[dict[str, float]], digest: str) -> str:
    """Return the model card with this training, these figures and this digest.

    Raises
    ------
    ValueError
        If the card has no place for one of them.
    """
    before, after = judged["before"], judged["after"]
    start, end = after["start"], after["end"]
    minutes = " + ".join(f"{part['minutes']:.1f}" for part in parts)
    steps = " + ".join(str(part["steps"]) for part in parts)
    earlier = [f"{100 * before[name]['followed']:.1f}" for name in ("start", "end")]
    attributes = ", ".join(f"{n} {100 * v:.0f} %" for n, v in start.items() if n not in ("clips", "followed"))
    measured = (
        f"- {start['clips']} held-out prompts, exact detectors, all attributes of the prompt shown: "
        f"{100 * start['followed']:.1f} % in the first 3.6 s,\n"
        f"  {100 * end['followed']:.1f} % in the last 3.6 s of {judged['video_seconds']} s; "
        f"before the training on switches {' and '.join(earlier)} %.\n"
        f"  By attribute at the start: {attributes}.\n"
        f"- {after['rebuilt']['clips']} held-out pairs of prompts, the second given after 7.5 s: all of its attributes "
        f"shown in the 3.6 s that\n"
        f"  begin 1.5 s later: {100 * after['rebuilt']['followed']:.0f} % with `recache=True`, "
        f"{100 * after['plain']['followed']:.0f} % without; before the training "
        f"{100 * before['rebuilt']['followed']:.0f} % and {100 * before['plain']['followed']:.0f} %.\n"
        "  [Eight of them](../../docs/images/sample-switches.png), from 0.75 s before the switch on."
    )
    taught = (
        f"\n\nThen prompts that change: {minutes} minutes on one GPU, {steps} steps\n"
        "(`train_switch.py`), each part from the one before. The teacher was the student of the\n"
        "table, which saw the stream from the switch on; the new student saw all of it."
    )
    card = _TAUGHT.sub("", card)
    for pattern, put in (
        (_MEASURED, measured),
        (re.compile(r"(?=\n\n## Measured)"), taught),
        (re.compile(rf"[0-9a-f]{{64}}(?=  {re.escape(CHECKPOINT)})"), digest),
    ):
        card, replaced = pattern.subn(lambda _, put=put: put, card, count=1)
        if not replaced:
            raise ValueError(f"the card has nothing like {pattern.pattern!r}; write it with export_sample.py")
    return card


def main(arguments: list[str] | None = None) -> int:
    """Put trained switches into the shipped sample; ends in one JSON line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("made", type=Path, help="folder that train_switch.py and judge_switch.py wrote")
    parser.add_argument("--sample", type=Path, default=SAMPLE)
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    options = parser.parse_args(arguments)
    ship(options.made, options.sample, options.images)
    print(json.dumps({"stage": "shipped", "sample": str(options.sample)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
