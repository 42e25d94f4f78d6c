"""The eager model with which goldens (results for later comparison) are recorded: its engines, the effect of rounding
on its results, and the device of its buffers."""
