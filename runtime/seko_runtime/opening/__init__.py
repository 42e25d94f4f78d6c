"""Opening of artifacts: all checks, then weights and engines, in this process or in a process for each rank."""
