"""Speed of the optimiser that torch's ONNX exporter calls.

The optimiser (onnxscript) tries every rewrite rule at every node. For a rule whose pattern ends in two nodes it first
lists all nodes of the graph, also where the node at hand is none of the pattern's. For the functions of a block with an
FP4 cache that is half of the export's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def pair_rules_look_first() -> Iterator[None]:
    """Context manager in which rules of several ending nodes are tried at nodes of the first one's op alone; what the
    rules match is the same."""
    from onnxscript import rewriter

    matchers = [rule._matcher for rule in rewriter._DEFAULT_REWRITE_RULES]
    pairs = [matcher for matcher in matchers if not matcher.pattern.has_single_output_node]
    for matcher in pairs:
        first = matcher.pattern.output_nodes[0].op_identifier()
        if first is not None:  # a pattern may begin with a node of any op
            vars(matcher)["match"] = _of(first, matcher.match)
    try:
        yield
    finally:
        for matcher in pairs:
            vars(matcher).pop("match", None)  # the class's method shows again


def _of(op: tuple[str, str, str], match: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``match`` of a rule for nodes of an op alone."""
    from onnxscript.rewriter import MatchResult

    def match_op(model: Any, graph: Any, node: Any, **options: Any) -> Any:
        if node.op_identifier() != op:
            return MatchResult().fail("The node is of another op.")
        return match(model, graph, node, **options)

    return match_op
