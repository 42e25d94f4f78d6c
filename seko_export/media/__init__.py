"""Models around the transformer: text encoder and VAE."""
