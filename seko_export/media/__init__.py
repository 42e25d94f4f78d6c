"""Models around the transformer: VAEs, text encoder, audio encoder and image encoder."""
