"""The `seko-export` command."""
