"""The family of Wan 2.1 and Self-Forcing models: presets, checkpoint keys, recognition."""
