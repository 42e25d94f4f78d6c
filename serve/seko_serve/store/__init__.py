"""Stores of sessions' snapshots: files that are written once, read, and removed."""
