"""The audio VAE of VoxCPM2 (AudioVAE V2): latents of speech to sound samples and back, chunk by chunk."""
