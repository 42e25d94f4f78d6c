"""Wan 2.1 and Self-Forcing: presets, engines, programs, buffers, weights."""
