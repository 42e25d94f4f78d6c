"""Checkpoints in, by strict loading, and seeded random ones out; knows no model family, no engine and no artifact."""

from seko_export.checkpoints.load import Checkpoint, load_model, load_text_encoder, load_vae

__all__ = ["Checkpoint", "load_model", "load_text_encoder", "load_vae"]
