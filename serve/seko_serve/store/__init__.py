"""Where snapshots of sessions lie: files that are written once, read, and removed."""
