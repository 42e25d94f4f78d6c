"""The video workload: endless video streams, their pools and sessions, cache slots, prompts, snapshots and decoded
frames."""
