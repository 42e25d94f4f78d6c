"""Independent truths for the static step; see each module."""
