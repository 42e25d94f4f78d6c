"""The compiler's table of dtypes is filled once, and again when there are more rules."""

from __future__ import annotations

import pytest
from torch._inductor import lowering, utils
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

from seko_export.lowering.patches.dtype_rules import PATCH, dtype_rules_made_once


def test_it_is_filled_once_and_again_for_later_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[object] = []
    fill = DtypePropagationOpsHandler.__init__

    def counted(self: DtypePropagationOpsHandler) -> None:
        filled.append(self)
        fill(self)

    assert lowering.lowerings  # importing them makes the rules
    known = dict(utils.op_dtype_propagation_rules)
    monkeypatch.setattr(utils, "op_dtype_propagation_rules", known)
    monkeypatch.setattr(DtypePropagationOpsHandler, "__init__", counted)
    with dtype_rules_made_once():
        tables = [DtypePropagationOpsHandler() for _ in range(3)]
        assert len(filled) == 1
        assert tables[0] is tables[1] is tables[2]
        assert hasattr(tables[0], "mul")
        known["seko_later"] = next(rule for rule in known.values() if rule.override_return_dtype)
        tables = [DtypePropagationOpsHandler() for _ in range(3)]
        assert len(filled) == 2
        assert tables[0].seko_later() == known["seko_later"].override_return_dtype
        del tables[0].seko_later
    DtypePropagationOpsHandler()
    DtypePropagationOpsHandler()
    assert len(filled) == 4  # as torch does it


def test_this_torch_fills_it_each_time() -> None:
    assert lowering.lowerings
    table, name = DtypePropagationOpsHandler(), next(iter(utils.op_dtype_propagation_rules))
    delattr(table, name)
    DtypePropagationOpsHandler()
    assert PATCH.is_needed() == hasattr(table, name)
