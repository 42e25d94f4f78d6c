"""The build machine: what it can do, child processes, their folders, progress."""
