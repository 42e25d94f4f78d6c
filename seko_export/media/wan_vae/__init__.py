"""The Wan 2.1 VAE: `vae.py` is what `media.vaes` finds; the other files are its own."""
