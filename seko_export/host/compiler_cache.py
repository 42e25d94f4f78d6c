"""The folder of torch's compiler cache. It belongs to this user alone, because its content is loaded and executed."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import torch
import torch._inductor.config
from torch._inductor import codecache
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from seko_export.host.environment import user_cache

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
HEADERS_KEPT = (
    8  # of 120 to 160 MB each; a build for a CPU uses two, and others of another torch, compiler or option
)


def use_private_cache() -> None:
    """Make this process's compiler use `private_cache`, also for precompiled headers."""
    os.environ[CACHE_VARIABLE] = private_cache()
    if hasattr(codecache, "_HEADER_DIR"):  # else below /tmp, whatever the cache
        headers = Path(os.environ[CACHE_VARIABLE], "precompiled_headers")
        remove_old_headers(headers)
        vars(codecache).update(_HEADER_DIR=str(headers), _HEADER_LOCK_DIR=str(headers / "locks"))
    else:
        torch._inductor.config.aot_inductor.precompile_headers = False


def private_cache() -> str:
    """Return the folder of the compiler cache, owned by this user and reused by later builds.

    Torch's default is a folder below /tmp that another user may have created, and what lies in the cache is executed.
    A folder that the user configured is respected.
    """
    chosen = os.environ.get(CACHE_VARIABLE, default_cache_dir())
    if chosen != default_cache_dir():
        return chosen
    return str(user_cache() / "inductor")


def remove_old_headers(folder: Path) -> None:
    """Remove old precompiled headers, as torch does not; the `HEADERS_KEPT` most recently used stay.

    A compiler that has one open keeps it, and one that looks for it later reads the header itself, which stays.
    """
    found = chain(folder.glob("*.gch"), folder.glob("*.pch"))
    for path in sorted(found, key=_last_used, reverse=True)[HEADERS_KEPT:]:
        path.unlink(missing_ok=True)


def _last_used(path: Path) -> float:
    try:
        told = path.stat()
    except FileNotFoundError:  # another build has removed it
        return 0.0
    return max(told.st_atime, told.st_mtime)
