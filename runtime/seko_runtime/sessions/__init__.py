"""Sessions of an artifact, for every workload: rows, pools, snapshots, and the order of calls."""
