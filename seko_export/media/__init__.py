"""Models around the transformer, which are VAEs, text encoder, audio encoder and image encoder."""
