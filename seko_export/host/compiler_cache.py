"""The folder of torch's compiler cache. The folder of the compiler cache belongs to this user alone, because its
content is loaded and executed."""

from __future__ import annotations

import os

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from seko_export.host.environment import user_cache

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_private_cache() -> None:
    """Make this process's compiler use the folder of `private_cache`."""
    os.environ[CACHE_VARIABLE] = private_cache()


def private_cache() -> str:
    """Return the folder of the compiler cache, owned by this user and reused by later builds.

    Torch's default cache is a folder below /tmp, which another user may have created. torch executes the files in its
    cache. If the user has configured a folder for the compiler cache, that folder is used.
    """
    chosen = os.environ.get(CACHE_VARIABLE, default_cache_dir())
    if chosen != default_cache_dir():
        return chosen
    return str(user_cache() / "inductor")
