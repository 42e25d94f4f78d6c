"""Errors of the build box, one class per cause, each with the exit code that the CLI ends with."""

from __future__ import annotations


class ExportError(Exception):
    """Base of every error that `seko-export` reports as a sentence instead of a traceback."""

    exit_code = 1


class UsageError(ExportError):
    """The options contradict each other or name something that does not exist."""

    exit_code = 2


class CheckpointError(ExportError):
    """The checkpoint cannot be read, or is not the model that was asked for."""

    exit_code = 3


class MachineError(ExportError):
    """This machine cannot do what was asked: compiler, GPU, library, disk."""

    exit_code = 5


class NumericError(ExportError):
    """An engine's numbers differ from the reference by more than the tolerance."""

    exit_code = 6


class LoweringError(ExportError):
    """A traced graph holds something that would break replay."""

    exit_code = 1


class OnnxMissingError(MachineError):
    """A package that the ONNX form is made with is not installed."""


class OnnxOpError(LoweringError):
    """An op of the graph has no ONNX form, or none as old as the opset that was asked for."""


class OnnxDtypeError(LoweringError):
    """A tensor of the graph has a dtype that ONNX cannot hold."""


class LostWriteError(LoweringError):
    """A graph writes an input in place and does not return it: as ONNX the write would be lost."""


class OnnxFormError(LoweringError):
    """A finished ONNX file breaks ONNX's own rules, or leaves a shape open."""


class TensorRtMissingError(MachineError):
    """TensorRT's builder, or the runtime that verifies its plans, is not here, or is too old."""


class PlanError(LoweringError):
    """TensorRT refused a model, or reads something else out of it."""


class PlanFormError(PlanError):
    """A piece needs what a plan cannot do; found before TensorRT is asked."""
