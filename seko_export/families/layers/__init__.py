"""Modules of causal video transformers whose KV cache is a ring, shared by all model families."""
