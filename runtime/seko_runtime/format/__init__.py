"""What an artifact is on disk: its manifest, its files and their hashes, its tar, its signature."""
