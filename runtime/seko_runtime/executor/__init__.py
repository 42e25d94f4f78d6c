"""The executor: lists of engine calls (programs), checked against the engines' signatures and bound to tensors."""
