"""Streams of video: cache slots, rows, sessions, pools, snapshots, prompts, decoded frames."""
