"""Errors of the exporter, one class for each cause, with the exit codes of the command."""

from __future__ import annotations

from collections.abc import Mapping


class ExportError(Exception):
    """Base of all errors that `seko-export` prints as one sentence instead of a traceback."""

    exit_code = 1
    report: Mapping[str, object] = {}
    """What a command found before it failed; ``--json`` prints it beside the sentence."""


class UsageError(ExportError):
    """The options contradict each other or name something that does not exist."""

    exit_code = 2


class CheckpointError(ExportError):
    """The checkpoint cannot be read, or is not the expected model."""

    exit_code = 3


class MachineError(ExportError):
    """This machine lacks something: compiler, GPU, library, disk space."""

    exit_code = 5


class NumericError(ExportError):
    """An engine's result differs from the reference by more than its tolerance."""

    exit_code = 6


class LoweringError(ExportError):
    """A traced graph contains something that cannot be replayed."""

    exit_code = 1


class OnnxMissingError(MachineError):
    """A package that the ONNX form needs is not installed."""


class OnnxOpError(LoweringError):
    """An op of the graph has no ONNX form, or needs a newer opset."""


class OnnxDtypeError(LoweringError):
    """A tensor of the graph has a dtype that ONNX cannot hold."""


class LostWriteError(LoweringError):
    """A graph writes an input in place without returning it: ONNX would lose the write."""


class OnnxFormError(LoweringError):
    """A finished ONNX file violates ONNX's rules, or a shape in it is unknown."""


class TensorRtMissingError(MachineError):
    """TensorRT's builder, or the runtime that verifies its plans, is missing or too old."""


class PlanError(LoweringError):
    """TensorRT refused a model, or parsed a different signature."""


class PlanFormError(PlanError):
    """An engine needs something that a TensorRT plan does not support; found before TensorRT is called."""
