"""A patch that keeps environment variables out of the compiler's cache, which is shipped in a ``compile`` artifact.

With each graph the compiler saves a script that runs the graph again. The saved script sets every environment variable
whose name contains TORCH or TRITON. The environment variables in the script contain paths and the user's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from seko_export.lowering.patches.patch import Patch, replaced


@contextmanager
def environment_left_out() -> Iterator[None]:
    """Context manager in which saved graphs contain no environment variable."""
    from torch._dynamo.repro import after_aot

    with replaced(after_aot, generate_env_vars_string=lambda **_: ""):
        yield


PATCH = Patch(environment_left_out)
