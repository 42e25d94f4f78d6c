"""Strict loading of checkpoints, and writing of seeded random ones. The package `seko_export.checkpoints` contains no
code for any model family, engine or artifact."""
