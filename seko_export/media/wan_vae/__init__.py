"""The VAEs of Wan 2.1 and 2.2: `vae.py` is what `media.vaes` finds; the other files are its own."""
