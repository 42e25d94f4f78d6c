"""What stands around the transformer: text encoder and VAE."""
