"""The console script `seko-run`, and the guard that keeps modules of the current directory out of the command.

Until the guard has run, nothing may be imported that Python has not loaded by itself (not even `__future__`). With
`python -m` the current directory is first on the path, and an artifact in the current directory may contain a module of
any name.
"""

import os
import sys
from importlib.machinery import all_suffixes  # loaded by `python -m` itself, as `os` and `sys` are

LIBRARIES = (
    "PIL",
    "av",
    "cryptography",
    "ftfy",
    "numpy",
    "onnxruntime",
    "tensorrt_lean",
    "tensorrt_rtx_bindings",
    "tokenizers",
    "torch",
    "wetext",
)
MANIFEST_FILE = "manifest.json"


def main() -> int:
    """Run the command line of `seko-run`; the entry point of the console script."""
    leave_current_directory(
        as_module=False
    )  # Python puts the script's folder first, not the current directory
    from seko_runtime.cli.commands import main as command

    return command()


def leave_current_directory(*, as_module: bool) -> None:
    """Keep Python from importing modules from the current directory.

    The current directory is removed from `sys.path` if `python -m` put it there (``as_module``), or if an entry of
    PYTHONPATH is empty or ``.``. If the removed directory is an artifact, or contains a module with the name of a
    module that the runtime imports, the process ends with one sentence and exit code 2.
    """
    try:
        here = os.getcwd()
    except OSError:  # it was removed: nothing can be imported from it
        return
    asked = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    by_variable = asked != "" and any(part in ("", ".") for part in asked.split(os.pathsep))
    by_module = as_module and not sys.flags.safe_path
    wrong = [
        number
        for number, place in enumerate(sys.path)
        if (by_variable or (by_module and number == 0)) and os.path.realpath(place) == here
    ]
    if not wrong:
        return
    sys.path[:] = [place for number, place in enumerate(sys.path) if number not in wrong]
    planted = _planted(here)
    if planted is not None:
        print(
            f"error: {planted}, and Python was about to look for modules there; use the command seko-run, or "
            "python -P -m seko_runtime, and no empty entry in PYTHONPATH; or go to another directory",
            file=sys.stderr,
        )
        sys.exit(2)


def _planted(folder: str) -> str | None:
    """Return the name of a file in a folder that Python would import instead of a module of the runtime; None if there
    is none."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:  # it may not be listed; it is out of the path all the same
        return None
    if MANIFEST_FILE in names:
        return f"the current directory holds a {MANIFEST_FILE}, as an artifact does"
    suffixes = tuple(all_suffixes())
    for name in names:
        module = name.partition(".")[0]
        if module not in sys.stdlib_module_names and module not in LIBRARIES:
            continue
        inner = (f"{name}/__init__{suffix}" for suffix in suffixes)
        if name.endswith(suffixes) or any(os.path.lexists(os.path.join(folder, path)) for path in inner):
            return f"the current directory holds {name!r}, which Python would take for its module {module}"
    return None
