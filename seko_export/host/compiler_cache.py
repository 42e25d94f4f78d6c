"""The folder of torch's compiler cache. The folder of the compiler cache belongs to this user alone, because its
content is loaded and executed."""

from __future__ import annotations

import getpass
import os
import re
import tempfile

from seko_export.errors import MachineError
from seko_export.host.environment import user_cache
from seko_runtime.format.private_files import shared_folder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_NOT_IN_NAMES = r'[\\/:*?"<>|]'  # characters of a user's name for which torch writes _


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
    if chosen is not None and chosen != _torch_default():  # torch sets the variable, too, once it is imported
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


def _torch_default() -> str:
    """Return torch's ``default_cache_dir()``. To ask torch for it would import the compiler, which takes seconds."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{re.sub(_NOT_IN_NAMES, '_', user)}")
