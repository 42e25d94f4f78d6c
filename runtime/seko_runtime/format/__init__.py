"""Artifacts on disk: manifest, files and their hashes, tar, signature."""
