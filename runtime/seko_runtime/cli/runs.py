"""The door of the workloads that `seko-run run` runs."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from seko_runtime.cli.options import Option
from seko_runtime.cli.output import Report
from seko_runtime.doors import Door
from seko_runtime.errors import UsageError


class RunCommand(ABC):
    """The command `seko-run run` for the artifacts of one workload.

    Attributes
    ----------
    kind : str
        Name of the workload in manifests.
    they, it : str
        What its artifacts do, as sentences that refuse an option say it: artifacts that ``make video``, and this one
        ``makes video``.
    """

    kind: str
    they: str
    it: str

    @property
    @abstractmethod
    def options(self) -> Sequence[Option]:
        """The workload's options, among them ``-o`` and ``--format``. Several workloads may declare one option with
        equal settings; the help then has the help texts of all."""

    @abstractmethod
    def run(self, options: argparse.Namespace, manifest: Any) -> Report:
        """Run an artifact with the options of a command line, and return the report.

        Raises
        ------
        SekoRuntimeError
            If the run fails; the subclass tells the cause. A failed run leaves no new file.
        """


RUNS: Door[RunCommand] = Door(
    "seko.runs",
    "workload that seko-run runs",
    RunCommand,  # type: ignore[type-abstract]
    {
        "video": "seko_runtime.cli.video.command:COMMAND",
        "speech": "seko_runtime.cli.speech.command:COMMAND",
    },
    named_by="kind",
)


def command_of(kind: str, options: argparse.Namespace) -> RunCommand:
    """Return the command that runs the artifacts of a workload.

    Raises
    ------
    UsageError
        If no such workload is installed, or the command line has an option of other workloads alone.
    """
    command = RUNS.find(kind)
    own = {entry.names for entry in command.options}
    for _, other in RUNS.every(but=(kind,)):
        for entry in other.options:
            if entry.names not in own and entry.given(options):
                raise UsageError(
                    f"{entry.names[-1]} is for artifacts that {other.they}; this one {command.it}"
                )
    return command
