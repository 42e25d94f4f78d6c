"""The toy as a workload of `seko-run run`: what a distribution from outside brings to be run. No tests."""

from __future__ import annotations

import argparse
from itertools import islice

import numpy as np

from seko_runtime import open_artifact
from seko_runtime.cli.options import format_option, option, output_option, seed_option
from seko_runtime.cli.output import Report
from seko_runtime.cli.runs import RunCommand
from tests.toy_workload.model import KIND, ToyManifest


class ToyRun(RunCommand):
    """Says some words."""

    kind = KIND
    they, it = "say words", "says words"
    options = (
        option("--words", group="Toy (words)", metavar="N,N", help="the words that it says"),
        seed_option(),
        output_option("toys: .npy"),
        format_option("toys: npy"),
    )

    def run(self, options: argparse.Namespace, manifest: ToyManifest) -> Report:
        words = [int(word) for word in options.words.split(",")]
        with (
            open_artifact(options.artifact, device=options.device, trust=options.trust) as artifact,
            artifact.open_pool() as pool,
            pool.open_session(words) as session,
        ):
            most = manifest.workload.positions - len(words)
            samples = np.stack(list(islice(session.speak(), most)))
        np.save(options.output, samples)
        return Report({"model": manifest.name, "steps": len(samples)}, (f"wrote    {options.output}",))


COMMAND = ToyRun()
