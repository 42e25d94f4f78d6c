"""Programs of engine calls, checked against their signatures and bound to tensors."""
