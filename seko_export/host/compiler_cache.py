"""The folder of torch's compiler cache. The folder of the compiler cache belongs to this user alone, because its
content is loaded and executed."""

from __future__ import annotations

import os
import tempfile

from seko_export.errors import MachineError
from seko_export.host.environment import user_cache
from seko_runtime.format.private_files import shared_folder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_private_cache() -> None:
    """Make this process's compiler use the folder of `private_cache`."""
    os.environ[CACHE_VARIABLE] = private_cache()


def private_cache() -> str:
    """Return the folder of the compiler cache, owned by this user and reused by later builds.

    Torch's default cache is a folder below /tmp, which another user may have created. torch executes the files in its
    cache. If the user has configured a folder for the compiler cache, that folder is used.

    Raises
    ------
    MachineError
        If the folder cannot be made, or others may have put files into it.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    # torch sets the variable, too, once it has used its default; to ask torch for it would import the compiler
    if chosen is not None and not chosen.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
        return chosen
    folder = user_cache() / "inductor"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = shared_folder(folder)
    except OSError as problem:
        fault = f"cannot be made ({problem.strerror or problem})"
    if fault is not None:
        raise MachineError(
            f"{folder} {fault}, and torch runs the code that it keeps there: set XDG_CACHE_HOME to a folder of your "
            "own, or remove it"
        )
    return str(folder)
