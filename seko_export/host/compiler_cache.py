"""Where torch's compiler keeps what it made: a folder of this user's own, since what lies there is loaded and run."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch._inductor.config
from torch._inductor import codecache
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from seko_export.host.environment import user_cache

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def use_private_cache() -> None:
    """Let this process's compiler use `private_cache`, for the headers too that it compiles once for all engines."""
    os.environ[CACHE_VARIABLE] = private_cache()
    if hasattr(codecache, "_HEADER_DIR"):  # else below /tmp, whatever the cache
        headers = Path(os.environ[CACHE_VARIABLE], "precompiled_headers")
        vars(codecache).update(_HEADER_DIR=str(headers), _HEADER_LOCK_DIR=str(headers / "locks"))
    else:
        torch._inductor.config.aot_inductor.precompile_headers = False


def private_cache() -> str:
    """Return the folder for the compiler's cache: this user's own, so that a second build finds the first one's work.

    Torch's own choice, which importing it writes into the environment, is a folder below /tmp that another user
    may have made first; and what lies in the cache is loaded and run. Another choice of the user's stays.
    """
    chosen = os.environ.get(CACHE_VARIABLE, default_cache_dir())
    if chosen != default_cache_dir():
        return chosen
    return str(user_cache() / "inductor")
