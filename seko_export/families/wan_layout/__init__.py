"""Common parts of checkpoints with Wan's layers, of any family."""
