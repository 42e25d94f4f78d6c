"""Checks whether the installed TensorRT can build plans. Imports it only when asked."""

from __future__ import annotations

from seko_export.errors import TensorRtMissingError

OLDEST = (11, 0)  # networks are always strongly typed from here on


def require_tensorrt() -> str:
    """Return the version of TensorRT, or refuse one that cannot build.

    Raises
    ------
    TensorRtMissingError
        If it is not installed, has no builder, or is too old.
    """
    try:
        import tensorrt as trt
        import tensorrt.plugin
    except (ImportError, OSError) as fault:
        raise TensorRtMissingError(
            f"--backend tensorrt needs TensorRT with its builder, which cannot be imported here: {fault}; "
            "pip install tensorrt-cu13, or take --backend aoti"
        ) from None
    if not hasattr(trt, "Builder") or not hasattr(tensorrt.plugin, "aot_impl"):
        raise TensorRtMissingError(
            f"the package tensorrt {trt.__version__} has no builder or no plugins ahead of time; "
            "pip install tensorrt-cu13"
        )
    found = tuple(int(part) for part in trt.__version__.split(".")[:2])
    if found < OLDEST:
        raise TensorRtMissingError(
            f"TensorRT {trt.__version__} is too old: plans are strongly typed, which it takes {OLDEST[0]}.{OLDEST[1]} "
            "for; pip install 'tensorrt-cu13>=11'"
        )
    return str(trt.__version__)
