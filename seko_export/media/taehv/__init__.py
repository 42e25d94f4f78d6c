"""Tiny decoders of Wan's latents, TAEHV and LightTAE: `vae.py` is what `media.vaes` finds."""
