"""Tests of minWM."""
