"""`seko-run run` of a video artifact."""
