"""The VAEs of Wan 2.1 and 2.2. Other packages use only `vae.py`, which `media.vaes` finds."""
