"""Modules of causal video transformers with a ring cache, shared by all families."""
