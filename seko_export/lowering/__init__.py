"""Lowering traces a module to a checked graph, and reduces a compiled package to the files that the runtime needs."""
