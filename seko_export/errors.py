"""Errors of the exporter: a class for each exit code of the command. The message of an error states the cause."""

from __future__ import annotations

from collections.abc import Mapping


class ExportError(Exception):
    """Base class of all errors that `seko-export` prints as one sentence instead of a traceback."""

    exit_code = 1
    report: Mapping[str, object] = {}
    """Results of the command before it failed, which ``--json`` prints together with the message."""


class UsageError(ExportError):
    """The options contradict each other or name something that does not exist."""

    exit_code = 2


class CheckpointError(ExportError):
    """The checkpoint cannot be read, or is not the expected model."""

    exit_code = 3


class MachineError(ExportError):
    """This machine lacks something that the command needs: a compiler, GPU, library, disk space."""

    exit_code = 5


class NumericError(ExportError):
    """An engine's result differs from the reference by more than its tolerance."""

    exit_code = 6


class RunError(ExportError):
    """A process of ``seko-run`` failed, and has already printed its error message to the stderr of this process."""


class LoweringError(ExportError):
    """An engine cannot be made: its graph cannot be replayed, or has no ONNX form, or TensorRT refuses the graph."""
