"""The commands `run`, `verify`, `info` and `unpack` of `seko-run`."""
