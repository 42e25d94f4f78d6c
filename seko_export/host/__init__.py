"""The machine of a build: what it can do, its compiler processes, their folders, progress."""
