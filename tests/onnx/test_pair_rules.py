"""Rules for pairs of nodes match what they matched, and are tried at nodes of their own op alone."""

from __future__ import annotations

import pytest
from onnx import ModelProto, TensorProto, helper
from onnxscript import optimizer, rewriter

from seko_export.backends.onnx_form.pair_rules import pair_rules_look_first

HALVES = ((4, 8), (0, 4))  # the rule finds the second half first, or not at all


def halves_added() -> ModelProto:
    """A graph that negates, halves and adds up a tensor [2, 8]."""
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Neg", ["y"], ["z"])]
    constants = []
    for begin, end in HALVES:
        bounds = [f"{begin}", f"{end}", "axis"]
        nodes.append(helper.make_node("Slice", ["z", *bounds], [f"half.{begin}"]))
        constants += [helper.make_tensor(name, TensorProto.INT64, [1], [int(name)]) for name in bounds[:2]]
    constants = [
        *{c.name: c for c in constants}.values(),
        helper.make_tensor("axis", TensorProto.INT64, [1], [1]),
    ]
    nodes.append(helper.make_node("Add", [f"half.{begin}" for begin, _ in HALVES], ["sum"]))
    sides = (("x", [2, 8]), ("sum", [2, 4]))
    x, total = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sides)
    graph = helper.make_graph(nodes, "halves", [x], [total], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_what_is_rewritten_is_the_same_and_most_nodes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    (pair,) = (
        rule._matcher
        for rule in rewriter._DEFAULT_REWRITE_RULES
        if not rule._matcher.pattern.has_single_output_node
    )
    whole = type(pair).match

    def noting(matcher: object, model: object, graph: object, node: object, **options: object) -> object:
        if matcher is pair:
            tried.append(node.op_type)  # type: ignore[attr-defined]
        return whole(matcher, model, graph, node, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(type(pair), "match", noting)
    plain = optimizer.optimize(halves_added())
    assert {"Neg", "Slice", "Add"} <= set(tried), (
        "the rule is not tried everywhere any more: no patch is needed"
    )
    tried.clear()
    with pair_rules_look_first():
        quick = optimizer.optimize(halves_added())
    assert set(tried) == {"Slice"}
    assert "Split" in {node.op_type for node in plain.graph.node}
    assert quick.SerializeToString(deterministic=True) == plain.SerializeToString(deterministic=True)
    assert "match" not in vars(pair)
