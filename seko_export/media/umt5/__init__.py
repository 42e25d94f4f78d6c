"""The UMT5 text encoder: modules, dimensions, and the names of its files."""
