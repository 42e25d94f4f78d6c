"""Tests of the kernels; empty."""
