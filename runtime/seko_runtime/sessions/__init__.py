"""Sessions of an artifact, for every workload: rows of a pool, pools, snapshots, and the order of engine calls."""
