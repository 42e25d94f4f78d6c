"""The files of an artifact on disk: manifest, other files and their hashes, tar, signature."""
