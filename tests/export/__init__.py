"""Tests of the build box; empty."""
