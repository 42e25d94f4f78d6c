"""Reports on finished artifacts and checkpoints: contents, speed, profile."""
