"""From a module to a checked graph."""
