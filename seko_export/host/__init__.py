"""The build machine: an examination of what it can build, child processes, temporary folders, and progress
callbacks."""
