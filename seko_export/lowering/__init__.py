"""Lowering: a module is traced to a checked graph, and a compiled package is reduced to what the runtime needs."""
