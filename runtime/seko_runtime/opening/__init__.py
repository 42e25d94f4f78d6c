"""Opening of an artifact: all checks, then weights and engines, in this process or in a process for each rank (GPU)."""
