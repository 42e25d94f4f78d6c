"""The two TensorRT libraries that build plans, and all differences between them. Each TensorRT library is imported when
it is first used."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from seko_export.errors import MachineError


@dataclass(frozen=True)
class TensorRt:
    """A TensorRT library that builds plans.

    Parameters
    ----------
    backend : str
        Name of the backend in ``--backend`` and the manifest.
    title : str
        Name of the library in error messages.
    module : str
        Name of the library's Python module.
    install : str
        Name of the package to install with pip.
    oldest : tuple of int
        The first version that supports the networks that Seko builds.
    header_majors : tuple of int
        Major versions of the C++ headers with which a plugin for this library may be compiled.
    targets : tuple of str
        GPUs for which the library builds although they are not in this machine; empty if the library times kernels on
        the target GPU.
    verifies_with : str or None
        Name of the package with the TensorRT runtime that opens the plans, if it is not the package of the builder.
    packages : tuple of str
        Packages of the library, for the bill of materials.
    missing_link : tuple of str, optional
        A package, the name under which TensorRT's parser opens a library of this package, and the name of the library's
        file. The two names differ, so that the parser does not find the library.
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
        """Import the TensorRT library and return its module.

        Raises
        ------
        MachineError
            If the library is not installed, has no builder, or is too old.
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
        """Return the version of TensorRT's builder, and check that the runtime with which plans are verified is
        installed, too; raises the errors of `load`."""
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
    # major versions of its own headers and of TensorRT's: plugins compiled with headers of 10.14 and 11.1
    # worked in its plans
    header_majors=(1, 10, 11),
    targets=("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121"),
    verifies_with=None,
    packages=("tensorrt-rtx-cu13-libs", "tensorrt-rtx-cu13-bindings"),
    missing_link=("tensorrt_rtx_libs", "libtensorrt_rtx.so", "libtensorrt_rtx.so.1"),
)
