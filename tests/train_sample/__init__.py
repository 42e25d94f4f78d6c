"""Tests of the scripts that train the sample."""
