"""The two TensorRTs that build plans, and all differences between them. Imports neither until it is used."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from seko_export.errors import MachineError


@dataclass(frozen=True)
class TensorRt:
    """A builder of plans.

    Parameters
    ----------
    backend : str
        What ``--backend`` and the manifest call it.
    title : str
        For messages.
    module : str
        What Python imports.
    install : str
        What pip installs for it.
    oldest : tuple of int
        The first version whose networks are as ours need them.
    header_majors : tuple of int
        Major versions of the C++ headers that a plugin for it may be compiled with.
    targets : tuple of str
        GPUs that it builds for without one of them here; empty: it times kernels on the GPU that it builds for.
    verifies_with : str or None
        Package of the runtime that opens its plans, where that is another one.
    packages : tuple of str
        What the bill of materials lists.
    missing_link : tuple of str, optional
        A package, the name by which its parser opens the library in it, and the file that is there instead.
    """

    backend: str
    title: str
    module: str
    install: str
    oldest: tuple[int, int]
    header_majors: tuple[int, ...]
    targets: tuple[str, ...]
    verifies_with: str | None
    packages: tuple[str, ...]
    missing_link: tuple[str, str, str] | None = None

    def load(self) -> ModuleType:
        """Import it.

        Raises
        ------
        MachineError
            If it is not installed, has no builder, or is too old.
        """
        try:
            module = importlib.import_module(self.module)
        except (ImportError, OSError) as fault:
            raise MachineError(
                f"--backend {self.backend} needs {self.title} with its builder, which cannot be imported here: "
                f"{fault}; pip install {self.install}, or take --backend aoti"
            ) from None
        if not hasattr(module, "Builder") or not hasattr(module, "OnnxParser"):
            raise MachineError(
                f"the package {self.module} {module.__version__} has no builder; pip install {self.install}"
            )
        version = tuple(int(part) for part in module.__version__.split(".")[:2])
        if version < self.oldest:
            raise MachineError(
                f"{self.title} {module.__version__} is too old, expected at least {self.oldest[0]}.{self.oldest[1]}: "
                f"its networks are not strongly typed; pip install --upgrade {self.install}"
            )
        return module

    def require(self) -> str:
        """Return the builder's version, and check that the runtime that verifies is installed too; raises as `load`."""
        version = str(self.load().__version__)
        if self.verifies_with is not None and importlib.util.find_spec(self.verifies_with) is None:
            raise MachineError(
                f"--backend {self.backend} verifies what it builds with the package {self.verifies_with}, which is "
                f"not installed; in Seko's folder, pip install './runtime[{self.backend}]'"
            )
        return version


DATA_CENTRE = TensorRt(
    backend="tensorrt",
    title="TensorRT",
    module="tensorrt",
    install="tensorrt-cu13",
    oldest=(11, 0),  # networks are always strongly typed from here on
    header_majors=(11,),
    targets=(),
    verifies_with="tensorrt_lean",
    packages=("tensorrt", "tensorrt-cu13", "tensorrt-cu13-libs", "tensorrt-cu13-bindings"),
)
RTX = TensorRt(
    backend="tensorrt-rtx",
    title="TensorRT for RTX",
    module="tensorrt_rtx_bindings",
    install="'.[tensorrt-rtx]'",
    oldest=(1, 7),
    header_majors=(1, 10, 11),  # its own, and TensorRT's: plugins of 10.14 and 11.1 were built into its plans
    targets=("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121"),
    verifies_with=None,
    packages=("tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu13-bindings"),
    missing_link=("tensorrt_rtx_libs", "libtensorrt_rtx.so", "libtensorrt_rtx.so.1"),
)
