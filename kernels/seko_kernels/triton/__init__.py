"""Device code, one file per kernel. Callers go through `seko_kernels.ops`."""
