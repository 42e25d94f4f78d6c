"""Patches of torch in the runtime: what they change, and that the installed torch still needs them."""

from __future__ import annotations

import typing

import pytest
from torch._export.serde import schema, serialize

from seko_runtime.backends.torch_patches import resolve_type_hints_once

RECORDS = [{"name": "x"}, {"name": "y"}, {"name": "z"}]


def resolutions(monkeypatch: pytest.MonkeyPatch) -> int:
    """Read three records of one class; return how often its type hints are resolved."""
    seen: list[object] = []
    resolve = typing.get_type_hints
    with monkeypatch.context() as watched:
        watched.setattr(
            typing,
            "get_type_hints",
            lambda record, globalns: seen.append(record) or resolve(record, globalns),
        )
        read = [serialize._dict_to_dataclass(schema.TensorArgument, record) for record in RECORDS]
    assert read == [schema.TensorArgument(**record) for record in RECORDS]
    return seen.count(schema.TensorArgument)


def test_type_hints_are_resolved_once_a_class_and_this_torch_does_it_for_each_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vars(serialize), "typing", typing)  # as it was, also behind this test
    assert resolutions(monkeypatch) == len(RECORDS)
    resolve_type_hints_once()
    assert resolutions(monkeypatch) == 1
    resolve_type_hints_once()  # a second artifact
    assert resolutions(monkeypatch) == 0
