"""The VAEs of Wan 2.1 and 2.2. Other packages use only the module `vae` of this package, which `media.vaes` finds."""
