"""The options that every training script takes, and what follows from them; each script adds its own."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from scripts.train_sample.progress import Budget, LegError
from scripts.train_sample.shapes import COUNT_ODDS


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add what every training script takes."""
    parser.add_argument("--folder", type=Path, required=True, help="of the run: state, losses, curve")
    parser.add_argument("--minutes", type=float, default=5.0, help="training in all, over every resume")
    parser.add_argument(
        "--more", type=float, metavar="MINUTES",
        help="go on behind a finished run, from its EMA: minutes of a new warm-up and fall of the rate; needs --resume",
    )  # fmt: skip
    parser.add_argument(
        "--deadline", type=float, default=math.inf, help="epoch seconds at which to save and stop"
    )
    parser.add_argument("--steps", type=int, help="an end in steps instead of minutes, for rehearsals")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--batch-scale", type=float, default=1.0, help="multiplies each batch; every rank has one of its own"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile, layer by layer; pays from a minute on"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: try the whole chain on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def add_graphs_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--graphs``, for the scripts whose steps can be captured."""
    parser.add_argument(
        "--graphs",
        action="store_true",
        help="replay whole steps as CUDA graphs: the host no longer bounds them; resumes do not repeat exactly",
    )


def add_odds_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--count-odds``, for the scripts that train on scenes with captions."""
    parser.add_argument(
        "--count-odds",
        type=lambda text: tuple(float(part) for part in text.split(",")),
        default=COUNT_ODDS,
        metavar="ONE,TWO,THREE",
        help="odds of scenes with so many shapes; what is judged is drawn by the usual ones",
    )


def budget_of(options: argparse.Namespace) -> Budget:
    """Return the budget that `add_run_options` asked for.

    Raises
    ------
    LegError
        If ``--more`` comes without ``--resume``.
    """
    more = options.more is not None
    if more and not options.resume:
        raise LegError("--more goes on behind a run that is there; pass --resume with it")
    minutes = options.more if more else options.minutes
    return Budget(minutes, options.deadline, options.steps, options.save_every, more)


def scaled(batch: int, options: argparse.Namespace) -> int:
    """Return a batch times ``--batch-scale``, at least 1."""
    scale: float = options.batch_scale
    return max(1, round(batch * scale))
