"""Strict loading of checkpoints, and writing of seeded random ones. This package knows no model family, engine or
artifact."""
