"""`python -m tests.fuzz --cases N --seed S`: damage what comes from outside, and tell what ends badly.

With `--corpus` the named cases are run, and with `--corpus --cases N` also drawn ones behind them.

Each case ends in success or in an error of ours, in a child with limits. Hypothesis draws the cases, and makes one that
ends badly smaller; the same arguments draw the same cases.
"""

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
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from .bases import Bases, make_bases
from .cases import KINDS, Case
from .child import Limits, Outcome, run_in_child
from .corpus import CORPUS
from .sight import check_sight

DRAWN = 300  # cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases; return 1 if one ended badly."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", type=int, metavar="N", help=f"how many are drawn; default: {DRAWN}, none beside named ones"
    )
    parser.add_argument("--seed", type=int, default=7, metavar="S")
    parser.add_argument("--kind", action="append", choices=KINDS, help="leave out the cases of other kinds")
    parser.add_argument("--corpus", action="store_true", help="run the named cases")
    parser.add_argument("--named", action="append", metavar="NAME", help="run one named case")
    parser.add_argument("--sample", type=Path, metavar="FOLDER", help="the small artifact; else it is built")
    parser.add_argument("--verbose", action="store_true", help="tell how each case ended")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="seko-fuzz-") as room:
        bases = make_bases(Path(room, "bases"), options.sample)
        check_sight(bases, Path(room, "sight"))
        gc.collect()
        gc.freeze()  # a child's collector then leaves the parent's pages alone
        named = options.named or (sorted(CORPUS) if options.corpus else [])
        uncaught = 0
        if named:
            told = Told(Path(room, "case"), options.verbose)
            for name in named:
                case = CORPUS[name]
                told.run(
                    name,
                    Case(name, lambda folder, case=case: case.refused(bases, folder), case.codes),
                    case.limits,
                )
            uncaught += told.sum_up()
        if options.cases is not None or not named:
            told = Told(Path(room, "case"), options.verbose)
            _draw(bases, told, options)
            uncaught += told.sum_up()
    return int(uncaught > 0)


class Told:
    """Runs cases and counts their endings."""

    def __init__(self, folder: Path, verbose: bool) -> None:
        self.folder, self.verbose = folder, verbose
        self.endings: Counter[str] = Counter()
        self.uncaught = 0

    def run(self, kind: str, case: Case, limits: Limits | None = None) -> Outcome:
        """Run a case, and tell what ends badly."""
        self.folder.mkdir()
        outcome = run_in_child(lambda: case.work(self.folder), case.codes, self.folder, limits)
        shutil.rmtree(self.folder)
        self.endings[f"{kind:12} {outcome.ending}"] += 1
        self.uncaught += not outcome.caught
        if self.verbose or not outcome.caught:
            state = "caught" if outcome.caught else "UNCAUGHT"
            print(f"{state}: {kind}, {case.what}: {outcome.ending}\n    {outcome.detail[-1200:]}", flush=True)
        return outcome

    def sum_up(self) -> int:
        """Print how the cases ended; return how many ended badly."""
        for line, times in sorted(self.endings.items()):
            print(f"{times:6} {line}")
        print(f"{self.endings.total()} cases, {self.uncaught} uncaught")
        return self.uncaught


def _draw(bases: Bases, told: Told, options: argparse.Namespace) -> None:
    """Run drawn cases. Of those that end badly Hypothesis tells the smallest of each place in the code."""
    weighted = [kind for kind, (_, weight) in KINDS.items() for _ in range(weight)]
    kinds = st.sampled_from(options.kind or weighted)

    @seed(options.seed)
    @settings(
        max_examples=options.cases or DRAWN,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        kind = data.draw(kinds)
        case = data.draw(KINDS[kind][0](bases))
        outcome = told.run(kind, case)
        assert outcome.caught, f"{kind}, {case.what}: {outcome.ending}\n{outcome.detail}"

    try:
        run()
    except AssertionError as ended_badly:
        print(f"the smallest case: {ended_badly}")


if __name__ == "__main__":
    sys.exit(main())
