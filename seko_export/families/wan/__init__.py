"""Wan 2.1 and Self-Forcing: presets, checkpoint keys, engines, programs, buffers, weights."""

from seko_export.families.wan.family import FAMILY

__all__ = ["FAMILY"]
