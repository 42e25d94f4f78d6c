"""Patches of torch's private functions for opening artifacts; `seko_export.lowering.patches` has the patches for
builds."""

from __future__ import annotations

import types
import typing
from typing import Any

from torch._export.serde import serialize


def resolve_type_hints_once() -> None:
    """Patch torch's reader of exported programs to resolve the type hints of each of its classes once a process.

    Torch 2.11 and 2.13 resolve type hints again for each of a program's thousands of records, which takes most of the
    loading time.
    """
    if vars(serialize).get("typing") is not typing:
        return
    resolved: dict[type, dict[str, Any]] = {}

    def hints(record: type, globalns: dict[str, Any]) -> dict[str, Any]:
        if record not in resolved:
            resolved[record] = typing.get_type_hints(record, globalns)
        return resolved[record]

    vars(serialize)["typing"] = types.SimpleNamespace(**{**vars(typing), "get_type_hints": hints})
