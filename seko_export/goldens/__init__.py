"""The eager model with which goldens (results for later comparison) are recorded: its engines, their rounding, and the
device of its buffers."""
