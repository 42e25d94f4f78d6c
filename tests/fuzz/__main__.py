"""`python -m tests.fuzz --cases N --seed S`: run cases by number, and tell those that end badly."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not outlive a fork

import torch

from .bases import Bases, make_bases
from .cases import KINDS, drawn, install_double, run_case, run_named
from .corpus import CORPUS
from .guarded import Outcome
from .selfcheck import check_sight


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; return 1 if one ended badly."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=300, metavar="N", help="how many, from --first on")
    parser.add_argument("--seed", type=int, default=7, metavar="S")
    parser.add_argument("--first", type=int, default=0, metavar="K")
    parser.add_argument("--case", type=int, metavar="K", help="run one alone, and tell how it ended")
    parser.add_argument("--corpus", action="store_true", help="run the named cases in place of numbered ones")
    parser.add_argument("--named", action="append", metavar="NAME", help="run one named case alone")
    parser.add_argument(
        "--kind",
        action="append",
        choices=[kind.name for kind in KINDS],
        help="leave out the cases of other kinds",
    )
    parser.add_argument("--verbose", action="store_true", help="tell how each case ended")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    install_double()
    with tempfile.TemporaryDirectory(prefix="seko-fuzz-") as room:
        bases = make_bases(_made(Path(room) / "bases"))
        gc.collect()
        check_sight(bases, Path(room) / "sight")
        gc.freeze()  # a child's collector then leaves the parent's pages alone
        return _run(bases, Path(room) / "case", options)


def _run(bases: Bases, folder: Path, options: argparse.Namespace) -> int:
    endings: Counter[str] = Counter()
    named = options.named or (sorted(CORPUS) if options.corpus else [])
    alone = options.case is not None or bool(options.named)
    first, count = (options.first, options.cases) if options.case is None else (options.case, 1)
    numbers = range(first, first + count)
    if options.kind:
        numbers = [number for number in numbers if drawn(options.seed, number)[0].name in options.kind]
    runs: Sequence[str | int] = named or numbers
    uncaught = 0
    for run in runs:
        _made(folder)
        if isinstance(run, str):
            kind, outcome = "corpus", run_named(bases, run, folder)
            again = f"--named {run}"
        else:
            outcome = run_case(bases, options.seed, run, folder)
            kind, again = drawn(options.seed, run)[0].name, f"--case {run} --seed {options.seed}"
        shutil.rmtree(folder)
        endings[f"{kind:12} {outcome.ending}"] += 1
        uncaught += not outcome.caught
        if alone or options.verbose or not outcome.caught:
            _tell(kind, outcome, again)
    if not alone:
        for line, times in sorted(endings.items()):
            print(f"{times:6} {line}")
    print(f"{len(runs)} cases, {uncaught} uncaught")
    return int(uncaught > 0)


def _tell(kind: str, outcome: Outcome, again: str) -> None:
    state = "caught" if outcome.caught else "UNCAUGHT"
    print(f"{state}: {kind}: {outcome.ending} [{outcome.notes}]\n  python -m tests.fuzz {again}", flush=True)
    for line in outcome.detail.splitlines()[-12:]:
        print(f"    {line[:300]}", flush=True)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
