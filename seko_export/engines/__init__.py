"""What an engine is before it is compiled, and which kernels its layers run in."""
