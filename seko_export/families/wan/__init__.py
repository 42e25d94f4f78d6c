"""Wan 2.1 and Self-Forcing: presets, checkpoint keys, engines, programs, buffers, weights."""
