"""The UMT5 text encoder: modules, dimensions, names of its files."""
