"""Recorded chunks (goldens) and the constants of lossy caches, both from the eager model."""
