"""AudioVAE V2: latents of speech to samples and back, chunk by chunk."""
