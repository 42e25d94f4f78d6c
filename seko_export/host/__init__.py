"""The build machine: what it can build, child processes, their folders, progress."""
