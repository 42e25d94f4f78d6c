"""Engines before compilation: their keys, signatures, modules, and the kernels that their layers use."""
