"""Strict loading of checkpoints, and seeded random ones; independent of model families, engines and artifacts."""
