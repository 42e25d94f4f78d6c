"""TensorRT plans: named, not built yet. Says what is missing."""

from __future__ import annotations

import importlib.util

from seko_export.errors import MachineError


def refuse() -> None:
    """Refuse the build with what a TensorRT build needs and what of it is not here.

    Raises
    ------
    MachineError
        Always.
    """
    builder = importlib.util.find_spec("tensorrt") is not None
    found = "the builder is installed" if builder else "the builder (package tensorrt) is not installed"
    raise MachineError(
        f"--backend tensorrt cannot be built yet: {found}, and this version of seko has no plugins for its plans; "
        "use --backend aoti (one file a piece, torch alone on the inference box) or --backend compile"
    )
