"""Inference box: open an artifact and replay it chunk by chunk."""
