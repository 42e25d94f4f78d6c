"""Build box: checkpoints in, artifacts out. Nothing of it is needed on an inference box."""
