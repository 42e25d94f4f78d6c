"""The options that every training script takes; each script adds its own."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from scripts.train_sample.shapes import COUNT_ODDS


def add_run_options(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add what every training script takes; ``steps`` is how many it takes if not told otherwise."""
    parser.add_argument("--folder", type=Path, required=True, help="of the run: state and losses")
    parser.add_argument("--steps", type=int, default=steps, help="in all, over every resume")
    parser.add_argument("--resume", action="store_true", help="go on with the folder's run, if there is one")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile, layer by layer; pays from a minute on"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes: try the whole chain on a CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def add_odds_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--count-odds``, for the scripts that train on scenes with captions."""
    parser.add_argument(
        "--count-odds",
        type=lambda text: tuple(float(part) for part in text.split(",")),
        default=COUNT_ODDS,
        metavar="ONE,TWO,THREE",
        help="odds of scenes with so many shapes; what is judged is drawn by the usual ones",
    )
