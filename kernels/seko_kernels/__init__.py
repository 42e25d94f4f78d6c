"""KV-cache formats, their torch references and their Triton kernels."""
