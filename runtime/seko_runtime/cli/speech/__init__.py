"""`seko-run run` of a speech artifact."""
