"""Code that families share whose checkpoints have Wan's layers and key names."""
