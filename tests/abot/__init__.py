"""Tests of ABot-World."""
