"""A patch that keeps torch's precompiled headers in the configured compiler cache, and removes old ones.

Torch writes precompiled headers into a folder below /tmp, whatever cache is configured. Another user may have created
the folder below /tmp, and files in the folder are compiled into engines. Torch never removes a precompiled header.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from seko_export.lowering.patches.patch import Patch, replaced

HEADERS_KEPT = (
    # headers of 120 to 160 MB each; a build for a CPU uses two, and another torch, compiler or option needs
    # others
    8
)


@contextmanager
def headers_in_the_cache() -> Iterator[None]:
    """Context manager in which precompiled headers are in the compiler's cache. Older headers are removed from the
    cache.

    With a torch release that names the folder of headers differently, no headers are precompiled.
    """
    import torch._inductor.config
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if not hasattr(codecache, "_HEADER_DIR"):
        with torch._inductor.config.patch({"aot_inductor.precompile_headers": False}):
            yield
        return
    folder = Path(cache_dir(), "precompiled_headers")
    remove_old_headers(folder)
    with replaced(codecache, _HEADER_DIR=str(folder), _HEADER_LOCK_DIR=str(folder / "locks")):
        yield


def remove_old_headers(folder: Path) -> None:
    """Remove all but the `HEADERS_KEPT` most recently used precompiled headers.

    A compiler that has a removed header open can still read it. A compiler that looks for a removed header later uses
    the source header, which stays.
    """
    headers = chain(folder.glob("*.gch"), folder.glob("*.pch"))
    for path in sorted(headers, key=_last_used, reverse=True)[HEADERS_KEPT:]:
        path.unlink(missing_ok=True)


def _last_used(path: Path) -> float:
    try:
        status = path.stat()
    except FileNotFoundError:  # another build has removed the file
        return 0.0
    return max(status.st_atime, status.st_mtime)


PATCH = Patch(headers_in_the_cache)
