"""Goldens and the constants of lossy caches, both recorded from the eager model."""
