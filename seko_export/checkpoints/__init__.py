"""Checkpoints in, by strict loading, and seeded random ones out; knows no model family, no engine and no artifact."""
