"""Strict loading of checkpoints, and writing of checkpoints with seeded random weights. The package
`seko_export.checkpoints` contains no code for any model family, engine or artifact."""
