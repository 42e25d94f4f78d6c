"""A patch that makes torch's compiler fill its table of result dtypes once, instead of once for each op of each
kernel.

The table of result dtypes is a singleton, but each access fills the table again with hundreds of entries. Filling the
table takes a fifth of the time to generate an engine's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from seko_export.lowering.patches.patch import Patch, replaced


@contextmanager
def dtype_rules_made_once() -> Iterator[None]:
    """Context manager in which the table of result dtypes is filled again only if torch has more rules than before. The
    patch of the table does not change the generated code."""
    from torch._inductor import utils
    from torch._inductor.codegen import common
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    fill, filled = DtypePropagationOpsHandler.__init__, None

    def fill_if_grown(self: DtypePropagationOpsHandler) -> None:
        nonlocal filled
        rules = (len(utils.op_dtype_propagation_rules), len(common.pointwise_overrides_data))
        if rules != filled:
            fill(self)
            filled = rules

    with replaced(DtypePropagationOpsHandler, __init__=fill_if_grown):
        yield


PATCH = Patch(dtype_rules_made_once)
