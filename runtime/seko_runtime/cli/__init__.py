"""The commands `run`, `verify`, `info` and `unpack`."""
