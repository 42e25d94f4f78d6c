"""The family of Wan 2.1 and Self-Forcing: presets, checkpoint keys, recognition."""
