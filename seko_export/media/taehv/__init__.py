"""Tiny decoders of Wan's latents, TAEHV and LightTAE. The file `vae.py` has the object that `media.vaes` finds."""
