"""Modules of causal video transformers over a KV ring, for every family."""
