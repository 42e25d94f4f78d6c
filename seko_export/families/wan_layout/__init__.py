"""Code for families whose checkpoints have Wan's layers and key names."""
